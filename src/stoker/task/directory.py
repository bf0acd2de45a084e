"""Access to a task directory: on this machine (`LocalTaskDir`), or in a pod through its courier (`RemoteTaskDir`).

Reading is the same for both and always cheap: the small growing files of a remote directory (journal, status, log,
metrics) are mirrored on this machine, as far as they have arrived. Writing, `settle`, `catch_up` and everything in
`RemoteAccess` may go over the network: it blocks and may raise OSError. Call it from a thread, never from an event loop's.
"""

from __future__ import annotations

from typing import (
    Any,
    BinaryIO,
    Callable,
    Dict,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    runtime_checkable,
)

from stoker.task import formats, layout


class StillHeld(RuntimeError):
    """A launcher or its guardian holds the directory: it is not dead."""


class Unreachable(OSError):
    """The task directory does not answer: its pod, its node or the way there is gone, for now or for good."""


class TaskDir(Protocol):
    """What the control loop needs of a task directory, wherever it is. May be used from any thread."""

    @property
    def root(self) -> str:
        """The directory (of a remote one: its mirror)."""
        ...

    @property
    def turns(self) -> Optional[str]:
        """The file by which those who move its bytes share what the training leaves of a CPU (see
        `stoker.linux.idle_throttle`). None: the training is on another machine."""
        ...

    @property
    def shares(self) -> bool:
        """Whether its checkpoints are on a volume with those of other tasks: then it is a `SharingTaskDir`."""
        ...

    def write_order(self, order: formats.Order) -> None: ...
    def write_secrets(self, values: Mapping[str, str]) -> None: ...
    def forget_secrets(self) -> None: ...
    def exists(self) -> bool: ...
    def info(self) -> Optional[formats.TaskInfo]: ...
    def order(self) -> Optional[formats.Order]: ...
    def status(self) -> Optional[formats.Status]: ...
    def journal(self, offset: int = 0) -> Tuple[List[Dict[str, Any]], int]: ...
    def lines(self, path: str, offset: int, limit: int = 4 << 20) -> Tuple[List[Dict[str, Any]], int]: ...
    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes: ...
    def size(self, path: str) -> int: ...
    def list(self, path: str = "") -> List[str]: ...

    def settle(self, generation: int) -> None:
        """The launcher is proven dead and will not come back: journal what was complete, and `lost` (see
        stoker.launcher.recovery). Afterwards everything it left can be read. Raises StillHeld, and
        Unreachable: then what has arrived counts."""
        ...

    def catch_up(self, timeout: float) -> bool:
        """Wait until everything written there by now can be read. False: not within the time."""
        ...

    def abandon(self, reason: str) -> None:
        """The task is given up: from now on everything that goes over the network fails at once, also what was being
        tried again. What has arrived can be read. Never blocks."""
        ...


@runtime_checkable
class RemoteAccess(TaskDir, Protocol):
    """A task directory behind a courier: how its bytes are moved. Used by `stoker.transfer` alone. Everything may be
    repeated; what was cut short goes on where it was."""

    def place(
        self, manifest: bytes, path: str, blob: Callable[[str], BinaryIO], *, replace: bool = False
    ) -> None:
        """Make the directory `path` hold exactly the tree of `manifest` (a Tree's canonical JSON), complete or
        not at all. `blob` opens the content with this SHA-256; only what the other side lacks is sent, and
        it verifies every byte. Without `replace` a directory that is not empty is left alone."""
        ...

    def walk(self, path: str, *, max_entries: int) -> List[Dict[str, Any]]:
        """Regular files and links beneath `path`, each {"path", "size", "mode", "sha256"} or {"path", "link"};
        ValueError past `max_entries`. Empty when there is no such directory."""
        ...

    def fetch(self, path: str, offset: int, limit: int) -> bytes:
        """Bytes of a regular file there, not of the mirror. FileNotFoundError when it is not there."""
        ...

    def discard(self, path: str) -> None:
        """Remove a file or tree there. Absent is success."""
        ...


class SharingTaskDir(RemoteAccess, Protocol):
    """One whose checkpoints are on a volume with those of other tasks of this server. `fetch` and `discard` also take
    paths there (`layout.SharedPart.path`)."""

    def parts(self) -> Tuple[List[layout.SharedPart], List[str]]:
        """Whose parts are there, as far as this one may see them, its own too; and the runs whose directories there are
        empty (`discard` of `shared/RUN` removes one)."""
        ...

    def salvage(
        self, part: layout.SharedPart, generation: int, carried: Sequence[int]
    ) -> List[Dict[str, Any]]:
        """The task of this part is given up, or proven gone: as a journal would say it, which checkpoints were complete in
        it, oldest first, but for those with these numbers, and which are damaged. Copies are in the part, to be
        verified by their hashes. FileNotFoundError where there is no such part."""
        ...
