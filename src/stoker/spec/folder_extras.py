"""What a working folder has and a tree does not: links that lead out of it, and empty folders.

They are in the record of a submission, as `links` and `folders`. Trees stay as they are, and no link in a tree leads out.
The server follows none of these links: the launcher makes them, in the task's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import Refused, SpecError
from stoker.spec.tree import MAX_PATH, check_path

MAX_LINKS = 1000
MAX_FOLDERS = 10_000


@dataclass(frozen=True)
class FolderExtras:
    """Paths are relative to the working folder."""

    links: Mapping[str, str] = field(default_factory=dict)
    """Path -> absolute target."""
    folders: tuple[str, ...] = ()
    """Empty folders. The folders above them are implied."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> FolderExtras:
        """From the record of a run. Checks everything: a record is sent by a client. Raises SpecError."""
        links, folders = record.get("links") or {}, record.get("folders") or []
        if not isinstance(links, Mapping) or not isinstance(folders, (list, tuple)):
            raise SpecError("`links` must map paths to targets, and `folders` must be a list of paths")
        if len(links) > MAX_LINKS or len(folders) > MAX_FOLDERS:
            raise SpecError(f"more than {MAX_LINKS} links that lead out, or {MAX_FOLDERS} empty folders")
        for path in (*links, *folders):
            if not isinstance(path, str):
                raise SpecError(f"not a path: {str(path)[:80]!r}")
            check_path(path)
        for path, target in links.items():
            _check_target(path, target)
        return cls(dict(links), tuple(folders))

    def refuse_links(self, reason: str) -> None:
        """Raises Refused that names the first link. `reason`: why its target is not there."""
        for path, target in self.links.items():
            raise Refused(
                f"the link {path!r} points to {target!r}, outside the working directory, and {reason}",
                hint=f"Name the data as an input or a mount, copy it into the folder, or add {path!r} to .stokerignore.",
                details={"key": "workdir", "link": path},
            )


def _check_target(path: str, target: object) -> None:
    if not isinstance(target, str) or not target.startswith("/") or "\0" in target:
        raise SpecError(f"the target of the link {path!r} is not an absolute path: {str(target)[:80]!r}")
    try:
        size = len(target.encode())
    except UnicodeEncodeError as exc:
        raise SpecError(f"the target {target!a} of the link {path!r} is not UTF-8") from exc
    if size > MAX_PATH:
        raise SpecError(f"the target of the link {path!r} is over {MAX_PATH} bytes")
