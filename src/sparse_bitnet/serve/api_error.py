# SPDX-License-Identifier: Apache-2.0
"""Answers other than success: OpenAI's error object, and what pydantic objects to in one line."""

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
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        # Half a character, of a template or a file of strangers, cannot be sent.
        message = message.encode(errors="replace").decode()
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


def invalid_body(error: ValidationError) -> ApiError:
    """The objection that got furthest, by the name of the parameter."""
    errors = error.errors(include_url=False, include_context=False)
    # The member of a union that got furthest is the one that was meant, and an empty list is one.
    first = max(errors, key=lambda entry: (len(entry["loc"]), entry["type"] == "too_short"))
    kind = first["type"]
    *way, last = first["loc"] or ("",)
    # Pydantic also names the members of unions, such as "str" and "list[...]".
    names = [str(part) for part in way if str(part).isidentifier() or isinstance(part, int)]
    is_member = last in ("str", "constrained-str") or str(last).startswith("literal[")
    if last != "" and (kind == "extra_forbidden" or not is_member):
        names.append(str(last))
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
    # Python refuses to print integers with thousands of digits.
    is_short = isinstance(given, str | float) or (type(given) is int and abs(given) < 2**64)
    shown = f", not {given!r:.60}" if is_short else ""
    objection = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where or 'body'}: {objection}{shown}", param=param)
