from __future__ import annotations

from stoker.scheduling import NodeShape, Scheduler


def scheduler(*nodes: NodeShape) -> Scheduler:
    made = Scheduler()
    made.set_nodes(nodes)
    return made
