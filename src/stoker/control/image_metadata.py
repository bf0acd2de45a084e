"""The configuration of a job's image, read from its registry at submit.

A launcher as the container's command replaces the image's own ENTRYPOINT, CMD, WORKDIR and USER. So Stoker reads them
first and applies them itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stoker.engine.base import Engine
from stoker.errors import ImageError, Refused, StokerError
from stoker.settings import Settings
from stoker.spec import Job

if TYPE_CHECKING:
    from stoker.images import Registry

log = logging.getLogger(__name__)


class ImageMetadata:
    """Reads images. Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.images
        self._registry: Registry | None = None

    def describe(self, job: Job, engines: Sequence[Engine]) -> dict[str, Any]:
        """For the run's record: the image's reference, pinned to a digest, and its configuration; {} without an image.
        If the image cannot be read and the job names a command: the reference and the error."""
        images = {engine.surroundings(job).image for engine in engines} - {""}
        if not images:
            return {}
        if len(images) > 1:
            return {}  # the candidate clusters have different default images: none is read
        name = images.pop()
        if job.launcher == "none":
            return {"asked": name}
        try:
            with _as_image_error(name):
                return {"asked": name, **self._read(name)}
        except Refused:
            raise
        except StokerError as exc:
            if not job.argv():
                raise Refused(
                    f"the image {name} cannot be read, and the job names no command: {exc.message}",
                    hint="Write `run:` in the job; what the image would run is only known from its registry.",
                ) from exc
            log.info("image %s cannot be read: %s", name, exc)
            return {"asked": name, "unread": exc.message}

    def _read(self, name: str) -> dict[str, Any]:
        if self._registry is None:
            from stoker.images import HostRules, Logins, Registry  # lazy: most homes never read an image

            given = self._settings
            self._registry = Registry(
                logins=Logins.load(),
                rules=HostRules(
                    plain=tuple(given.plain), inside=tuple(given.inside), ca_files=tuple(given.ca_files)
                ),
            )
        config = self._registry.config(name)
        found: dict[str, Any] = {
            "reference": config.reference,
            "entrypoint": list(config.entrypoint),
            "cmd": list(config.cmd),
            "workdir": config.workdir,
            "user": config.user,
            "size": config.size,
        }
        if config.user:
            account = self._registry.account(config)
            found["user"] = str(account.uid) if account.gid is None else f"{account.uid}:{account.gid}"
        return found


@contextmanager
def _as_image_error(name: str) -> Iterator[None]:
    """Turns other errors into ImageError: the answers of a registry are not trusted."""
    try:
        yield
    except (OSError, ValueError) as exc:
        raise ImageError(f"the image {name} cannot be read: {exc}") from exc
