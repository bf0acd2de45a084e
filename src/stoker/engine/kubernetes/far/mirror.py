"""What has arrived of a far task directory."""

from __future__ import annotations

from pathlib import Path


class Mirror:
    """The growing files of one far task directory, on this machine. A cache: dropped when it may be wrong."""

    def __init__(self, root: Path, *, source: str, boot_id: str, limit: int = 4 << 30) -> None:
        """`source`: which directory this mirrors (the pod's UID); with another one, or after another boot of this
        machine, what is there is dropped. `limit`: bytes it may take."""
        raise NotImplementedError

    @property
    def root(self) -> Path:
        raise NotImplementedError

    def drop(self) -> None:
        """Delete it. The object is of no use afterwards."""
        raise NotImplementedError
