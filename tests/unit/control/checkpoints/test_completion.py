"""A checkpoint of several tasks is never offered before all of its parts have arrived."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.control.checkpoints.completion import (
    OPEN,
    ROOM,
    Completion,
    Settled,
    WrittenPart,
    family_of,
    group_of,
    lacking,
)
from stoker.store.rows import PartRow


def part(task: str, name: str = "step-100", number: int = 1, **changes: object) -> WrittenPart:
    paths = changes.pop("paths", (name,))
    row = PartRow("r", 1, 1, task, number, name, f"{task}-{number}", 1, "quiet", 1.0)
    return WrittenPart(replace(row, **changes), paths)  # type: ignore[arg-type]


class Bench:
    """A completion whose rounds get names in order."""

    def __init__(self, *tasks: str, generation: int = 1) -> None:
        self.gathering = Completion(dict.fromkeys(tasks, generation))
        self.scans = dict.fromkeys(tasks, 0)
        self.offered: dict[str, set[str]] = {}
        self.dropped: list[WrittenPart] = []

    def add(self, *parts: WrittenPart) -> Bench:
        for one in parts:
            self.apply(self.gathering.add(one))
        self.settle()
        return self

    def look(self, *tasks: str, pending: Iterable[str] = ()) -> Bench:
        for task in tasks or tuple(self.scans):
            self.scans[task] += 1
            self.gathering.see(task, 1, self.scans[task], pending)
        self.settle()
        return self

    def end(self, task: str, state: str = "done") -> Bench:
        self.gathering.end(task, 1, state)
        self.settle()
        return self

    def settle(self) -> None:
        settled = self.gathering.settle()
        for round_ in settled.complete:
            name = f"c{len(self.offered)}"
            if round_.replaces:
                self.offered.pop(round_.replaces, None)
            self.offered[name] = {p.row.digest for p in round_.parts.values()}
            self.gathering.call(round_, name)
        self.apply(settled)

    def apply(self, settled: Settled) -> None:
        for name in settled.withdrawn:
            self.offered.pop(name, None)
        self.dropped += settled.dropped

    @property
    def sets(self) -> list[set[str]]:
        return list(self.offered.values())


def known(bench: Bench, *tasks: str) -> Bench:
    """After a first checkpoint of these tasks."""
    bench.add(*(part(task, "step-0", step=0, number=900) for task in tasks)).look().look()
    assert bench.sets == [{f"{task}-900" for task in tasks}]
    bench.offered.clear()
    return bench


def test_one_task_alone_is_complete_at_once() -> None:
    assert Bench("a").add(part("a", step=100)).sets == [{"a-1"}]


def test_the_first_checkpoint_needs_a_later_scan_of_every_task() -> None:
    bench = Bench("a", "b").look().look().add(part("a", step=100))
    assert bench.look().sets == []
    assert bench.look("a").sets == [] and bench.look("b").sets == [{"a-1"}]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_fast_writer_does_not_wait_for_scans_forever(stepped: bool) -> None:
    bench = Bench("a", "b")
    for number in range(1, 8):
        for _ in range(2):
            bench.add(part("a", "last.pt", number, step=number if stepped else None))
        bench.look("a", pending=["last.pt"]).look("b")
    assert bench.sets


def test_a_pending_part_is_awaited() -> None:
    bench = Bench("a", "b").add(part("a", step=100)).look("a").look("a")
    bench.look("b", pending=["step-100"]).look("b", pending=["step-100"])
    assert bench.sets == []
    bench.add(part("b", step=100)).look().look()
    assert bench.sets == [{"a-1", "b-1"}]


def test_the_writers_are_known_after_the_first_checkpoint() -> None:
    bench = known(Bench("a", "b"), "a")
    assert bench.add(part("a", step=100)).sets == [{"a-1"}]
    both = known(Bench("a", "b"), "a", "b").add(part("a", step=100)).look().look()
    assert both.sets == []
    assert both.add(part("b", step=100)).sets == [{"a-1", "b-1"}]


def test_a_late_part_withdraws_the_checkpoint() -> None:
    bench = Bench("a", "b").add(part("a", step=100)).look().look()
    assert bench.sets == [{"a-1"}]
    assert bench.add(part("b", step=100)).sets == [{"a-1", "b-1"}]
    assert bench.add(part("a", "step-200", 2, step=200)).look().look().sets == [{"a-1", "b-1"}]


def test_a_part_written_again_replaces_the_older_one() -> None:
    bench = known(Bench("a", "b"), "a", "b")
    bench.add(part("a", step=100), part("b", step=100)).add(part("b", step=100, number=2))
    assert bench.sets == [{"a-1", "b-2"}] and "b-1" in {p.row.digest for p in bench.dropped}


def test_parts_of_another_generation_are_refused() -> None:
    bench = Bench("a", "b", generation=2).add(part("a", step=100, generation=1))
    assert bench.sets == [] and len(bench.dropped) == 1 and bench.gathering.waiting == []


@pytest.mark.parametrize(("state", "offered"), [("done", True), ("stopped", True), ("lost", False)])
def test_the_end_of_a_task_that_never_wrote(state: str, offered: bool) -> None:
    bench = Bench("a", "b").end("b", state).add(part("a", step=100)).end("a")
    assert bool(bench.sets) is offered


@pytest.mark.parametrize(("state", "offered"), [("done", True), ("stopped", False), ("lost", False)])
def test_the_end_of_a_task_that_writes(state: str, offered: bool) -> None:
    bench = known(Bench("a", "b"), "a", "b").add(part("a", step=100)).end("b", state).end("a", state)
    assert bool(bench.sets) is offered


def test_shards_of_stopped_tasks_are_not_guessed_complete() -> None:
    bench = Bench("a", "b").add(part("a", step=100, paths=("step-100/rank0.pt",)))
    assert bench.end("b", "stopped").end("a", "stopped").sets == []


def test_a_lost_task_that_had_scanned_and_had_no_part() -> None:
    bench = Bench("a", "b").add(part("a", step=100)).look("b").look("b")
    bench.gathering.lose("b")
    assert bench.end("a", "stopped").sets == [{"a-1"}]


def test_a_damaged_part_spoils_the_round() -> None:
    bench = Bench("a", "b").add(part("a", step=100))
    bench.gathering.refuse("b", 1, "step-100")
    assert bench.look().look().end("b").end("a").sets == []


def test_ranks_in_names_belong_together() -> None:
    assert group_of("last-rank0.pt") == group_of("last-rank17.pt") != group_of("best-rank0.pt")
    assert group_of("rank_3") == group_of("worker-0") and group_of("crank5.pt") == "crank5.pt"
    assert family_of("step-100-rank3.pt") == family_of("step-2-rank0.pt")
    bench = Bench("a", "b").add(*(part(t, f"ckpt_rank_{n}.pt", step=n) for n, t in enumerate(("a", "b"))))
    assert bench.look().look().sets == [{"a-1", "b-1"}]


def test_formats_that_list_their_files() -> None:
    assert lacking(["s/__0_0.distcp", "s/__1_0.distcp"]) == "s/.metadata"
    assert lacking(["s/__0_0.distcp", "s/.metadata"]) == ""
    assert lacking(["ckpt.index", "ckpt.data-00000-of-00002"]) != ""
    assert lacking(["ckpt.index", "ckpt.data-00000-of-00002", "ckpt.data-00001-of-00002"]) == ""
    bench = Bench("a", "b").add(part("b", step=100, paths=("step-100/__1_0.distcp",)))
    assert bench.look().look().sets == []
    bench.add(part("a", step=100, paths=("step-100/__0_0.distcp", "step-100/.metadata"))).look().look()
    assert bench.sets == [{"a-1", "b-1"}]


def test_files_in_place_count_when_no_task_writes() -> None:
    bench = Bench("a", "b").add(part("a", "last.pt", 1), part("b", "last.pt", 1))
    assert bench.look().look().sets == [{"a-1", "b-1"}]
    # b has skipped one, and the newest part of a is missing
    bench.add(part("a", "last.pt", 2)).add(part("b", "last.pt", 3))
    bench.look(pending=["last.pt"]).look(pending=["last.pt"])
    assert len(bench.sets) == 1
    bench.add(part("a", "last.pt", 3)).look().look()
    assert bench.sets == [{"a-1", "b-1"}, {"a-3", "b-3"}]
    # Each part of a task that writes alone is complete.
    alone = Bench("a", "b").add(part("a", "last.pt", 1)).look().look()
    assert alone.add(part("a", "last.pt", 2)).sets == [{"a-1"}, {"a-2"}]


def test_steps_from_the_sdk_match_exactly() -> None:
    bench = known(Bench("a", "b"), "a", "b")
    bench.add(part("a", "last.pt", 1, step=1, how="sdk"), part("a", "last.pt", 2, step=2, how="sdk"))
    bench.add(part("b", "last.pt", 2, step=2, how="sdk")).look().look()
    assert bench.sets == [{"a-2", "b-2"}]


def test_a_task_that_stops_writing_is_not_awaited_forever() -> None:
    bench = known(Bench("a", "b"), "a", "b")
    for step in range(1, OPEN + 2):
        bench.look().look().add(part("a", f"step-{step}", step=step, number=step)).look().look()
    assert bench.sets and bench.sets[-1] == {f"a-{OPEN + 1}"}


def test_a_slow_task_is_awaited() -> None:
    bench = known(Bench("a", "b"), "a", "b")
    for step in range(1, 41):
        bench.look().add(part("a", f"step-{step}", step=step, number=step))
        if step % 2 == 0:
            bench.add(part("b", f"step-{step // 2}", step=step // 2, number=step // 2))
    assert bench.sets == [{f"a-{step}", f"b-{step}"} for step in range(1, 21)]


def test_parts_that_wait_for_a_very_slow_task_are_bounded() -> None:
    bench = known(Bench("a", "b"), "a", "b")
    for step in range(1, 20):
        bench.add(part("a", f"step-{step}", step=step, number=step, size=ROOM // 8))
        bench.add(part("b", f"other-{step}", step=step, number=100 + step)).look()
        bench.add(part("b", f"step-{-step}", step=-step, number=200 + step))
    waiting = [one for one in bench.gathering.waiting if one.group.startswith("step-")]
    assert sum(p.row.size for one in waiting for p in one.parts.values()) <= ROOM + ROOM // 4


# -- random orders of events -------------------------------------------------------------------------------------


@dataclass
class Writer:
    writes: bool
    begun: int = -1
    """The newest save it has begun."""
    committed: int = -1
    scans: int = 0
    alive: bool = True
    number: int = 0
    journal: list[WrittenPart | str] = field(default_factory=list)
    status: tuple[int, tuple[str, ...]] = (0, ())
    told: bool = False


class Simulation:
    """Tasks that save together, a server that reads them at random moments, kills and restarts of both. As in
    a real training, no task begins a save before all have begun the previous one. Of the first save, and of
    files in place, no part is committed before every task has begun."""

    def __init__(self, chance: random.Random, style: str) -> None:
        self.chance = chance
        self.style = style
        count = chance.randint(1, 4)
        writers = [chance.random() < 0.6 for _ in range(count)]
        writers[chance.randrange(count)] = True
        self.tasks = {f"t{n}": Writer(writes) for n, writes in enumerate(writers)}
        self.store: dict[tuple[str, int], WrittenPart] = {}
        self.offered: dict[str, frozenset[int | None]] = {}
        self.gathering = Completion(dict.fromkeys(self.tasks, 1))
        self.names = 0

    def name(self, save: int) -> str:
        return f"step-{save}" if self.style == "steps" else "last.pt"

    @property
    def writers(self) -> list[Writer]:
        return [writer for writer in self.tasks.values() if writer.writes]

    def begin(self, task: str) -> None:
        writer = self.tasks[task]
        aligned = all(other.begun >= writer.begun for other in self.writers)
        # A file in place may be overwritten before it is read; a step has its own name, and is awaited.
        ready = writer.committed == writer.begun or self.style == "place"
        if writer.alive and writer.writes and aligned and ready:
            writer.begun += 1

    def commit(self, task: str) -> None:
        writer = self.tasks[task]
        if not writer.alive or writer.committed >= writer.begun:
            return
        if (writer.begun == 0 or self.style == "place") and any(
            other.begun < writer.begun for other in self.writers
        ):
            return
        writer.committed = writer.begun
        writer.number += 1
        row = PartRow(
            "r", 1, 1, task, writer.number, self.name(writer.begun), f"{writer.begun}", 1, "quiet", 1.0
        )
        step = None if self.style == "place" else writer.begun
        row = replace(row, step=step)
        writer.journal.append(WrittenPart(row, (row.name,)))

    def scan(self, task: str) -> None:
        writer = self.tasks[task]
        if writer.alive:
            writer.scans += 1
            pending = (self.name(writer.begun),) if writer.begun > writer.committed else ()
            writer.status = (writer.scans, pending)

    def kill(self, task: str) -> None:
        writer = self.tasks[task]
        if writer.alive:
            writer.alive = False
            if writer.begun > writer.committed:
                writer.journal.append(self.name(writer.begun))

    def look(self, task: str) -> None:
        writer = self.tasks[task]
        self.gathering.see(task, 1, *writer.status)
        for entry in writer.journal:
            if isinstance(entry, str):
                self.gathering.refuse(task, 1, entry)
            else:
                self.store[entry.key[0], entry.key[2]] = entry
                self.apply(self.gathering.add(entry))
        writer.journal = []
        if not writer.alive:
            writer.told = True
            self.gathering.end(task, 1, "lost")
        self.settle()

    def settle(self) -> None:
        settled = self.gathering.settle()
        for round_ in settled.complete:
            self.names += 1
            name = f"c{self.names}"
            self.offer(name, list(round_.parts.values()))
            self.gathering.call(round_, name)
            for one in round_.parts.values():
                marked = WrittenPart(replace(one.row, checkpoint=name), one.paths)
                self.store[one.key[0], one.key[2]] = marked
        self.apply(settled)

    def offer(self, name: str, parts: list[WrittenPart]) -> None:
        saves = {part.row.digest for part in parts}
        found = {part.row.task for part in parts}
        wrote = {task for task, writer in self.tasks.items() if writer.writes}
        assert len(saves) == 1, f"a mixture: {parts}"
        assert found == wrote, f"torn: {found} of {wrote}"

    def apply(self, settled: Settled) -> None:
        assert not settled.withdrawn
        for one in settled.dropped:
            self.store.pop((one.key[0], one.key[2]), None)
        for round_ in settled.reopened:
            for one in round_.parts.values():
                self.store[one.key[0], one.key[2]] = one

    def restart(self) -> None:
        """The server is killed and restarted: it reads the store, and learns again which tasks have ended."""
        self.gathering = Completion(dict.fromkeys(self.tasks, 1))
        self.apply(self.gathering.restore(list(self.store.values())))
        for task, writer in self.tasks.items():
            if writer.told:
                self.gathering.end(task, 1, "lost")

    def finish(self) -> None:
        """All tasks end by themselves, and their last save is offered."""
        for task, writer in self.tasks.items():
            while writer.writes and writer.begun < max(other.begun for other in self.writers):
                self.begin(task)
                if self.style != "place":
                    self.commit(task)
        for task in self.tasks:
            self.commit(task)
        for task, writer in self.tasks.items():
            if writer.alive:
                self.scan(task)
                self.look(task)
        for task, writer in self.tasks.items():
            if writer.alive:
                self.gathering.end(task, 1, "done")
        self.settle()


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["steps", "place"]), st.booleans())
def test_every_offered_checkpoint_is_complete(chance: random.Random, style: str, deaths: bool) -> None:
    world = Simulation(chance, style)
    actions = ["begin", "commit", "scan", "look"] * 3 + ["restart"] + (["kill"] if deaths else [])
    for _ in range(chance.randint(1, 120)):
        action = chance.choice(actions)
        if action == "restart":
            world.restart()
        else:
            getattr(world, action)(chance.choice(sorted(world.tasks)))
    if not deaths:
        begun = max(writer.begun for writer in world.writers)
        world.finish()
        assert begun < 0 or world.names > 0
