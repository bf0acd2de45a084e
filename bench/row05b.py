"""Row 5, second part: the same for a state that two ranks have, whole each (DDP)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.peers import Missing, Peers
from bench.plan import Scale
from bench.results import Bar, Line, Row
from bench.row05 import HERE, LIMIT, SAVE, SIZE, SMALL, Training, against, check, rounds_of, slowdown
from bench.slurm import free_ports
from bench.timing import environment

TITLE = "a checkpoint of a torch state that each of two ranks has while the training goes on"
SCRIPT = HERE / "state_ranks.py"
SAVED = {"ddp": f"DDP on two ranks, {SAVE}", "fsdp": "FSDP on two ranks, stoker.checkpoint.save_sharded()"}


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    note = "both ranks have the whole state, and the first saves it"
    return of_ranks("ddp", Row(5, TITLE, [], notes=[note], part="b"), root, peers, scale)


def of_ranks(kind: str, row: Row, root: Path, peers: Peers, scale: Scale) -> Row:
    """The row, filled. `kind`: see state_ranks.py."""
    size = SMALL if scale.quick else SIZE
    try:
        python = peers.python("torch").program("python")
    except Missing as exc:
        row.lines.append(Line(SAVED[kind], "dcp.async_save", None, bar=Bar("<=", 1), note=f"missing: {exc}"))
        return row
    place = root / kind
    row.lines += _stall(root, python, kind, size, scale)
    row.lines += slowdown(place, _training(python, size, kind, place), Bar(">=", 0.95), scale)
    row.notes += [
        "gloo, one thread for each rank, a reduction after each step; a stall is that of the rank which is held up longer",
        "the rate of the steps as in row 5",
    ]
    return row


def _stall(root: Path, python: str, kind: str, size: int, scale: Scale) -> list[Line]:
    place = root / f"stall-{kind}"
    place.mkdir()
    found = json.loads(_run_ranks(python, root, "stall", kind, str(size), str(rounds_of(scale)), str(place)))
    check(found)
    what = f"{SAVED[kind]}, {size / (1 << 30):g} GiB"
    return [
        against(what, "memcpy", found, goal=Bar("<=", 1.1)),
        against(what, "dcp.async_save", found, Bar("<=", 1)),
        against(what, "dcp.save", found),
        against(what, "torch.save", found),
    ]


def _training(python: str, size: int, kind: str, place: Path) -> Training:
    return Training(
        f"steps/s of {kind.upper()} on two ranks while a checkpoint is written and carried away",
        [python, str(SCRIPT), "train", kind, str(size), str(place)],
        "steps-0.csv",
        more={"workers": 2, "framework": "torch"},
    )


def _run_ranks(python: str, root: Path, *words: str) -> str:
    """The output of the first of two ranks."""
    (port,) = free_ports(1)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(2):
        env = {**environment(root), "PYTHONPATH": str(HERE.parent / "src"), "RANK": str(rank), **meeting}
        argv = [python, str(SCRIPT), *words]
        ranks.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        ended = [rank.returncode for rank in ranks]
        raise RuntimeError(f"{SCRIPT.name} {words[0]} ended with {ended}")
    return said[0]
