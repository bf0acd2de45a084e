"""The shape of answers: one for JSON, one for errors. Numbers that JSON cannot hold become strings."""

from __future__ import annotations

import json
import logging
import math
import secrets
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from stoker import disks
from stoker.errors import NotFound, SpecError, StokerError

log = logging.getLogger(__name__)


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(value: Any) -> bytes:
    """JSON bytes. NaN and infinities become strings: JSON has no numbers for them, and browsers refuse them."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode()


def number(value: float) -> float | str:
    """A number in a form that JSON can hold."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def error(exc: StokerError, status: int | None = None) -> JsonAnswer:
    answer = JsonAnswer({"error": exc.to_json()}, status or exc.http_status)
    if answer.status_code == 503:
        answer.headers["Retry-After"] = "1"
    return answer


def unexpected(exc: BaseException) -> JsonAnswer:
    """The answer to an unforeseen error. The details go to the log only, under the answer's id."""
    number_of = secrets.token_hex(4)
    log.error("unexpected error %s", number_of, exc_info=exc)
    return error(
        StokerError(
            f"something went wrong in the server (error {number_of})",
            hint=f"The details are in the server's log: look for {number_of} in `stoker server logs`.",
            details={"id": number_of},
        )
    )


def install(app: FastAPI, home: Path) -> None:
    """Gives every failure of a request the same shape."""

    async def stoker_error(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, StokerError)
        return error(exc)

    async def invalid(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return error(_invalid(exc))

    async def http_error(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return _http_error(exc)

    async def os_error(_: Request, exc: Exception) -> Response:
        refused = disks.refusal(exc, home) if isinstance(exc, OSError) else None
        return unexpected(exc) if refused is None else error(refused)

    app.add_exception_handler(StokerError, stoker_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(OSError, os_error)


def _invalid(exc: RequestValidationError) -> SpecError:
    """Names the place and the reason, never the value, which may be a secret."""
    first = exc.errors()[0]
    where = (
        ".".join(str(part)[:80] for part in first["loc"] if part not in ("body", "query", "path")) or "body"
    )
    reason = str(first["msg"])
    return SpecError(
        f"the request is wrong at {where!r}: {reason[:1].lower()}{reason[1:]}",
        hint="docs/api.md describes every request.",
        details={"where": where, "errors": len(exc.errors())},
    )


def _http_error(exc: HTTPException) -> JsonAnswer:
    if isinstance(exc.__cause__, StokerError):
        # Raised while the body was read (it is too large): the framework wraps such errors.
        return error(exc.__cause__)
    if exc.status_code == 404:
        return error(NotFound("no such route", hint="docs/api.md lists the routes."))
    if exc.status_code == 405:
        answer = error(NotFound("this route does not have that method"), 405)
        answer.headers.update(exc.headers or {})
        return answer
    return error(SpecError("the request cannot be understood"), exc.status_code)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
