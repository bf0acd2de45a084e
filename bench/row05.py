"""Row 5: a checkpoint of a large torch state: the cost of the call, and the slowdown of the training."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from bench import ours
from bench.figures import Figure, figure, ratio
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row
from bench.row04 import lower_bound
from bench.timing import environment
from stoker.client import Client

TITLE = "a checkpoint of a torch state while the training goes on"
HERE = Path(__file__).parent
SCRIPT = HERE / "states.py"
SAVE = "stoker.checkpoint.save_torch(asynchronous=True)"
SIZE, SMALL = 2 << 30, 128 << 20
ROUNDS, SAVES = 4, 3
STRETCH = 8.0
"""Seconds for which a transfer runs, and then is stopped. The rate of a training drifts by a tenth within
a minute, even on an otherwise idle machine, but hardly between adjoining stretches. Shorter ones would
not be realistic: a throttled process decides for about five seconds (plus or minus two) how much it
yields."""
SHORT = 2.0
"""The least length of a stretch, in seconds, for a rate."""
PATIENCE = 300.0
"""Seconds of transfer within which a checkpoint should be kept. A slower one is measured up to here and
reported, and is the last."""
LOOK = 3.0
"""Seconds between requests to the server. Two a second made up a seventh of the measured cost of a save."""
LIMIT = 600.0


@dataclass(frozen=True)
class Training:
    """A training that is measured while it saves."""

    what: str
    run: list[str]
    steps: str
    """The file in which it records its steps."""
    suffix: str = ""
    """The suffix of its checkpoints' names."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """More fields of its job file."""


@dataclass(frozen=True)
class Save:
    """The time of the call, and the stretches of the transfer. The first begins when the call returns,
    the last ends when the server has the checkpoint or the wait is over. Between the stretches all of
    Stoker was stopped."""

    begin: float
    stretches: list[tuple[float, float]]
    kept: bool

    @property
    def carried(self) -> float:
        return sum(end - begin for begin, end in self.stretches)


@dataclass(frozen=True)
class Pace:
    """Of one stretch: seconds, steps per second, and steps per second in the adjoining gaps."""

    seconds: float
    saving: float
    quiet: float

    @property
    def lost(self) -> float:
        """Seconds of training that were lost."""
        return (1 - self.saving / self.quiet) * self.seconds


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
        place = root / f"threads-{threads}"
        lines += slowdown(place, _on_threads(python, size, threads, place), bar, scale)
    notes = [
        "a stall is how long the call holds the training up, with nothing else under way; the first round, which touches "
        "memory for the first time, is left out",
        "`dcp.async_save` with its defaults copies into fresh memory each time; `stager kept` is the same with a "
        "DefaultStager(shared memory) that is used again and again",
        "the training is a loop of equal steps, each a few matrix products on so many threads; its rate from the call's "
        f"return until the server has the checkpoint; every {STRETCH:.0f} s all of Stoker is stopped for as long, and each "
        "stretch compared with the two that adjoin it; whatever is lost meanwhile is lost once for each save, so a ratio says "
        "little without its seconds",
    ]
    return Row(5, TITLE, lines, notes=notes)


def _stall(root: Path, python: str, what: str, size: int, scale: Scale) -> list[Line]:
    place = root / "stall"
    place.mkdir()
    found = json.loads(_run(python, root, "stall", str(size), str(rounds_of(scale)), str(place)))
    check(found)
    rates = {name: [found["bytes"] / 1e6 / took for took in found["ends"][name]] for name in ("ours", "disk")}
    return [
        against(what, "memcpy", found, goal=Bar("<=", 1.1)),
        against(what, "dcp.async_save", found, Bar("<=", 1)),
        against(what, "dcp.async_save, stager kept", found),
        against(what, "dcp.save", found),
        against(what, "torch.save", found),
        Line(
            f"{what}: until it is on the disk",
            "write and fsync",
            figure(rates["ours"], "GB/s"),
            figure(rates["disk"], "GB/s"),
            ratio(rates["ours"], rates["disk"]),
            note=f"the first call of a process took {found['first']['ours'] / 1000:.2f} s",
        ),
    ]


