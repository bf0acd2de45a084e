"""Row 5, third part: the same for a state of which two ranks have a half each (FSDP)."""

from __future__ import annotations

from pathlib import Path

from bench.peers import Peers
from bench.plan import Scale
from bench.results import Row
from bench.row05b import of_ranks

TITLE = "a checkpoint of a torch state that two ranks share while the training goes on"


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    note = "each rank has half of the state, in DTensors, and saves that"
    return of_ranks("fsdp", Row(5, TITLE, [], notes=[note], part="c"), root, peers, scale)
