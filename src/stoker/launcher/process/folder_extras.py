"""Makes what the shipped tree of a working folder does not hold: empty folders, and links that lead out of it.

The launcher makes them with the rights of the training, in the folder that the training owns. What is there already stays.
"""

from __future__ import annotations

import contextlib
import os
from typing import Mapping, Sequence


def make(code: str, folders: Sequence[str], links: Mapping[str, str]) -> None:
    """`code`: the working folder. Several tasks may share it and do this at once. OSError: a link cannot be made."""
    for path in folders:
        # An earlier generation may have put a file there. A training that needs the folder reports what is wrong.
        with contextlib.suppress(OSError):
            os.makedirs(_inside(code, path), exist_ok=True)
    for path, target in links.items():
        place = _inside(code, path)
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(target, place)


def _inside(code: str, path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is not a plain relative path")
    return os.path.join(code, path)
