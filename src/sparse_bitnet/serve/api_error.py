# SPDX-License-Identifier: Apache-2.0
"""Answers other than success: OpenAI's error object, and pydantic's complaints in one line."""

from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """An answer other than success, as OpenAI words it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = error_body(status, message, param, code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # Half a character, of a template or a file of strangers, cannot be sent.
    message = message.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid_body(error: ValidationError) -> ApiError:
    """The complaint that got furthest, by the name of the parameter."""
    found = error.errors(include_url=False, include_context=False)
    # Of a union's complaints, the one that got furthest is about the form that was meant, and an empty
    # list is one.
    first = max(found, key=lambda entry: (len(entry["loc"]), entry["type"] == "too_short"))
    kind = first["type"]
    *way, last = first["loc"] or ("",)
    # Pydantic also names the members of unions, such as "str" and "list[...]".
    parts = [str(part) for part in way if str(part).isidentifier() or isinstance(part, int)]
    is_member = last in ("str", "constrained-str") or str(last).startswith("literal[")
    is_member &= kind != "extra_forbidden"
    names = [*parts, *([] if is_member or last == "" else [str(last)])]
    where, param = ".".join(names)[:200], names[0][:200] if names else None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}")
    if kind == "extra_forbidden":
        message = f"unknown parameter: {where}"
        return ApiError(400, message, param=where, code="unknown_parameter")
    if kind == "missing":
        message = f"{where} is missing"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    given = first["input"]
    # Not of integers with thousands of digits, which Python refuses to print.
    is_short = isinstance(given, str | float) or (type(given) is int and abs(given) < 2**64)
    shown = f", not {given!r:.60}" if is_short else ""
    complaint = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where or 'body'}: {complaint}{shown}", param=param)