def rounds_of(scale: Scale) -> int:
    return 3 if scale.quick else ROUNDS


def check(found: Mapping[str, Any]) -> None:
    if found["failed"]:
        raise RuntimeError(f"not everything could be measured: {found['failed']}")


def against(
    what: str, other: str, found: Mapping[str, Any], bar: Bar | None = None, goal: Bar | None = None
) -> Line:
    mine, theirs = found["calls"]["ours"], found["calls"][other]
    return Line(what, other, _seconds(mine), _seconds(theirs), ratio(mine, theirs), bar, goal)


def _on_threads(python: str, size: int, threads: int, place: Path) -> Training:
    return Training(
        f"steps/s on {threads} of {os.cpu_count()} CPUs while a checkpoint is written and carried away",
        [python, str(SCRIPT), "train", str(size), str(threads), str(place)],
        "steps.csv",
        ".pt",
    )


def slowdown(root: Path, training: Training, bar: Bar | None, scale: Scale) -> list[Line]:
    root.mkdir()
    try:
        saves = _saves(root, training, 2 if scale.quick else SAVES)
        paces = _paces(_steps(root / training.steps), saves)
    except RuntimeError as exc:
        # The stalls were measured before and stay; a bar without a figure is reported.
        say(f"  {training.what}: {exc}")
        return [Line(training.what, "no save", None, bar=bar, note=f"not measured: {exc}")]
    every = [pace for of_one in paces for pace in of_one]
    saving, quiet = [pace.saving for pace in every], [pace.quiet for pace in every]
    line = Line(
        training.what,
        "no save",
        figure(saving, "/s"),
        figure(quiet, "/s"),
        ratio(saving, quiet),
        note=_cost(saves, paces),
    )
    return [line] if bar is None else [line, _judged(line, every, bar)]


def _judged(line: Line, paces: Sequence[Pace], bar: Bar) -> Line:
    """Judged by the lower bound. Two stretches of a training without any save can differ by more than the
    bar allows, so chance alone may lift the median over it."""
    what = f"{line.what}: lower 95% bound of the mean ratio"
    if len(paces) < 2:
        return Line(what, line.against, None, bar=bar, note="not judged: there was one stretch")
    bound = lower_bound([pace.saving / pace.quiet for pace in paces])
    return Line(what, line.against, line.ours, line.theirs, Figure(bound, bound, bound, 1, "x"), bar)


def _saves(place: Path, training: Training, count: int) -> list[Save]:
    """In a real run: the launcher stages each checkpoint, the server takes it in."""
    saves: list[Save] = []
    with ours.server(place / "ours") as server, server.client() as client:
        job = {
            "name": "training",
            "run": training.run,
            "env": {"PYTHONPATH": str(HERE.parent / "src")},
            "checkpoint": {"keep": 1},
            **training.more,
        }
        run = str(client.submit(key="training", job=job)["id"])
        looker = _Looker(client, run, server)
        if looker.kept(f"step-0{training.suffix}", PATIENCE) is None:
            raise RuntimeError(f"the first checkpoint was not kept within {PATIENCE:.0f} s")
        (place / "begin").touch()
        for number in range(1, count + 1):
            time.sleep(2 * STRETCH)
            (place / f"go-{number}").touch()
            begin, returned = _called(place / f"saved-{number}")
            stretches, kept = _carried(looker, f"step-{number}{training.suffix}", returned, server)
            saves.append(save := Save(begin, stretches, kept))
            word = "kept" if kept else "not kept"
            say(f"  {training.what}: save {number} {word} after it was carried for {save.carried:.1f} s")
            if not kept:
                break
        time.sleep(2 * STRETCH)
        (place / "stop").touch()
        client.wait(run, timeout=60)
    return saves


