"""A store, blobs, and the committed parts of two tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.blobs import BlobStore
from stoker.control.checkpoints.assembly import Assembled, Assembly
from stoker.control.ingest.journal_reader import Intake
from stoker.spec.tree import Tree, TreeFile
from stoker.store import Store
from stoker.store.rows import CheckpointRow, NewRun, PartRow
from stoker.task.formats import Status

TWO = {"worker-0": 1, "worker-1": 1}


class Rig:
    """A store, blobs, and an assembly whose answers are recorded."""

    def __init__(self, tmp_path: Path) -> None:
        self.blobs = BlobStore(tmp_path / "blobs")
        self.store = Store.open(tmp_path / "stoker.db")
        self.run = self.store.submit(NewRun("key", "digits", {}, ["true"]), now=1.0)[0].id
        self.scans = 0
        self.done = Assembled()
        self.assembly = self.again()

    def again(self, generation: int = 1, members: dict[str, int] = TWO) -> Assembly:
        """A new assembly, as after a restart of the server."""
        self.assembly = Assembly(self.blobs, run=self.run, attempt=1)
        known = self.store.checkpoint_parts(self.run, 1)
        self.record(self.assembly.begin(generation, members, known=known))
        return self.assembly

    def record(self, done: Assembled) -> Assembled:
        self.store.apply(done.changes)
        self.done = done
        return done

    def tree(self, **files: str) -> tuple[str, int]:
        entries = []
        for path, text in files.items():
            digest, size = self.blobs.put_stream([text.encode()])
            entries.append(TreeFile(path.replace("__", "/"), digest, size))
        tree = Tree.of(entries)
        return self.blobs.put_tree(tree), tree.size

    def part(self, task: str, name: str, number: int, files: dict[str, str], **more: Any) -> PartRow:
        digest, size = self.tree(**files)
        generation = more.pop("generation", 1)
        return PartRow(self.run, 1, generation, task, number, name, digest, size, "rename", 1.0, **more)

    def take(self, *parts: PartRow, **more: Any) -> Assembled:
        found = {task: Intake(generation=1) for task in TWO}
        for row in parts:
            found[row.task].parts.append(row)
        return self.record(self.assembly.take(found, **more))

    def look(self) -> Assembled:
        self.scans += 1
        status = {task: Intake(status=Status("running", generation=1, scans=self.scans)) for task in TWO}
        return self.record(self.assembly.take(status))

    def rows(self) -> list[CheckpointRow]:
        return self.store.checkpoints(self.run, kept_only=True)

    def files(self, row: CheckpointRow) -> list[str]:
        return [file.path for file in self.blobs.tree(row.digest).files]

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.store.events(self.run) if event.kind == "warning"]
