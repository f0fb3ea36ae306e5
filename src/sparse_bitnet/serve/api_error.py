# SPDX-License-Identifier: Apache-2.0
"""Error answers: OpenAI's error object, and pydantic's errors in one line."""

import re
from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """Raised to answer with an HTTP error in OpenAI's format."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        # A lone surrogate, from an untrusted template or file, cannot be sent.
        message = message.encode(errors="replace").decode()
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


def invalid_body(error: ValidationError) -> ApiError:
    """Return the error for pydantic's first error, with the name of the parameter."""
    errors = error.errors(include_url=False, include_context=False)
    # Of a union's errors, report the most deeply nested one; on a tie, that of an empty list.
    first = max(errors, key=lambda entry: (len(entry["loc"]), entry["type"] == "too_short"))
    kind, given = first["type"], first["input"]
    # Pydantic also names the members of unions, such as "str" and "list[...]".
    names = [
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (re.fullmatch(r"\w+", part) and part != "str")
    ]
    where, param = ".".join(names)[:200], names[0][:200] if names else None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {where}", param=where, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{where} is missing", param=param, code="missing_required_parameter")
    # Python refuses to print integers with thousands of digits.
    is_short = isinstance(given, str | float) or (type(given) is int and abs(given) < 2**64)
    shown = f", not {given!r:.60}" if is_short else ""
    objection = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where or 'body'}: {objection}{shown}", param=param)
