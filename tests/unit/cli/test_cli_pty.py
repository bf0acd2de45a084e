"""On a real terminal: a pseudo-terminal, a real process, real signals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'stoker.cli.main', *sys.argv[1:]])"
)


class Screen:
    """A command on a terminal of its own."""

    def __init__(self, *argv: str, columns: int = 80, rows: int = 24) -> None:
        self.text = ""
        self.fd, inside = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *argv],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(inside)

    def until(self, pattern: str) -> None:
        deadline = time.monotonic() + 30
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"waited for {pattern!r} in {self.text!r}"
            self._read()

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self) -> int:
        deadline = time.monotonic() + 120
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.text!r}"
        return self.process.wait(timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def screen(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Screen]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    opened: list[Screen] = []

    def start(*argv: str, **size: int) -> Screen:
        opened.append(Screen(*argv, **size))
        return opened[-1]

    yield start
    fake.hold.set()
    for one in opened:
        one.close()


def line(text: str) -> dict[str, Any]:
    return {"task": "worker-0", "attempt": 1, "stream": "stdout", "t": 1.0, "text": text, "partial": False}


STOPPED = {"end": {"state": "stopped", "exit_code": None, "cause": "stopped"}}


@pytest.mark.parametrize(
    ("answer", "code", "said", "stops"),
    [
        ("s\n", 143, "last words", [{"kill": False}]),
        ("\x03", 143, "last words", [{"kill": False}]),
        ("d\n", 0, "digits-7f3k goes on", []),
    ],
    ids=["stop", "a second Ctrl-C stops", "detach leaves the run alone"],
)
def test_ctrl_c_asks(
    fake: Any, screen: Any, answer: str, code: int, said: str, stops: list[dict[str, bool]]
) -> None:
    fake.logs = [[line("step 1"), {"hold": True}, line("last words"), STOPPED]]
    fake.on_stop = lambda run: fake.hold.set()
    shown = screen("run", "train.py")
    shown.until("step 1")
    shown.type("\x03")
    shown.until(r"detach, stop or continue\? \[d/s/c\] ")
    shown.type(answer)
    shown.until(said)
    assert shown.exit_code() == code
    assert [body for _, path, _, body in fake.requests if path.endswith("/stop")] == stops


def test_a_waiting_run_shows_the_reason(fake: Any, screen: Any) -> None:
    fake.logs = [
        [
            {"hold": True},
            line("step 1"),
            {"end": {"state": "succeeded", "exit_code": 0, "cause": "completed"}},
        ]
    ]
    fake.why = {"text": "it is number 2 of 3 in the queue: short of 2 CPUs"}
    shown = screen("run", "train.py", columns=60)
    shown.until("digits-7f3k queued: short of 2 CPUs")
    fake.hold.set()
    assert shown.exit_code() == 0
    # The status line is erased before the output is printed.
    assert re.search(r"\r\x1b\[Kstep 1", shown.text)


def test_the_width_of_the_terminal_is_kept(fake: Any, screen: Any, make_run: Any) -> None:
    fake.runs = [make_run(f"digits-{n:04d}", "failed", reason="a long story " * 20) for n in range(3)]
    shown = screen("ps", columns=50)
    assert shown.exit_code() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.text).split("\r\n")
    assert any("digits-0000" in text for text in lines)
    assert all(len(text) <= 50 for text in lines), lines
    assert "\x1b[31;1mfailed\x1b[0m" in shown.text
