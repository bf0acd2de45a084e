"""`stacks FILE PID...`: writes the stacks of these processes to the file and to stdout.

It uses py-spy where the body's environment has it and the kernel allows it; else faulthandler, in processes that have imported
`stoker` (sdk/stacks.py). For other processes it shows only the command, the state and the kernel function they wait in. The
exit code is 0, 1 or 2: py-spy, faulthandler, neither.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import List, Optional

from stoker.linux import syscalls
from stoker.task import formats, layout

MOST = 64
"""Largest number of processes."""
PATIENCE = 20.0
ANSWER = 2.0
"""Seconds for a process to write its own stacks. The handler runs at once, unless the process is stopped."""


def main(argv: List[str]) -> int:
    if not argv:
        print("usage: stacks FILE PID...", file=sys.stderr)
        return 64
    found = [Process(int(word)) for word in argv[1:] if word.isdigit()]
    pythons = [process for process in found if process.python][:MOST]
    ways = set()
    parts = []
    for process in pythons or found[:MOST]:
        text = process.by_py_spy()
        if text is not None:
            ways.add(0)
        else:
            text = process.by_itself()
            ways.add(2 if text is None else 1)
        parts.append(f"{process.describe()}\n{text or ''}".rstrip() + "\n")
    whole = "\n".join(parts) or "no process is left\n"
    _write(argv[0], whole)
    sys.stdout.write(whole)
    sys.stdout.flush()
    return min(ways, default=2)


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.command = syscalls.read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        self.python = "python" in self._program()

    def _program(self) -> str:
        try:
            return os.path.basename(os.readlink(f"/proc/{self.pid}/exe"))
        except OSError:
            return self.command.split(" ")[0]

    def describe(self) -> str:
        waits = syscalls.read_text(f"/proc/{self.pid}/wchan").strip().strip("0")
        state = ""
        for line in syscalls.read_text(f"/proc/{self.pid}/status").splitlines():
            if line.startswith("State:"):
                state = line.split(None, 1)[1]
        where = f", in {waits}" if waits else ""
        return f"process {self.pid}: {self.command[:200]} ({state or 'gone'}{where})"

    def by_py_spy(self) -> Optional[str]:
        tool = shutil.which("py-spy")
        if tool is None:
            return None
        try:
            done = subprocess.run(
                [tool, "dump", "--pid", str(self.pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        text = done.stdout.decode("utf-8", "replace")
        return text if done.returncode == 0 and text.strip() else None

    def by_itself(self) -> Optional[str]:
        """Make the process write its own stacks, if it has a handler: without one the signal would end it."""
        folder = os.environ.get("STOKER_STACKS")
        path = os.path.join(folder or "", layout.stacks_of(self.pid))
        if not folder or not os.path.isfile(path) or not self._listens():
            return None
        before = os.stat(path).st_size
        os.kill(self.pid, signal.SIGUSR2)
        deadline = time.monotonic() + ANSWER
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = os.stat(path).st_size
            if now == size and now > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read().decode("utf-8", "replace")
        return text or None

    def _listens(self) -> bool:
        for line in syscalls.read_text(f"/proc/{self.pid}/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & (1 << (signal.SIGUSR2 - 1)))
        return False


def _write(path: str, text: str) -> None:
    """Replace the file in one step, as it may be read at the same time."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = formats.create(temporary, 0o644)
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as exc:
        print(f"stoker: the stacks cannot be saved: {exc}", file=sys.stderr)
