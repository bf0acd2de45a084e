"""What the rigs of the control loop have in common: a server's inside without HTTP, asked through its store."""

from __future__ import annotations

from box import wait

from stoker.store import Store
from stoker.store.rows import RunRow

ENDED = ("succeeded", "failed", "stopped")


class Watched:
    store: Store

    def until(self, run: str, *states: str) -> RunRow:
        return wait(lambda: self.store.run(run), lambda row: row.state in states)

    def ended(self, run: str) -> RunRow:
        return self.until(run, *ENDED)
