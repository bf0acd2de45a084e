"""Row 5: a checkpoint of a large torch state: what the call costs, and what the training loses while it is kept."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ours
from bench.figures import Figure, figure, ratio
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row
from bench.timing import environment

TITLE = "a checkpoint of a torch state while the training goes on"
HERE = Path(__file__).parent
SCRIPT = HERE / "states.py"
SAVE = "stoker.checkpoint.save_torch(asynchronous=True)"
SIZE, SMALL = 2 << 30, 128 << 20
QUIET = 8.0
"""Seconds without a save before and after each."""
LIMIT = 1800.0


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    size = SMALL if scale.quick else SIZE
    what = f"{SAVE}, {size / (1 << 30):g} GiB"
    try:
        python = peers.python("torch").program("python")
    except Missing as exc:
        note = f"missing: {exc}"
        return Row(5, TITLE, [Line(what, "dcp.async_save", None, bar=Bar("<=", 1), note=note)])
    lines = _stall(root, python, what, size, scale)
    for threads, bar in ((os.cpu_count() or 1, Bar(">=", 0.95)), (1, None)):
        lines.append(_slowdown(root / f"threads-{threads}", python, size, threads, bar, scale))
    notes = [
        "a stall is how long the call holds the training up, with nothing else under way; the first round, which touches "
        "memory for the first time, is left out",
        "`dcp.async_save` with its defaults copies into fresh memory each time; `stager kept` is the same with a "
        "DefaultStager(shared memory) that is used again and again",
        "the training is a loop of equal steps, each a few matrix products on so many threads; its rate from the call's "
        "return until the server has the checkpoint, against its rate in the seconds before and after",
    ]
    return Row(5, TITLE, lines, notes=notes)


def _stall(root: Path, python: str, what: str, size: int, scale: Scale) -> list[Line]:
    place = root / "stall"
    place.mkdir()
    rounds = 3 if scale.quick else 9
    found = json.loads(_run(python, root, "stall", str(size), str(rounds), str(place)))
    if found["failed"]:
        raise RuntimeError(f"not everything could be measured: {found['failed']}")
    calls, ends = found["calls"], found["ends"]

    def line(against: str, bar: Bar | None = None, goal: Bar | None = None) -> Line:
        return Line(
            what,
            against,
            _seconds(calls["ours"]),
            _seconds(calls[against]),
            ratio(calls["ours"], calls[against]),
            bar,
            goal,
        )

    rates = {name: [found["bytes"] / 1e6 / took for took in ends[name]] for name in ("ours", "disk")}
    return [
        line("memcpy", goal=Bar("<=", 1.1)),
        line("dcp.async_save", Bar("<=", 1)),
        line("dcp.async_save, stager kept"),
        line("dcp.save"),
        line("torch.save"),
        Line(
            f"{what}: until it is on the disk",
            "write and fsync",
            figure(rates["ours"], "GB/s"),
            figure(rates["disk"], "GB/s"),
            ratio(rates["ours"], rates["disk"]),
            note=f"the first call of a process took {found['first']['ours'] / 1000:.2f} s",
        ),
    ]


def _slowdown(root: Path, python: str, size: int, threads: int, bar: Bar | None, scale: Scale) -> Line:
    """In a real run: the launcher stages each checkpoint, the server takes it in."""
    place = root / "training"
    place.mkdir(parents=True)
    rounds = 2 if scale.quick else 6
    windows: list[tuple[float, float, float]] = []
    with ours.server(root / "ours") as server, server.client() as client:
        job = {
            "name": "training",
            "run": [python, str(SCRIPT), "train", str(size), str(threads), str(place)],
            "env": {"PYTHONPATH": str(HERE.parent / "src")},
            "checkpoint": {"keep": 1},
        }
        run = str(client.submit(key="training", job=job)["id"])
        _until(lambda: _stored(client.run(run), "step-0.pt"), server)
        for number in range(1, rounds + 1):
            time.sleep(QUIET)
            (place / f"go-{number}").touch()
            stored = _until(lambda number=number: _stored(client.run(run), f"step-{number}.pt"), server)
            begin, returned = json.loads((place / f"saved-{number}").read_text())
            windows.append((begin, returned, stored))
            say(f"  {threads} threads, save {number}: kept after {stored - returned:.1f} s")
        time.sleep(QUIET)
        (place / "stop").touch()
        client.wait(run, timeout=60)
    quiet, saving = _rates(_steps(place / "steps.csv"), windows)
    seconds = statistics.median(stored - returned for _, returned, stored in windows)
    return Line(
        f"steps/s on {threads} of {os.cpu_count()} CPUs while a checkpoint is written and carried away",
        "no save",
        figure(saving, "/s"),
        figure(quiet, "/s"),
        ratio(saving, quiet),
        bar,
        note=f"the server had it {seconds:.1f} s after the call",
    )


def _rates(
    steps: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float, float]]
) -> tuple[list[float], list[float]]:
    """Steps per second around each save (half before, half after) and during it, from the call's return on."""
    quiet, saving = [], []
    for begin, returned, stored in windows:
        saving.append(_rate(steps, returned, stored))
        around = [_rate(steps, begin - QUIET + 1, begin), _rate(steps, stored + 1, stored + QUIET)]
        quiet.append(statistics.mean(around))
    return quiet, saving


def _rate(steps: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    inside = [(first, last) for first, last in steps if first >= begin and last <= end]
    if len(inside) < 2:
        raise RuntimeError(
            f"only {len(inside)} steps in {end - begin:.1f} s: nothing can be said about their rate"
        )
    return len(inside) / (inside[-1][1] - inside[0][0])


def _steps(path: Path) -> list[tuple[float, float]]:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    return [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]


def _stored(run: Mapping[str, Any], name: str) -> float | None:
    if run["state"] not in ("queued", "starting", "running"):
        raise RuntimeError(f"the training is {run['state']}: {run.get('reason')}")
    return next((time.time() for found in run.get("checkpoints", []) if found["name"] == name), None)


def _until(look: Any, server: ours.Ours) -> float:
    deadline = time.monotonic() + LIMIT
    while (found := look()) is None:
        server.kept.check()
        if time.monotonic() > deadline:
            raise RuntimeError("the server did not take the checkpoint in")
        time.sleep(0.25)
    return float(found)


def _seconds(milliseconds: Sequence[float]) -> Figure:
    return figure([value / 1000 for value in milliseconds], "s")


def _run(python: str, root: Path, *words: str) -> str:
    env = {**environment(root), "PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(
        [python, str(SCRIPT), *words], env=env, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    if done.returncode != 0:
        raise RuntimeError(f"{SCRIPT.name} {words[0]} ended with {done.returncode}")
    return done.stdout
