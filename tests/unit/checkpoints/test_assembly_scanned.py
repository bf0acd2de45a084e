"""From files to checkpoints of several tasks: real scanners on a simulated clock, writers of each kind, kills
at any moment. Each offered checkpoint has every part of one save, and nothing of another."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.control.checkpoints.assembly import Assembly
from stoker.control.ingest.ingester import Ingester
from stoker.control.ingest.journal_reader import Intake
from stoker.settings import Home
from stoker.store import Store
from stoker.store.rows import CheckpointRow, NewRun, PutTransfer
from stoker.task import layout
from stoker.task.formats import Ending, Status, write_json
from support.checkpoints.scanning import Clock, Task
from support.control.ingesting import HeldTransfers, ingester

SIZE = 2000


class Rank(Task):
    """One task: its training writes, its launcher records, and the server reads it."""

    def __init__(self, rig: Rig, number: int) -> None:
        super().__init__(rig.root / f"task-{number}", blind=False)
        self.clock = rig.clock
        self.scanner.close()
        self.scanner = self.open()
        for name in layout.DIRECTORIES:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.number = number
        self.name = f"worker-{number}"
        self.alive = True
        self.work: Iterator[None] | None = None
        self.saved = -1
        self.ending: Ending | None = None
        self.begin()
        self.pump = rig.pump(self)

    def tell(self) -> None:
        """Write the status after a scan."""
        self.poll()
        status = Status("running", generation=1, scans=self.scanner.scans, pending=self.scanner.pending())
        write_json(str(self.root / layout.STATUS), status.to_json())

    def end(self, ending: Ending) -> None:
        self.alive, self.work = False, None
        self.scanner.finish(ending.code != 0)
        self.ending = ending
        self.journal({"k": "ended", **ending.to_json()})


class Rig:
    def __init__(self, root: Path, style: str, chance: random.Random, slow: bool) -> None:
        """`slow`: each transfer takes until a random step carries it out."""
        self.root, self.style, self.chance, self.slow = root, style, chance, slow
        self.clock = Clock()
        self.transfers = HeldTransfers()
        home = Home(root / "home")
        self.home, self.blobs = home, BlobStore(home.blobs)
        self.store = Store.open(home.database)
        self.run = self.store.submit(NewRun("key", "digits", {}, ["true"]), now=1.0)[0].id
        self.ranks = [Rank(self, number) for number in range(chance.choice([2, 3]))]
        self.saves = 0
        self.restart()

    def pump(self, rank: Rank) -> Ingester:
        cursors = self.store.cursors(self.run, 1)
        found = ingester(
            self.home, rank.root, self.transfers, run=self.run, task=rank.name, cursors=cursors, alone=False
        )
        found.resume(self.store.checkpoint_transfers(self.run, 1))
        return found

    def restart(self) -> None:
        """The server is killed and started again."""
        self.transfers = HeldTransfers()
        for rank in self.ranks:
            rank.pump = self.pump(rank)
        self.assembly = Assembly(self.blobs, run=self.run, attempt=1)
        members = {rank.name: 1 for rank in self.ranks}
        known = self.store.checkpoint_parts(self.run, 1)
        self.store.apply(self.assembly.begin(1, members, known=known).changes)

    @property
    def writers(self) -> list[Rank]:
        return self.ranks[:1] if self.style.startswith("first") else self.ranks

    # -- events ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """All writers begin a save together, after they have finished the previous one."""
        if all(rank.work is None and rank.alive for rank in self.writers):
            for rank in self.writers:
                rank.work = getattr(self, "_" + self.style.replace(" ", "_"))(rank, self.saves)
                next(rank.work)
            self.saves += 1

    def write(self) -> None:
        rank = self.chance.choice(self.ranks)
        if rank.work is not None and next(rank.work, self) is self:
            rank.work = None

    def wait(self) -> None:
        self.clock.now += self.chance.choice([0.1, 0.5, 1.0, 4.0])
        for rank in self.ranks:
            if rank.alive:
                rank.poll()

    def tell(self) -> None:
        rank = self.chance.choice(self.ranks)
        if rank.alive:
            rank.tell()

    def look(self) -> None:
        chosen = [rank for rank in self.ranks if self.chance.random() < 0.6]
        if not self.slow:
            self.transfers.finish()
        self.take({rank.name: rank.pump.look() for rank in chosen})

    def take(self, found: dict[str, Intake]) -> None:
        done = self.assembly.take(found)
        changes = [change for one in found.values() for change in one.changes]
        seen = [PutTransfer(one.row) for intake in found.values() for one in intake.seen]
        self.store.apply([*changes, *seen, *done.changes])
        for row in done.checkpoints:
            self.check(row)

    def carry(self) -> None:
        """Transfer one checkpoint of a random task."""
        if self.transfers.works:
            self.transfers.work(self.chance.randrange(len(self.transfers.works)))

    def kill(self) -> None:
        rank = self.chance.choice(self.ranks)
        if rank.alive:
            rank.end(Ending(1, 1, "signal", signal=9))

    def finish(self) -> None:
        while any(rank.work is not None for rank in self.ranks):
            self.write()
        for rank in self.ranks:
            if rank.alive:
                rank.end(Ending(1, 1, "exit", code=0))
        for _ in range(2):
            self.take({rank.name: rank.pump.look(final=True) for rank in self.ranks})
            self.transfers.finish()
        self.take({rank.name: rank.pump.collect() for rank in self.ranks})

    # -- kinds of writers ---------------------------------------------------------------------------------------

    def _text(self, rank: Rank, save: int) -> bytes:
        return f"{save} {rank.number}\n".encode() * (SIZE // 4)

    def _slowly(self, path: Path, data: bytes) -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for start in range(0, len(data), SIZE):
                file.write(data[start : start + SIZE])
                file.flush()
                yield

    def _first_by_rename(self, rank: Rank, save: int) -> Iterator[None]:
        yield from self._slowly(rank.dir / f"step-{save}.bin.tmp", self._text(rank, save))
        os.replace(rank.dir / f"step-{save}.bin.tmp", rank.dir / f"step-{save}.bin")

    def _first_in_place(self, rank: Rank, save: int) -> Iterator[None]:
        yield from self._slowly(rank.dir / "last.bin", self._text(rank, save))

    def _shards(self, rank: Rank, save: int) -> Iterator[None]:
        yield from self._slowly(rank.dir / f"step-{save}" / f"rank{rank.number}.bin", self._text(rank, save))

    def _flat_shards(self, rank: Rank, save: int) -> Iterator[None]:
        yield from self._slowly(rank.dir / f"step{save}-rank{rank.number}.bin", self._text(rank, save))

    def _renamed_shards(self, rank: Rank, save: int) -> Iterator[None]:
        path = rank.dir / f"step-{save}"
        yield from self._slowly(rank.dir / f"step-{save}.tmp" / f"{rank.number}.bin", self._text(rank, save))
        os.replace(rank.dir / f"step-{save}.tmp", path)

    def _marked(self, rank: Rank, save: int) -> Iterator[None]:
        """Like torch's DCP: rank 0 writes the marker after all ranks have written."""
        path = rank.dir / f"step-{save}"
        yield from self._slowly(path / f"__{rank.number}_0.distcp", self._text(rank, save))
        if rank.number == 0:
            while any(other.work is not None for other in self.ranks[1:]):
                if not all(other.alive for other in self.ranks):
                    return
                yield
            (path / ".metadata").write_bytes(f"{save} meta\n".encode())

    # -- invariants --------------------------------------------------------------------------------------------

    def check(self, row: CheckpointRow) -> None:
        saves, ranks = set(), set()
        for file in self.blobs.tree(row.digest).files:
            with self.blobs.open(file.sha256) as content:
                data = content.read()
            save, _, number = data.splitlines()[0].decode().partition(" ")
            saves.add(save)
            if number != "meta":
                ranks.add(number)
                assert data == self._text(self.ranks[int(number)], int(save)), (
                    f"{row.name}: half of {file.path}"
                )
        assert len(saves) == 1, f"{row.name} is a mixture of {saves}"
        assert ranks == {str(rank.number) for rank in self.writers}, f"{row.name} has only {ranks}"

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.store.close()


STYLES = ["first by rename", "first in place", "shards", "flat shards", "renamed shards", "marked"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(int(os.environ.get("STOKER_SEEDS", "2"))))
@pytest.mark.parametrize("slow", [False, True])
def test_every_offered_checkpoint_is_complete(tmp_path: Path, style: str, slow: bool, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(f"{style} {seed}")
    rig = Rig(tmp_path, style, chance, slow)
    deaths = chance.random() < 0.5
    try:
        actions = [
            rig.save,
            rig.write,
            rig.write,
            rig.write,
            rig.wait,
            rig.wait,
            rig.tell,
            rig.tell,
            rig.look,
            *([rig.carry] if slow else []),
        ]
        for _ in range(250):
            chance.choice(actions)()
            if chance.random() < 0.02:
                rig.restart()
            if deaths and chance.random() < 0.005:
                rig.kill()
        rig.finish()
        rows = rig.store.checkpoints(rig.run, kept_only=True)
        assert rows or deaths
        if not deaths:
            newest = rows[-1]
            assert newest.step in (None, rig.saves - 1)
    finally:
        rig.close()
