"""Row 2: a run that does nothing, from the command to its exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import ours
from bench.figures import figure, ratio
from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.results import Bar, Line, Row
from bench.timing import Contender, environment, in_turns

TITLE = "`stoker run -- true` with a warm server, to its exit"
BARE, RUN, IN_GIT = "python -c pass", "stoker run -- true", "stoker run -- true, in a git repository"
TORCHX = "torchx run -s local_cwd --wait utils.sh true"


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    plain, repository = _projects(root)
    user = root / "user"
    user.mkdir()
    why_not = ""
    others = []
    try:
        argv = [peers.python("torchx").program("torchx"), *TORCHX.split()[1:]]
        others.append(Contender(TORCHX, argv, plain, environment(user), scale.slow_every))
    except Missing as exc:
        why_not = str(exc)
    with ours.server(root / "ours") as server:
        argv = [ours.stoker(), "run", "--", "true"]
        contenders = [
            Contender(BARE, [sys.executable, "-c", "pass"], plain, server.env),
            Contender(RUN, argv, plain, server.env),
            Contender(IN_GIT, argv, repository, server.env),
            *others,
        ]
        times = in_turns(contenders, scale.rounds)
    measured = {
        name: figure([value for value in values if value is not None], "ms") for name, values in times.items()
    }

    def line(what: str, against: str, bar: Bar | None = None, goal: Bar | None = None) -> Line:
        compared = ratio(times[what], times[against])
        return Line(what, against, measured[what], measured[against], compared, bar, goal)

    lines = [line(RUN, BARE, Bar("<=", 15), Bar("<=", 6)), line(IN_GIT, BARE)]
    if why_not:
        lines.append(Line(RUN, TORCHX, measured[RUN], note=f"missing: {why_not}"))
    else:
        lines.append(line(RUN, TORCHX))
    return Row(2, TITLE, lines)


def _projects(root: Path) -> tuple[Path, Path]:
    """The same few files twice: plain, and in a repository."""
    places = (root / "plain", root / "repository")
    for place in places:
        (place / "model").mkdir(parents=True)
        (place / "train.py").write_text("print('training')\n")
        (place / "requirements.txt").write_text("numpy\n")
        (place / "model" / "__init__.py").write_text("")
        (place / "model" / "net.py").write_text("WIDTH = 128\n" * 50)
    git = ["git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-C", str(places[1])]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return places
