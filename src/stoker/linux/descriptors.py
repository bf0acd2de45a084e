"""File descriptors that are closed at the end of a block."""

import os


class Closing:
    """`with Closing(os.open(...)) as fd:` closes the descriptor when the block ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