def _called(note: Path) -> tuple[float, float]:
    """The times of the call and of its return, once it has returned."""
    deadline = time.monotonic() + PATIENCE
    while not note.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the call did not return within {PATIENCE:.0f} s")
        time.sleep(0.1)
    begin, returned = json.loads(note.read_text())
    return begin, returned


def _carried(
    looker: _Looker, name: str, returned: float, server: ours.Ours
) -> tuple[list[tuple[float, float]], bool]:
    """Stretches of `Save`, and whether the server has the checkpoint."""
    stretches: list[tuple[float, float]] = []
    begin = returned
    while sum(end - first for first, end in stretches) < PATIENCE:
        at = looker.kept(name, begin + STRETCH - time.time())
        if at is not None:
            # The server may have had it before it was stopped the last time.
            return ([*stretches, (begin, at)] if at > begin else stretches), True
        with _stopped(server):
            stretches.append((begin, time.time()))
            time.sleep(STRETCH)
            begin = time.time()
    return stretches, False


@contextlib.contextmanager
def _stopped(server: ours.Ours) -> Iterator[None]:
    """Stop all processes of Stoker but the training."""
    processes = server.processes()
    try:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.resume()


def _paces(steps: Sequence[tuple[float, float]], saves: Sequence[Save]) -> list[list[Pace]]:
    """The long enough stretches of each save."""
    found: list[list[Pace]] = []
    for save in saves:
        (first, _), (_, last) = save.stretches[0], save.stretches[-1]
        gaps = [(one[1], other[0]) for one, other in pairwise(save.stretches)]
        around = [(save.begin - STRETCH, save.begin), *gaps, (last, last + STRETCH)]
        assert save.begin <= first
        quiet = [_rate(steps, *gap) for gap in around]
        found.append(
            [
                Pace(end - begin, _rate(steps, begin, end), statistics.mean(adjoining))
                for (begin, end), adjoining in zip(save.stretches, pairwise(quiet), strict=True)
                if end - begin >= SHORT
            ]
        )
    return found


def _cost(saves: Sequence[Save], paces: Sequence[Sequence[Pace]]) -> str:
    """The duration of the transfers and the training time lost, beside the ratio."""
    lost = [sum(pace.lost for pace in of_one) for of_one in paces]
    said = f"the server had it after {figure([save.carried for save in saves], 's').text()} of carrying"
    said += f"; each cost {figure(lost, 's').text()} of training"
    late = sum(not save.kept for save in saves)
    return f"{said}; {late} of {len(saves)} not kept within {PATIENCE:.0f} s" if late else said


def _rate(steps: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    inside = [(first, last) for first, last in steps if first >= begin and last <= end]
    if len(inside) < 2:
        raise RuntimeError(
            f"only {len(inside)} steps in {end - begin:.1f} s: nothing can be said about their rate"
        )
    return len(inside) / (inside[-1][1] - inside[0][0])


def _steps(path: Path) -> list[tuple[float, float]]:
    """Begin and end of each step. The last line may be incomplete."""
    lines = [line.split(",") for line in path.read_text().split("\n")[:-1]]
    return [(float(first), float(last)) for first, last in lines]


@dataclass(frozen=True)
class _Looker:
    """Asks the server about a run."""

    client: Client
    run: str
    server: ours.Ours

    def kept(self, name: str, patience: float) -> float | None:
        """The time when the server had this checkpoint; None: not in time. It asks at least once."""
        deadline = time.monotonic() + patience
        while True:
            time.sleep(max(min(LOOK, deadline - time.monotonic()), 0))
            at = self._look(name)
            if at is not None or time.monotonic() >= deadline:
                return at

    def _look(self, name: str) -> float | None:
        self.server.kept.check()
        found = self.client.run(self.run)
        if found["state"] not in ("queued", "starting", "running"):
            raise RuntimeError(f"the training is {found['state']}: {found.get('reason')}")
        if all(checkpoint["name"] != name for checkpoint in found.get("checkpoints", [])):
            return None
        said = [event for event in self.client.events(self.run)["events"] if f"{name} " in event["text"]]
        return float(said[-1]["t"])


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
