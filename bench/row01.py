"""Row 1: the duration of commands that only print something."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import ours
from bench.figures import figure, ratio
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.results import Bar, Line, Row
from bench.timing import Contender, environment, in_turns

TITLE = "start-up of the command line, `stoker ps` with a running server"
HELP, PS, BARE = "stoker --help", "stoker ps", "python -c pass"
RUNS = 10
"""Ended runs that `stoker ps` has to show."""


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    work = root / "work"
    work.mkdir()
    script = ours.stoker()
    others, missing = _others(peers, root, work, scale)
    with ours.server(root / "ours") as server:
        _fill(server)
        contenders = [
            Contender(BARE, [sys.executable, "-c", "pass"], work, server.env),
            Contender(HELP, [script, "--help"], work, server.env),
            Contender(PS, [script, "ps"], work, server.env),
            *others,
        ]
        times = in_turns(contenders, scale.rounds)

    def line(what: str, against: str, bar: Bar | None = None, goal: Bar | None = None) -> Line:
        mine = figure([t for t in times[what] if t is not None], "ms")
        if against in missing:
            return Line(what, against, mine, bar=bar, goal=goal, note=f"missing: {missing[against]}")
        theirs = figure([t for t in times[against] if t is not None], "ms")
        return Line(what, against, mine, theirs, ratio(times[what], times[against]), bar, goal)

    names = [*missing, *(other.name for other in others)]
    lines = [
        line(HELP, BARE, Bar("<=", 4), Bar("<=", 2)),
        line(PS, BARE, Bar("<=", 8)),
        *(line(HELP, name, goal=Bar("<=", 1) if "kubectl" in name else None) for name in sorted(names)),
    ]
    return Row(1, TITLE, lines)


def _others(peers: Peers, root: Path, work: Path, scale: Scale) -> tuple[list[Contender], dict[str, str]]:
    """The available peers, and the reasons why others are missing."""
    user = root / "user"
    user.mkdir()
    env = environment(user)
    wanted = [
        ("kubectl", "kubectl", ("version", "--client"), 1),
        ("kubectl", "kubectl", ("--help",), 1),
        ("torchx", "torchx", ("--help",), scale.slow_every),
        ("dstack", "dstack", ("--help",), scale.slow_every),
        ("skypilot", "sky", ("--help",), scale.slow_every),
    ]
    found, missing = [], {}
    for name, program, words, every in wanted:
        shown = " ".join((program, *words))
        try:
            path = peers.python(name).program(program)
        except Missing as exc:
            missing[shown] = str(exc)
            continue
        found.append(Contender(shown, [path, *words], work, env, every))
    return found, missing


def _fill(server: ours.Ours) -> None:
    """A typical list of runs to show."""
    with server.client() as client:
        for number in range(RUNS):
            run = client.submit(key=f"fill-{number}", job={"name": "noop", "run": ["true"]})
            while client.wait(str(run["id"]), timeout=30)["state"] != "succeeded":
                server.kept.check()
