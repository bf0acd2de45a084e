"""Access to a task directory: on this machine (`LocalTaskDir`), or in a pod through its courier (`RemoteTaskDir`).

Reading is the same for both and always cheap: journal, status, log and metrics of a remote directory are mirrored on this
machine. Writing, `settle`, `catch_up` and everything in `RemoteAccess` may go over the network: they block and may raise
OSError. Never call them from the thread of an event loop.
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
    """The task directory does not answer: its pod, its node or the network is gone, temporarily or permanently."""


class TaskDir(Protocol):
    """A task directory as the control loop uses it, local or remote. May be used from any thread."""

    @property
    def root(self) -> str:
        """The directory (of a remote one: its mirror)."""
        ...

    @property
    def turns(self) -> Optional[str]:
        """The file whose lock limits background work beside the training (see `stoker.linux.idle_throttle`).
        None: the training is on another machine."""
        ...

    @property
    def shared_folder(self) -> Optional[str]:
        """The working folder that the tasks of its attempt share on this machine. None: it has its own."""
        ...

    @property
    def shares(self) -> bool:
        """Whether its checkpoints are on a volume shared with other tasks. Then it is a `SharingTaskDir`."""
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
        """The launcher is proven dead: write the complete checkpoints and `lost` into the journal (see
        stoker.launcher.recovery). Afterwards everything it left can be read. Raises StillHeld, or Unreachable: then
        only what has been mirrored can be read."""
        ...

    def catch_up(self, timeout: float) -> bool:
        """Wait until everything written so far can be read. False: not within the time."""
        ...

    def abandon(self, reason: str) -> None:
        """Give up the task: from now on every network call fails at once, also one that is being retried. What has been
        mirrored can still be read. Never blocks."""
        ...


@runtime_checkable
class RemoteAccess(TaskDir, Protocol):
    """A task directory behind a courier, with the calls that move files. Only `stoker.transfer` uses them. Every call may
    be repeated; an interrupted transfer continues where it stopped."""

    def place(
        self, manifest: bytes, path: str, blob: Callable[[str], BinaryIO], *, replace: bool = False
    ) -> None:
        """Make the directory `path` hold exactly the tree of `manifest` (a Tree's canonical JSON), atomically. `blob` opens
        the content with a given SHA-256. Only content that the courier lacks is sent, and the courier verifies it.
        Without `replace` a directory that is not empty is left unchanged."""
        ...

    def walk(self, path: str, *, max_entries: int, skip: Sequence[str] = ()) -> List[Dict[str, Any]]:
        """Regular files and links beneath `path`, each {"path", "size", "mode", "sha256", "mtime"} or {"path", "link"};
        ValueError past `max_entries`. Empty when there is no such directory. `skip`: names of directories that need not be
        listed; a courier of an earlier version lists them all the same."""
        ...

    def fetch(self, path: str, offset: int, limit: int) -> bytes:
        """Bytes of a regular file there, not of the mirror. FileNotFoundError when it is not there."""
        ...

    def discard(self, path: str) -> None:
        """Remove a file or tree there. One that does not exist is no error."""
        ...


class SharingTaskDir(RemoteAccess, Protocol):
    """A task directory whose checkpoints are on a volume shared with other tasks of this server. `fetch` and `discard` also
    accept paths on that volume (`layout.SharedPart.path`)."""

    def parts(self) -> Tuple[List[layout.SharedPart], List[str]]:
        """The parts on the volume that this task may see, its own among them; and the runs whose directories there are
        empty (`discard` of `shared/RUN` removes one)."""
        ...

    def salvage(
        self, part: layout.SharedPart, generation: int, carried: Sequence[int]
    ) -> List[Dict[str, Any]]:
        """Find the checkpoints in the part of a task that is given up or proven gone.

        Returns journal entries of the complete ones, oldest first and without the numbers in `carried`, and of the damaged
        ones. Their copies stay in the part, to be verified by their hashes. FileNotFoundError where there is no such part.
        """
        ...
