"""Replays the recorded file operations of real writers in a directory, one by one."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[2] / "corpus" / "traces"
NAMES = sorted(path.stem for path in TRACES.glob("*.json"))
FLAGS = {"c": os.O_CREAT, "x": os.O_EXCL, "t": os.O_TRUNC, "a": os.O_APPEND, "w": 0}

Tree = dict[str, bytes]
"""Files by path."""


class Trace:
    def __init__(self, name: str) -> None:
        raw = json.loads((TRACES / f"{name}.json").read_text(encoding="utf-8"))
        self.ops: list[list[Any]] = raw["ops"]
        self.blobs = [zlib.decompress(base64.b64decode(blob)) for blob in raw["blobs"]]

    def complete(self, scratch: Path) -> dict[str, list[Tree]]:
        """By checkpoint: every state that it had when the writing call returned."""
        scratch.mkdir()
        states: dict[str, list[Tree]] = {}
        with Player(self, scratch) as player:
            for op in self.ops:
                player.play(op)
                for name in op[1] if op[0] == "done" else ():
                    states.setdefault(name, []).append(tree(scratch, name))
        return states


class Player:
    """Performs operations in a directory; leaving the context is a kill of the writer."""

    def __init__(self, trace: Trace, directory: Path) -> None:
        self.trace = trace
        self.directory = directory
        self.elsewhere = directory.parent / f"{directory.name}-elsewhere"
        self.files: dict[int, int] = {}

    def path(self, name: str) -> Path:
        if not name.startswith("@/"):
            return self.directory / name
        self.elsewhere.mkdir(exist_ok=True)
        return self.elsewhere / name[2:]

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()

    def play(self, op: list[Any], first: float = 0.0, last: float = 1.0) -> None:
        """Perform one operation; of a write only the bytes between these fractions."""
        kind, *rest = op
        part = {"part": (first, last)} if kind == "write" else {}
        getattr(self, "do_" + kind.replace("-", "_"))(*rest, **part)

    def do_open(self, number: int, path: str, flags: str) -> None:
        mode = os.O_RDWR | os.O_CLOEXEC
        for letter in flags:
            mode |= FLAGS[letter]
        self.files[number] = os.open(self.path(path), mode, 0o644)

    def do_write(self, number: int, offset: int, blob: int, part: tuple[float, float]) -> None:
        data = self.trace.blobs[blob]
        first, last = (int(len(data) * edge) for edge in part)
        fd = self.files[number]
        if offset < 0:
            os.write(fd, data[first:last])
        else:
            os.pwrite(fd, data[first:last], offset + first)

    def do_truncate(self, number: int, size: int) -> None:
        os.ftruncate(self.files[number], size)

    def do_truncate_path(self, path: str, size: int) -> None:
        os.truncate(self.path(path), size)

    def do_close(self, number: int) -> None:
        os.close(self.files.pop(number))

    def do_rename(self, source: str, target: str) -> None:
        os.rename(self.path(source), self.path(target))

    def do_unlink(self, path: str) -> None:
        os.unlink(self.path(path))

    def do_mkdir(self, path: str) -> None:
        os.mkdir(self.path(path))

    def do_rmdir(self, path: str) -> None:
        os.rmdir(self.path(path))

    def do_symlink(self, target: str, path: str) -> None:
        os.symlink(target, self.directory / path)

    def do_done(self, names: list[str]) -> None:
        """No file operation: a call returned."""


def tree(directory: Path, name: str) -> Tree:
    """The files of one checkpoint: a file, a directory, or files with a common stem."""
    found: Tree = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        top = relative.parts[0]
        if (
            path.is_file()
            and not path.is_symlink()
            and (top == name or top.startswith((f"{name}.index", f"{name}.data-")))
        ):
            found[str(relative)] = path.read_bytes()
    return found
