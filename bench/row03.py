"""Row 3: runs that do nothing through the durable queue.

Each contender is started for its turn and ended after it, so that idle daemons do not slow down another.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import ours, ray_jobs, slurm, spawning
from bench.figures import Figure, figure, ratio
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row
from bench.timing import environment

TITLE = "runs that do nothing through the durable queue"
CPUS = 64
"""Declared to Stoker and to the tuned Slurm: how many may run at once."""
THREADS = 4
"""Submitters, ours and Slurm's."""
END = 900.0
TUNED, DEFAULT, RAY = "slurm, tuned", "slurm, default", "ray jobs"
PYTHON, TRUE = "spawning python -c pass", "spawning true"
Rates = dict[str, list[float | None]]


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    turns, missing = _turns(peers, scale)
    rates: Rates = {name: [] for name in turns}
    slow = (DEFAULT, RAY)
    for number in range(scale.queue_rounds):
        for name, turn in turns.items():
            # Slow contenders are sampled once, in the middle round.
            takes_part = name not in slow or number == scale.queue_rounds // 2
            place = root / f"{number}{list(turns).index(name)}"
            rates[name].append(
                _one(name, turn, place, missing) if takes_part and name not in missing else None
            )
    what = f"{scale.jobs:,} x true"

    def line(against: str, bar: Bar | None = None, goal: Bar | None = None, note: str = "") -> Line:
        mine = _rates(rates["ours"])
        if against in missing:
            return Line(what, against, mine, bar=bar, goal=goal, note=f"missing: {missing[against]}")
        compared = ratio(rates["ours"], rates[against])
        return Line(what, against, mine, _rates(rates[against]), compared, bar, goal, note)

    lines = [
        line(DEFAULT, Bar(">=", 10)),
        line(TUNED, Bar(">=", 0.5), Bar(">=", 1)),
        line(RAY),
        line(PYTHON, None, Bar(">=", 0.8)),
        line(TRUE),
    ]
    return Row(3, TITLE, lines, notes=_notes(scale))


def _notes(scale: Scale) -> list[str]:
    return [
        f"{CPUS} CPUs declared to us and to the tuned Slurm ({slurm.TUNED}); {THREADS} submitters each; from the "
        "first submit to the last recorded end",
        f"default Slurm and Ray are watched for {scale.sample:.0f} s in the middle round",
        "ours answers a submit after fsync and records every end with fsync; Slurm answers before its state is "
        "saved, so its figures are those of the weaker promise",
    ]


def _turns(peers: Peers, scale: Scale) -> tuple[dict[str, Callable[[Path], float]], dict[str, str]]:
    """The function of each contender's turn, and the missing contenders."""
    missing = {}
    true = shutil.which("true") or "/bin/true"
    turns: dict[str, Callable[[Path], float]] = {
        PYTHON: lambda root: spawning.best([sys.executable, "-c", "pass"], environment(root), scale.spawn),
        TRUE: lambda root: spawning.best([true], environment(root), scale.spawn),
        "ours": lambda root: _ours(root, scale.jobs),
        TUNED: lambda root: _slurm_tuned(root, scale.jobs),
        DEFAULT: lambda root: _slurm_default(root, scale.sample),
    }
    try:
        peers.slurm()
    except Missing as exc:
        missing[TUNED] = missing[DEFAULT] = str(exc)
    try:
        ray = peers.python("ray")
        turns[RAY] = lambda root: ray_jobs.sample(root, ray.bin, scale.sample, CPUS)
    except Missing as exc:
        missing[RAY] = str(exc)
    return turns, missing


def _one(name: str, turn: Callable[[Path], float], place: Path, missing: dict[str, str]) -> float | None:
    """A peer that does not work here is reported as missing; Stoker and the limits have to work."""
    place.mkdir()
    try:
        rate = turn(place)
    except (RuntimeError, OSError, ValueError) as exc:
        if name not in (TUNED, DEFAULT, RAY):
            raise
        say(f"  {name}: {exc}")
        missing[name] = str(exc)[:120]
        return None
    say(f"  {name}: {rate:.1f}/s")
    return rate


def _rates(values: list[float | None]) -> Figure:
    return figure([value for value in values if value is not None], "/s")


def _ours(root: Path, jobs: int) -> float:
    """Runs per second from the first submit until the last has ended in the database."""
    with (
        ours.server(root, config=f"[local]\ncpu = {CPUS}\n") as server,
        server.client() as client,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        warm = client.submit(key="warm", job={"run": ["true"]})
        client.wait(str(warm["id"]), timeout=60)

        def submit(number: int) -> None:
            client.submit(key=f"noop-{number}", job={"name": "noop", "run": ["true"]})

        begin = time.monotonic()
        list(pool.map(submit, range(jobs)))
        submitted = time.monotonic() - begin
        while True:
            counts = client.server()["counts"]
            took = time.monotonic() - begin
            if counts["succeeded"] == jobs + 1:
                say(f"  ours: submitted at {jobs / submitted:.0f}/s")
                return jobs / took
            if counts["failed"] or took > END:
                raise RuntimeError(f"ours: {counts} after {took:.0f} s: {server.kept.last_words()}")
            server.kept.check()
            time.sleep(0.1)


def _slurm_tuned(root: Path, jobs: int) -> float:
    with slurm.cluster(root, cpus=CPUS, scheduling=slurm.TUNED) as cluster:
        return cluster.drain(jobs, THREADS)


def _slurm_default(root: Path, seconds: float) -> float:
    with slurm.cluster(root, cpus=None) as cluster:
        return cluster.sample(int(seconds * 20), THREADS, seconds)
