"""Row 8c: many small files of a run, pulled over loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import ours
from bench.figures import Figure, figure, ratio
from bench.peers import Peers
from bench.plan import Scale
from bench.results import Bar, Line, Row
from bench.timing import Contender, in_turns

TITLE = "`stoker pull` of many small files over loopback"
COPY, DURABLE = "cp -r", "cp -r && sync -f"
PARTS = 10
"""The pull of so many times fewer files, to measure the growth."""
SMALLEST, LARGEST = 200, 4_000
IN_ONE = 500
"""Files of a directory."""
_WRITE = f"""
import os, pathlib, random
chance = random.Random(8)
root = pathlib.Path(os.environ["STOKER_OUTPUT_DIR"])
for number in range(COUNT):
    path = root / f"part-{{number // {IN_ONE}:03d}}" / f"{{number:06d}}.bin"
    if number % {IN_ONE} == 0:
        path.parent.mkdir()
    path.write_bytes(chance.randbytes(chance.randint({SMALLEST}, {LARGEST})))
"""


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    many, few = scale.files, scale.files // PARTS
    pull, small = f"stoker pull, {many:,} files", f"stoker pull, {few:,} files"
    copies = root / "copies"
    copies.mkdir()
    with ours.server(root / "ours") as server:
        runs = {name: _written(server, count) for name, count in ((pull, many), (small, few))}
        source = root / "source"
        for run, count in ((runs[pull], many), (runs[small], few)):
            _pull(server, run, root / f"checked-{count}")
        (root / f"checked-{many}").rename(source)

        def contender(name: str, command: str) -> Contender:
            # Each time into a new place: ext4 skips recently deleted inodes, which would cost more than
            # either way of copying.
            into = f'to=$(mktemp -d -p "{copies}")/out; {command}'
            return Contender(name, ["sh", "-c", into], root, server.env)

        contenders = [
            *(contender(name, f'"{ours.stoker()}" pull {run} -o "$to"') for name, run in runs.items()),
            contender(COPY, f'cp -r "{source}" "$to"'),
            contender(DURABLE, f'cp -r "{source}" "$to" && sync -f "$to"'),
        ]
        times = in_turns(contenders, max(3, scale.rounds // 3))
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        _check(source, copies, many, few)
    return _row(times, pull, small, size)


def _row(times: dict[str, list[float | None]], pull: str, small: str, size: int) -> Row:
    seconds = {name: [value / 1000 for value in found if value] for name, found in times.items()}
    found = {name: figure(values, "s") for name, values in seconds.items()}

    def line(against: str, bar: Bar | None, goal: Bar | None = None) -> Line:
        compared: Figure | None = ratio(times[pull], times[against])
        return Line(pull, against, found[pull], found[against], compared, bar, goal)

    lines = [
        Line(pull, "-", found[pull], bar=Bar("<=", 5, "s")),
        line(DURABLE, Bar("<=", 10), Bar("<=", 3)),
        line(COPY, None),
        line(small, Bar("<=", 1.5 * PARTS)),
    ]
    notes = [
        f"{size / 1e6:.0f} MB in files of {SMALLEST:,} to {LARGEST:,} bytes, {IN_ONE} in a directory; "
        "what is read is in memory, what is written goes to a new directory each time",
        "a pull verifies the SHA-256 of each file and syncs before it lets a file appear, as `sync -f` does after `cp`",
    ]
    return Row(8, TITLE, lines, notes=notes, part="c")


def _written(server: ours.Ours, count: int) -> str:
    """A run with so many files as its outputs."""
    script = _WRITE.replace("COUNT", str(count))
    job = {"name": f"files-{count}", "run": [sys.executable, "-c", script]}
    with server.client() as client:
        run: dict[str, Any] = client.submit(key=f"files-{count}", job=job)
        while client.wait(str(run["id"]), timeout=30)["state"] not in ("succeeded", "failed", "stopped"):
            server.kept.check()
        found = client.run(str(run["id"]))
    if found["state"] != "succeeded" or found["outputs"]["files"] != count:
        raise RuntimeError(f"the run that writes {count} files ended as {found['state']}: {found['outputs']}")
    return str(run["id"])


def _pull(server: ours.Ours, run: str, target: Path) -> None:
    subprocess.run(
        [ours.stoker(), "pull", run, "-o", str(target)],
        env=dict(server.env),
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


def _check(source: Path, copies: Path, many: int, few: int) -> None:
    """Check that every copy is complete: an incomplete one would be too fast."""
    for copy in copies.glob("*/out"):
        count = sum(path.is_file() for path in copy.rglob("*"))
        if count not in (many, few):
            raise RuntimeError(f"{copy} has {count} files instead of {many} or {few}")
        same = subprocess.run(["diff", "-rq", str(source), str(copy)], capture_output=True, text=True)
        if count == many and same.returncode != 0:
            raise RuntimeError(f"{copy} differs: {same.stdout[:300]}{same.stderr[:300]}")
