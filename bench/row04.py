"""Row 4: one of two ranks is killed; and the cost of two ranks below Stoker instead of torchrun."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import ours
from bench.figures import Figure, figure, ratio
from bench.keeper import Kept
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row
from bench.timing import environment

TITLE = "two ranks: one is killed with SIGKILL; and the rate of their steps"
HERE = Path(__file__).parent
SCRIPT = HERE / "ranks.py"
OURS, TORCHRUN = "stoker, workers: 2", "torchrun --max-restarts"
ENDLESS = 10**9
SMALL, LARGE = ("64", "20"), ("512", "2000")
"""Width of the model and steps between two checkpoints: for the kills, and for the timing."""
HANG = 60.0
"""Seconds without a new step after which it counts as hung."""
START = 180.0
ROUND = 5
"""Kills per turn of a contender."""
STUDENT = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89, 9: 1.86, 10: 1.83}
"""By number of measurements: Student's t for a one-sided 95% bound, in standard errors below the mean."""


@dataclass
class Training:
    """Two ranks that record their events in `place`."""

    place: Path
    own: Callable[[], float] = field(default=lambda: 0.0)
    """CPU seconds of the processes that run the ranks, without the ranks."""

    def events(self, kind: str) -> list[list[tuple[float, int]]]:
        """(time, number) of each event, by rank."""
        return [
            [
                (float(words[1]), int(words[2]))
                for line in _lines(self.place / f"events-{rank}.csv")
                if len(words := line.split(",")) == 3 and words[0] == kind
            ]
            for rank in (0, 1)
        ]

    def kill(self, rank: int) -> float:
        """SIGKILL to the newest process of this rank; returns the time of the kill."""
        number = self.events("born")[rank][-1][1]
        for process in _ranks(self.place):
            if _own_number(process.pid) == number and process.environ().get("RANK") == str(rank):
                process.send_signal(signal.SIGKILL)
                return time.time()
        raise RuntimeError(f"there is no rank {rank} to kill")

    def recovered(self, killed: float) -> tuple[float, float] | None:
        """Seconds to the start of the last process of the new world, and to its first step; None: it hung."""
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            born = [[at for at, _ in found if at > killed] for found in self.events("born")]
            if all(born):
                begin = max(found[-1] for found in born)
                steps = [[at for at, _ in found if at > begin] for found in self.events("step")]
                if all(steps):
                    return begin - killed, max(found[0] for found in steps) - killed
            time.sleep(0.02)
        return None

    def going(self, since: float, steps: int = 50) -> None:
        """Wait until both ranks have done so many steps since then."""
        deadline = time.monotonic() + START
        while min(sum(at > since for at, _ in found) for found in self.events("step")) < steps:
            if time.monotonic() > deadline:
                raise RuntimeError("the training does not get going")
            time.sleep(0.1)


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    try:
        torch = peers.python("torch")
    except Missing as exc:
        note = f"missing: {exc}"
        return Row(4, TITLE, [Line(OURS, TORCHRUN, None, bar=Bar("<=", 0.5), note=note)])
    python, torchrun = torch.program("python"), torch.program("torchrun")
    contenders: dict[str, Callable[[Path, tuple[str, str]], contextlib.AbstractContextManager[Training]]] = {
        OURS: lambda place, shape: _stoker(place, python, shape),
        TORCHRUN: lambda place, shape: _torchrun(place, torchrun, shape),
    }
    lines = _kills(root, contenders, ROUND if scale.quick else 4 * ROUND)
    lines += _rates(root, contenders, 3 if scale.quick else 8, 5.0 if scale.quick else 20.0)
    notes = [
        f"{ROUND} kills of a random rank, then the other one's turn; a start is when the script begins in the last process "
        f"of the new world, before it imports torch; no new step within {HANG:.0f} s counts as a hang and gives no time",
        "below Stoker it begins in a process that waited for it, and has torch already (`warm`, as it is by default)",
        "the script, its checkpoints and torch are the same; gloo on the loopback, one thread per rank",
    ]
    return Row(4, TITLE, lines, notes=notes)


def _kills(root: Path, contenders: dict[str, Callable[..., Any]], tries: int) -> list[Line]:
    chance = random.Random(7)
    starts: dict[str, list[float | None]] = {name: [] for name in contenders}
    firsts: dict[str, list[float | None]] = {name: [] for name in contenders}
    for number in range(math.ceil(tries / ROUND)):
        for name in chance.sample(list(contenders), len(contenders)):
            left = ROUND
            while left:
                place = root / f"kill-{number}-{name.split(',')[0].split()[0]}-{left}"
                with contenders[name](place, SMALL) as training:
                    training.going(0.0)
                    for _ in range(left):
                        left -= 1
                        killed = training.kill(chance.randrange(2))
                        found = training.recovered(killed)
                        starts[name].append(found and found[0])
                        firsts[name].append(found and found[1])
                        said = (
                            "it hangs" if found is None else f"start {found[0]:.2f} s, step {found[1]:.2f} s"
                        )
                        say(f"  {name}: {said}")
                        if found is None:
                            break  # started again from the first step
                        training.going(killed + found[1])
    lines = [
        _compare("a rank killed: to the new world's start", starts, Bar("<=", 0.5)),
        _compare("a rank killed: to the first new step", firsts, Bar("<=", 0.9), Bar("<=", 0.3)),
    ]
    hangs = {name: float(sum(value is None for value in values)) for name, values in starts.items()}
    count = len(starts[OURS])
    lines.append(
        Line(
            f"hangs in {count} kills",
            TORCHRUN,
            Figure(hangs[OURS], hangs[OURS], hangs[OURS], 1, "hangs"),
            Figure(hangs[TORCHRUN], hangs[TORCHRUN], hangs[TORCHRUN], 1, "hangs"),
            bar=Bar("<=", 0, "hangs"),
        )
    )
    return lines


