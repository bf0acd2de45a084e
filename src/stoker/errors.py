"""Every error a user may see, in one tree.

    StokerError                  what happened; `hint` says what to do; `code` is stable and machine-readable
    ├── SpecError                a job file or flag is wrong: file, line, key, value, choices
    ├── Refused                  understood and declined: can never fit, not yet on this engine, a forbidden path
    ├── NotFound                 no such run, checkpoint, blob...
    ├── Conflict                 not in this state (resume of a running run, same key and another body)
    ├── Unauthorized             missing or wrong token, foreign Host or Origin
    ├── TooLarge                 over a cap on bytes, entries, depth
    ├── ServerUnreachable        no server answers (client side)
    ├── BlobDamaged              stored or transferred bytes do not have their hash
    ├── ImageError               an image cannot be read, built or pushed: damaged, too large, for another platform
    │   ├── ImageMissing         the registry says there is no such image
    │   ├── RegistryDenied       the registry requires a login, or another one
    │   └── RegistryUnreachable  the registry does not answer; says nothing about the image
    ├── EngineError
    │   └── EngineUnavailable    the backend cannot be reached; says nothing about its tasks
    └── StoreError
        ├── StoreBusy            locked or connection lost; the caller may try again
        ├── NotLeading           another server leads; this one writes nothing
        ├── StoreDamaged         the database fails its checks; writes are refused
        ├── StoreLost            the database is gone, but the home holds data of its runs
        ├── DiskFull             names the disk and its free space
        └── DiskReadOnly         names the read-only file system

Vendor errors are translated into these where they arise. Messages are lower-case, without a full stop,
and name the value; the hint is a separate sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class StokerError(Exception):
    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, hint: str | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


class SpecError(StokerError):
    code = "spec"
    http_status = 422
    exit_code = 2


class Refused(StokerError):
    code = "refused"
    http_status = 422
    exit_code = 2


class NotFound(StokerError):
    code = "not-found"
    http_status = 404


class Conflict(StokerError):
    code = "conflict"
    http_status = 409


class Unauthorized(StokerError):
    code = "unauthorized"
    http_status = 401


class TooLarge(StokerError):
    code = "too-large"
    http_status = 413


class ServerUnreachable(StokerError):
    code = "server-unreachable"
    http_status = 503


class BlobDamaged(StokerError):
    code = "blob-damaged"


class ImageError(StokerError):
    code = "image"
    http_status = 422


class ImageMissing(ImageError):
    code = "image-missing"


class RegistryDenied(ImageError):
    code = "registry-denied"


class RegistryUnreachable(ImageError):
    code = "registry-unreachable"
    http_status = 503


class EngineError(StokerError):
    code = "engine"


class EngineUnavailable(EngineError):
    code = "engine-unavailable"
    http_status = 503


class StoreError(StokerError):
    code = "store"


class StoreBusy(StoreError):
    code = "store-busy"
    http_status = 503


class NotLeading(StoreError):
    code = "not-leading"
    http_status = 503


class StoreDamaged(StoreError):
    code = "store-damaged"
    http_status = 503


class StoreLost(StoreError):
    code = "store-lost"
    http_status = 503


class DiskFull(StoreError):
    code = "disk-full"
    http_status = 507


class DiskReadOnly(StoreError):
    code = "disk-read-only"
    http_status = 503


def from_json(body: Mapping[str, Any]) -> StokerError:
    """Rebuilds the error that a server sent. An unknown code becomes a plain StokerError."""
    by_code = {cls.code: cls for cls in _subclasses(StokerError)}
    cls = by_code.get(str(body.get("code")), StokerError)
    return cls(
        str(body.get("message", "unknown error")), hint=body.get("hint"), details=body.get("details") or {}
    )


def _subclasses(cls: type[StokerError]) -> list[type[StokerError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found.extend(_subclasses(sub))
    return found
