"""The log of a body with hostile output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import disks

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]


def python(it: Any, script: str) -> None:
    it.run(sys.executable, "-S", "-c", script)


def test_progress_bar_gives_a_handful_of_lines(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(
        it,
        "import sys, time\n"
        "for i in range(10001):\n"
        "    sys.stderr.write(f'\\r{i/100:.0f}%|' + '#' * (i // 200)); sys.stderr.flush()\n"
        "    if i % 100 == 0: time.sleep(0.01)\n"
        "sys.stderr.write('\\n'); print('done')",
    )
    assert it.ending().code == 0
    lines = [line.text for line in it.log() if line.stream == "e"]
    assert 1 <= len(lines) <= 5
    assert lines[-1] == b"100%|" + b"#" * 50
    assert it.text() == "done\n"


def test_binary_junk_is_kept_and_harmless(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(
        it,
        "import os, sys\nos.write(1, bytes(range(256)) + b'\\n\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07 \\xff end\\n')\nsys.exit(1)",
    )
    ending = it.ending()
    assert ending.last_lines[-1] == "red \ufffd end"
    assert all(ch.isprintable() or ch == "\t" for line in ending.last_lines for ch in line)
    texts = [line.text for line in it.log()]
    assert bytes(range(14, 256)) in texts


def test_a_prompt_is_shown_before_its_line_ends(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("printf 'continue? '; sleep 1000")
    it.said("continue? ")
    assert [(line.text, line.partial) for line in it.log()] == [(b"continue? ", True)]


def test_a_long_line_comes_in_parts(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(it, "print('x' * 100_000)")
    assert it.ending().code == 0
    assert it.text() == "x" * 100_000 + "\n"
    assert [line.partial for line in it.log()] == [True] * 6 + [False]


def test_the_budget_keeps_the_beginning_and_the_end(mode: Any, task: Make) -> None:
    budget, segment = 2 << 20, 128 << 10
    it = task(log_budget=budget, log_segment=segment)
    mode.start(it)
    python(
        it,
        "import sys\nfor i in range(0, 600_000, 100):\n    sys.stdout.write(''.join(f'line {j} of a very talkative training\\n' for j in range(i, i + 100)))",
    )
    assert it.ending().code == 0
    status = it.phase("ended")
    kept = sum(path.stat().st_size for path in (it.root / "log").iterdir())
    assert kept <= budget
    assert status.log_dropped > 0 and status.log_bytes == kept + status.log_dropped
    lines = [line.text for line in it.log()]
    assert lines[0] == b"line 0 of a very talkative training"
    assert lines[-1] == b"line 599999 of a very talkative training"
    assert all(line.startswith(b"line ") for line in lines)


def test_both_streams_at_full_speed_lose_nothing(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(
        it,
        "import os, threading\n"
        "def write(fd):\n"
        "    for i in range(200): os.write(fd, b''.join(b'%d %d\\n' % (i, j) for j in range(200)))\n"
        "a = threading.Thread(target=write, args=(1,)); b = threading.Thread(target=write, args=(2,))\n"
        "a.start(); b.start(); a.join(); b.join()",
    )
    assert it.ending().code == 0
    expected = "".join(f"{i} {j}\n" for i in range(200) for j in range(200))
    assert it.text("o") == expected and it.text("e") == expected


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            mount = stack.enter_context(disks.small_disk(place / "small", "1m"))
        except subprocess.CalledProcessError:
            pytest.skip("this user may not mount a small disk")
        yield mount


def test_a_full_disk_loses_output_but_not_the_training(
    mode: Any, task: Make, small_disk: Path, place: Path
) -> None:
    """The training continues. Once there is room, the log says what is missing, and the ending is written."""
    it = task("small/worker-0")
    written, room = place / "written", place / "room"
    mode.start(it)
    it.phase("ready")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(800_000))
    python(
        it,
        "import os, sys, time\n"
        "sys.stdout.write(''.join(f'line {i} that finds no room\\n' for i in range(100_000)))\n"
        f"open({str(written)!r}, 'w').close()\n"
        f"while not os.path.exists({str(room)!r}): time.sleep(0.01)\n"
        "time.sleep(1.2); print('room again')",
    )
    mode.wait_for(written.exists, "the training to get through all its output")
    filler.unlink()
    room.touch()
    ending = it.ending()
    assert (ending.kind, ending.code) == ("exit", 0)
    assert it.text().endswith("room again\n")
    assert "bytes of output were lost: No space left on device" in it.text("s")
    assert it.phase("ended").log_dropped > 100_000


def test_a_body_that_dies_of_a_full_disk(mode: Any, task: Make, small_disk: Path) -> None:
    """Nothing can be written while the disk is full; once there is room the ending is."""
    it = task("small/worker-0")
    mode.start(it)
    it.phase("ready")
    python(it, "with open('big', 'wb', buffering=0) as file:\n    while True: file.write(bytes(4096))")
    mode.wait_for(lambda: it.journal("started") and not it.processes(), "the end of the body")
    (it.root / "code" / "big").unlink()
    ending = it.ending()
    assert ending.code == 1
    assert "No space left on device" in ending.last_lines[-1]
    assert ending.kind == "disk" and str(it.root) in ending.message
    assert it.phase("ended").ending is not None