def _compare(what: str, values: dict[str, list[float | None]], bar: Bar, goal: Bar | None = None) -> Line:
    """Compares medians: the kills of different contenders do not form pairs."""
    seen = {name: [value for value in found if value is not None] for name, found in values.items()}
    if not all(seen.values()):
        return Line(what, TORCHRUN, None, bar=bar, goal=goal, note="one of them never came back")
    mine, theirs = figure(seen[OURS], "s"), figure(seen[TORCHRUN], "s")
    quotient = mine.middle / theirs.middle
    spread = Figure(quotient, mine.low / theirs.high, mine.high / theirs.low, mine.n, "x")
    return Line(f"{OURS}: {what}", TORCHRUN, mine, theirs, spread, bar, goal)


def _rates(root: Path, contenders: dict[str, Callable[..., Any]], rounds: int, seconds: float) -> list[Line]:
    """Steps per second, in turns, and the CPU time used beside the training."""
    chance = random.Random(11)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    shares = []
    for number in range(rounds):
        for name in chance.sample(list(contenders), len(contenders)):
            place = root / f"rate-{number}-{name.split(',')[0].split()[0]}"
            with contenders[name](place, LARGE) as training:
                training.going(0.0, 100)
                begin, used = time.time(), training.own()
                time.sleep(seconds)
                end, used = time.time(), training.own() - used
                steps = [at for at, _ in training.events("step")[0] if begin <= at <= end]
            rates[name].append((len(steps) - 1) / (steps[-1] - steps[0]))
            if name == OURS:
                shares.append(100 * used / (end - begin))
            say(f"  {name}: {rates[name][-1]:.1f} steps/s")
    compared = ratio(rates[OURS], rates[TORCHRUN])
    bound = lower_bound([one / other for one, other in zip(rates[OURS], rates[TORCHRUN], strict=True)])
    mine, theirs = figure(rates[OURS], "/s"), figure(rates[TORCHRUN], "/s")
    return [
        Line(f"{OURS}: steps/s", "torchrun", mine, theirs, compared),
        Line(
            f"{OURS}: steps/s, lower 95% bound of the mean ratio",
            "torchrun",
            mine,
            theirs,
            Figure(bound, bound, bound, 1, "x"),
            Bar(">=", 0.95),
        ),
        Line(
            "Stoker's own processes meanwhile",
            "-",
            figure(shares, "% of a core"),
            bar=Bar("<=", 1, "% of a core"),
        ),
    ]


def lower_bound(ratios: Sequence[float]) -> float:
    """A one-sided 95% lower bound of the mean ratio, for normally distributed errors."""
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.mean(ratios) - STUDENT.get(len(ratios), 1.81) * error


@contextlib.contextmanager
def _stoker(place: Path, python: str, shape: tuple[str, str]) -> Iterator[Training]:
    notes = place / "notes"
    notes.mkdir(parents=True)
    with ours.server(place / "ours") as server, server.client() as client:
        job = {
            "name": "ranks",
            "run": [python, str(SCRIPT), str(notes), str(ENDLESS), *shape],
            "workers": 2,
            "framework": "torch",
            "retries": 1000,
        }
        run = str(client.submit(key="ranks", job=job)["id"])
        yield Training(notes, lambda: _own(server))
        client.stop(run, kill=True)
        _gone(notes)


@contextlib.contextmanager
def _torchrun(place: Path, torchrun: str, shape: tuple[str, str]) -> Iterator[Training]:
    notes = place / "notes"
    notes.mkdir(parents=True)
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1000", str(SCRIPT), str(notes)]
    env = {**environment(place), "OMP_NUM_THREADS": "1", "TMPDIR": str(place)}  # it leaves directories there
    with Kept([torchrun, *words, str(ENDLESS), *shape], log=place / "log", env=env, cwd=place):
        yield Training(notes)
    _gone(notes)


def _ranks(notes: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(notes) in words and "RANK" in process.environ():
                found.append(process)
    return found


def _own_number(pid: int) -> int:
    """The process id inside its own namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def _gone(notes: Path) -> None:
    """Wait for the end, so that the next contender has the machine alone."""
    deadline = time.monotonic() + 30
    while _ranks(notes) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(notes, ignore_errors=True)


def _own(server: ours.Ours) -> float:
    """CPU seconds of Stoker's own processes."""
    total = 0.0
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
