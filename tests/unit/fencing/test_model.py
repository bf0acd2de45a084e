"""No two bodies of a slot act at once: a state machine of server, engine, launchers, network and faults.

The model has the real orders and journal entries and calls the real rules; it replaces processes, disks and
time. Its checks use its own record of what really happened (`Body`, `true_time`), never the answers of the rules.
At the end, broken rules are put in on purpose, and the model must notice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stoker.task import fencing, formats

SLOTS = ("worker-0", "worker-1", "worker-2")
LOST_AFTER, LEASE = 8.0, 40.0


@dataclass(frozen=True)
class Rules:
    """The rules of server and launcher. Each mutant changes one."""

    may_start: Callable[..., bool] = fencing.may_start
    accept: Callable[..., bool] = fencing.accept
    vigil: Callable[[], Any] = fencing.Vigil
    journals_first: bool = True
    commits_first: bool = True
    sees_exclusive: bool = True


@dataclass
class Body:
    """A training process that really runs. Only its own end or the end of its machine stops it."""

    slot: str
    generation: int
    steps: int = 0


@dataclass
class Task:
    """One incarnation: a directory and a launcher. The journal survives the launcher."""

    slot: str
    incarnation: int
    node: str
    order: formats.Order | None = None
    journal: list[str] = field(default_factory=list)
    body: Body | None = None
    alive: bool = True
    frozen: bool = False
    cut_off: bool = False
    silent_since: float | None = None
    """When the engine began, in true time, to see it silent on a node that is not ready."""

    @property
    def name(self) -> str:
        return f"{self.slot}/{self.incarnation}"

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal]

    def write(self, kind: str, record: dict[str, Any]) -> None:
        self.journal.append(json.dumps({"k": kind, **record}))


@dataclass
class Row:
    """The attempt in the database, which survives the server."""

    generation: int = 1
    order_seq: int = 1
    ended: bool = False
    incarnations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SLOTS, 1))
    results: dict[str, int] = field(default_factory=dict)
    """slot -> the generation whose ending was taken."""
    checkpoints: list[tuple[int, str]] = field(default_factory=list)

    def text(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True)


class Fencing(RuleBasedStateMachine):
    rules_in_use = Rules()

    def __init__(self) -> None:
        super().__init__()
        self.rules = self.rules_in_use
        self.row = Row()
        self.tasks: dict[str, Task] = {}
        self.unready: set[str] = set()
        self.engine_answers = True
        self.server_up = True
        self.true_time = 0.0
        self.own_time = 0.0  # what the server process reads; another origin in each process
        self.wall_time = 1e9
        self.vigil = self.rules.vigil()
        self.orders: list[tuple[str, str]] = []  # to a task; may arrive late, twice or out of order
        self.records: list[dict[str, Any]] = []  # to the server; likewise
        self.starts: dict[tuple[int, str], int] = {}
        self.acknowledged: set[tuple[int, str]] = set()
        self.exclusive = False

    @initialize(
        exclusive=st.booleans(), nodes=st.sampled_from([("a", "b", "c"), ("a", "a", "b"), ("a", "a", "a")])
    )
    def submit(self, exclusive: bool, nodes: tuple[str, ...]) -> None:
        self.exclusive = exclusive
        self.homes = dict(zip(SLOTS, nodes, strict=True))
        self._submit_and_order()

    # -- the server ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.server_up)
    @rule(looks=st.sampled_from([1, 1, 6]), crash=st.sampled_from(["", "", "", "", "before", "after"]))
    def server_works(self, looks: int, crash: str) -> None:
        """The server may be killed just before or after the commit of its last pass."""
        for _ in range(looks - 1):
            self.control_pass(2.0, "")
        self.control_pass(2.0, crash)

    def control_pass(self, passed: float, crash: str) -> None:
        """Observe, decide, record, act."""
        self._time_passes(passed)
        decisions = self.vigil.look(self.own_time, self._sights() if self.engine_answers else None)
        if self.row.ended:
            return None
        lost = [
            self.tasks[name]
            for name, what in decisions.items()
            if what == fencing.REPLACE and self._is_current(name)
        ]
        for task in lost:
            self._check_really_lost(task)
        for name, what in decisions.items():
            if what == fencing.END:
                self._engine_ends(self.tasks[name])
        if lost and crash == "before":
            return self.server_crashes()
        if lost:
            self._new_generation([task.slot for task in lost])
        if crash:
            return self.server_crashes()
        self._submit_and_order()
        self._collect()
        return None

    @precondition(lambda self: self.server_up)
    @rule()
    def server_crashes(self) -> None:
        self.server_up = False

    @precondition(lambda self: not self.server_up)
    @rule(own_time=st.sampled_from([0.0, 7.0, 1e6]))
    def server_starts(self, own_time: float) -> None:
        """Only the row is left. The server gives its orders new numbers: it cannot know whether the last ones
        were sent."""
        self.server_up, self.own_time, self.vigil = True, own_time, self.rules.vigil()
        lost = self.acknowledged - {
            *self.row.checkpoints,
            *((g, slot) for slot, g in self.row.results.items()),
        }
        assert not lost, f"acknowledged and lost: {lost}"
        self.row.order_seq += 1

    @precondition(lambda self: self.server_up and self.records)
    @rule(data=st.data(), again=st.booleans(), crash=st.sampled_from([False, False, False, True]))
    def record_arrives(self, data: st.DataObject, again: bool, crash: bool) -> None:
        index = data.draw(st.integers(0, len(self.records) - 1))
        record = self.records[index] if again else self.records.pop(index)
        self._take_in(record, crash)

    def _take_in(self, record: dict[str, Any], crash: bool = False) -> None:
        before = self.row.text()
        fenced = self.row.ended or record["generation"] != self.row.generation
        thing = (record["generation"], record["name"] if record["k"] == "checkpoint" else record["slot"])
        if not self.rules.accept(record["generation"], self.row.generation, self.row.ended):
            assert self.row.text() == before
            return None
        if crash and not self.rules.commits_first:
            self.acknowledged.add(thing)
            return self.server_crashes()
        if record["k"] == "checkpoint" and thing not in self.row.checkpoints:
            self.row.checkpoints.append(thing)
        elif record["k"] == "ended" and record["kind"] == "exit":
            self.row.results[record["slot"]] = record["generation"]
        elif record["k"] == "ended":
            self._new_generation([])
        assert not (fenced and self.row.text() != before), f"{record} of a dead generation changed the run"
        if record["k"] == "checkpoint" or record["kind"] == "exit":
            self.acknowledged.add(thing)
        if len(self.row.results) == len(SLOTS):
            assert len(set(self.row.results.values())) == 1, "results of two generations in one run"
            self.row.ended = True
        if crash:
            self.server_crashes()
        return None

    def _new_generation(self, slots: list[str]) -> None:
        self.row.generation += 1
        self.row.order_seq += 1
        self.row.results.clear()
        self.acknowledged = {thing for thing in self.acknowledged if thing[1].startswith("step")}
        for slot in slots:
            self.row.incarnations[slot] += 1

    def _submit_and_order(self) -> None:
        for slot in SLOTS:
            incarnation = self.row.incarnations[slot]
            node = self.homes[slot] if incarnation == 1 else f"spare-{slot}-{incarnation}"
            task = Task(slot, incarnation, node)
            if self.engine_answers:
                self.tasks.setdefault(task.name, task)
            verb = "release" if self.row.ended else "run"
            order = formats.Order(self.row.order_seq, self.row.generation, verb, ["python", "train.py"])
            self.orders.append((task.name, json.dumps(order.to_json())))

    def _collect(self) -> None:
        for task in self.tasks.values():
            if not self._is_current(task.name) or task.cut_off or task.frozen:
                continue
            for entry in task.entries():
                record = {**entry, "slot": task.slot}
                if entry["k"] != "starting" and record not in self.records:
                    self.records.append(record)

    # -- the engine ------------------------------------------------------------------------------------------

    def _presence(self, task: Task) -> str:
        if task.node in self.unready or task.cut_off or task.frozen:
            return "silent"
        return "alive" if task.alive else "gone"

    def _sights(self) -> list[fencing.TaskSight]:
        return [
            fencing.TaskSight(
                task.name,
                self._presence(task),
                task.node,
                task.node not in self.unready,
                lost_after=LOST_AFTER,
                lease=LEASE,
                exclusive=self.exclusive and self.rules.sees_exclusive,
            )
            for task in self.tasks.values()
            if self._is_current(task.name)
        ]

    def _engine_ends(self, task: Task) -> None:
        """Deleting a pod on a reachable node ends it, also when it is frozen."""
        if task.node not in self.unready:
            task.alive = task.frozen = task.cut_off = False
            task.body = None

    def _is_current(self, name: str) -> bool:
        slot, incarnation = name.split("/")
        return self.row.incarnations[slot] == int(incarnation)

    # -- launchers and bodies --------------------------------------------------------------------------------

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), again=st.booleans())
    def order_arrives(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.orders) - 1))
        name, text = self.orders[index] if again else self.orders.pop(index)
        self._order_reaches(name, text)

    def _order_reaches(self, name: str, text: str) -> None:
        task = self.tasks.get(name)
        if task is not None and not task.cut_off and task.node not in self.unready:
            task.order = formats.Order.from_json(json.loads(text))

    @precondition(lambda self: self._workable(lambda task: task.order))
    @rule(data=st.data(), dies=st.sampled_from([False, False, False, True]))
    def launcher_reads_its_order(self, data: st.DataObject, dies: bool) -> None:
        self._launcher_step(data.draw(st.sampled_from(self._workable(lambda task: task.order))), dies)

    def _launcher_step(self, task: Task, dies: bool = False) -> None:
        """`dies`: the launcher is killed between the journal and the fork, or right after the fork."""
        order = task.order
        assert order is not None
        if not self.rules.may_start(task.entries(), order):
            return None
        if task.body is not None:
            self._end_body(task, "stopped", 143)
        if self.rules.journals_first:
            task.write("starting", {"seq": order.seq, "generation": order.generation, "at": self.wall_time})
        if dies and self.rules.journals_first:
            return self._launcher_dies(task, restarted=True)
        key = (order.generation, task.slot)
        self.starts[key] = self.starts.get(key, 0) + 1
        assert self.starts[key] == 1, f"a second body of {task.slot} in generation {order.generation}"
        task.body = Body(task.slot, order.generation)
        if dies:
            self._launcher_dies(task, restarted=True)
        self._check_alone(task)
        return None

    @precondition(lambda self: self._workable(lambda task: task.body))
    @rule(data=st.data(), ends=st.booleans())
    def body_works(self, data: st.DataObject, ends: bool) -> None:
        """The body reaches its next step and checkpoint, or its end."""
        task = data.draw(st.sampled_from(self._workable(lambda task: task.body)))
        assert task.body is not None
        if ends:
            return self._end_body(task, "exit", 0)
        return self._checkpoint(task)

    def _checkpoint(self, task: Task) -> None:
        assert task.body is not None
        task.body.steps += 1
        name = f"step-{task.slot}-{task.body.steps}"
        staged = formats.StagedCheckpoint(
            len(task.journal), task.body.generation, name, "sdk", at=self.wall_time
        )
        task.write("checkpoint", staged.to_json())

    @precondition(lambda self: self._workable(lambda task: True))
    @rule(data=st.data(), restarted=st.booleans())
    def launcher_dies(self, data: st.DataObject, restarted: bool) -> None:
        """Its body dies too. A restarted launcher reads its journal; otherwise the engine has the proof."""
        self._launcher_dies(data.draw(st.sampled_from(self._workable(lambda task: True))), restarted)

    def _launcher_dies(self, task: Task, restarted: bool) -> None:
        if restarted and self.rules.journals_first:
            self._finish_journal(task)
        task.body = None
        task.alive = restarted

    def _finish_journal(self, task: Task) -> None:
        started = [entry for entry in task.entries() if entry["k"] == "starting"]
        ended = {entry["seq"] for entry in task.entries() if entry["k"] == "ended"}
        if started and started[-1]["seq"] not in ended:
            last = started[-1]
            task.write(
                "ended", formats.Ending(last["seq"], last["generation"], "lost", at=self.wall_time).to_json()
            )

    def _end_body(self, task: Task, kind: str, code: int) -> None:
        assert task.body is not None
        seqs = [entry["seq"] for entry in task.entries() if entry["k"] == "starting"]
        ending = formats.Ending(max(seqs, default=0), task.body.generation, kind, code, at=self.wall_time)
        task.write("ended", ending.to_json())
        task.body = None

    def _workable(self, has: Callable[[Task], Any]) -> list[Task]:
        return [task for task in self.tasks.values() if task.alive and not task.frozen and has(task)]

    # -- faults ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), what=st.sampled_from(["freeze", "wake", "cut off", "join"]))
    def task_suffers(self, data: st.DataObject, what: str) -> None:
        task = data.draw(st.sampled_from(list(self.tasks.values())))
        if what in ("freeze", "wake"):
            task.frozen = task.alive and what == "freeze"
        else:
            task.cut_off = what == "cut off"
        self._note_silence()

    @rule(node=st.sampled_from("aabc"))
    def node_is_lost_or_returns(self, node: str) -> None:
        self.unready ^= {node}
        self._note_silence()

    @rule(answers=st.booleans())
    def engine_answers_or_not(self, answers: bool) -> None:
        self.engine_answers = answers
        self._note_silence()

    @rule(seconds=st.sampled_from([1.0, 5.0, 500.0]), node=st.sampled_from(["", "a", "b"]))
    def server_is_frozen_for_a_while(self, seconds: float, node: str) -> None:
        """After it, a node may be lost or come back."""
        self._time_passes(seconds)
        if node:
            self.node_is_lost_or_returns(node)
        if self.server_up:
            self.control_pass(0.5, "")

    @precondition(lambda self: self.tasks)
    @rule(finish=st.booleans())
    def all_is_well_for_a_moment(self, finish: bool) -> None:
        """Orders and records arrive where nothing is broken, so that runs get far enough for faults to
        matter."""
        for name, text in self.orders[-len(SLOTS) :]:
            self._order_reaches(name, text)
        for task in self._workable(lambda task: task.order):
            self._launcher_step(task)
        for task in self._workable(lambda task: task.body):
            self._checkpoint(task)
            if finish:
                self._end_body(task, "exit", 0)
        if self.server_up:
            self._collect()
            for record in [record for record in self.records if record["k"] == "ended"]:
                self._take_in(record)

    @rule(to=st.sampled_from([0.0, 1e9, 2e9]))
    def wall_clock_jumps(self, to: float) -> None:
        self.wall_time = to

    def _time_passes(self, seconds: float) -> None:
        self.true_time += seconds
        self.own_time += seconds
        self._note_silence()

    def _note_silence(self) -> None:
        for task in self.tasks.values():
            since = task.silent_since
            if since is not None and self.true_time - since >= LEASE and not task.frozen:
                # Its lease has expired, so it ends; a frozen one ends when it resumes.
                self._launcher_dies(task, restarted=False)
            if self._presence(task) != "silent":
                task.silent_since = None
            elif task.silent_since is None:
                task.silent_since = self.true_time

    # -- invariants ------------------------------------------------------------------------------------------

    def _check_really_lost(self, task: Task) -> None:
        if not task.alive and self._presence(task) == "gone":
            return
        assert self.engine_answers, "replaced on an engine's silence"
        assert task.silent_since is not None, f"{task.name} is there and is replaced"
        silent = self.true_time - task.silent_since
        if silent >= LEASE:
            return
        assert task.node in self.unready, f"{task.name} is replaced although its node is ready"
        assert silent >= LOST_AFTER, f"{task.name} is replaced after {silent} s"
        quiet = [t for t in self.tasks.values() if self._is_current(t.name) and self._presence(t) == "silent"]
        assert len(quiet) * 2 <= len(SLOTS) or len({t.node for t in quiet}) == 1, "most were silent together"

    def _check_alone(self, task: Task) -> None:
        """With `exclusive`, no second body of the same slot can still act."""
        others = [
            other
            for other in self.tasks.values()
            if other is not task
            and other.slot == task.slot
            and other.body is not None
            and other.alive
            and not other.frozen
        ]
        assert not (self.exclusive and others and self._is_current(task.name)), (
            f"two bodies of {task.slot} at once"
        )

    def teardown(self) -> None:
        """Faults stop; then every run ends."""
        if not self.tasks:
            return
        self.unready.clear()
        self.engine_answers = True
        for task in self.tasks.values():
            task.frozen = task.cut_off = False
        self._note_silence()
        for _ in range(40):
            if not self.server_up:
                self.server_starts(0.0)
            self.control_pass(2.0, "")
            if self.row.ended:
                break
            while self.orders:
                name, text = self.orders.pop(0)
                task = self.tasks[name]
                task.order = formats.Order.from_json(json.loads(text))
                if task.alive:
                    self._launcher_step(task)
            for task in self._workable(lambda task: task.body):
                if self._is_current(task.name):
                    self._end_body(task, "exit", 0)
            while self.records:
                self._take_in(self.records.pop(0))
        assert self.row.ended, "the faults are over and the run does not end"


QUICK = settings(max_examples=150, stateful_step_count=40)
TestFencing = Fencing.TestCase
TestFencing.settings = QUICK


# -- the model notices broken rules ----------------------------------------------------------------------------


class Hasty(fencing.Vigil):
    """Replaces a task at the first silent look."""

    def look(self, now: float, sights: Any) -> dict[str, str]:
        return {s.task: fencing.REPLACE for s in sights or () if s.presence in ("silent", "gone")}


class Unbounded(fencing.Vigil):
    """Counts a long pause of the server itself as observed silence."""

    def _longer(self, before: dict[str, float], sights: Any, passed: float) -> dict[str, float]:
        return {s.task: before.get(s.task, 0.0) + passed for s in sights}


def only_by_number(journal: Any, order: formats.Order) -> bool:
    """Ignores that a generation starts only once, under any order number."""
    return order.verb == "run" and all(order.seq > entry["seq"] for entry in journal if "seq" in entry)


def any_not_seen(journal: Any, order: formats.Order) -> bool:
    """Starts any order that it has not seen, also an older one."""
    return order.verb == "run" and all(
        (order.seq, order.generation) != (entry["seq"], entry["generation"])
        for entry in journal
        if "seq" in entry
    )


MUTANTS = {
    "starts without journaling": (Rules(journals_first=False), "a second body"),
    "starts any order it has not seen": (Rules(may_start=any_not_seen), "a second body"),
    "starts by number alone": (Rules(may_start=only_by_number), "a second body"),
    "accepts any generation": (Rules(accept=lambda record, now, ended: not ended), "dead generation"),
    "accepts after the end": (Rules(accept=lambda record, now, ended: record == now), "dead generation"),
    "replaces on silence at once": (Rules(vigil=Hasty), "is replaced"),
    "counts its own sleep as silence": (Rules(vigil=Unbounded), "is replaced"),
    "acknowledges before it commits": (Rules(commits_first=False), "acknowledged and lost"),
    "ignores exclusive": (Rules(sees_exclusive=False), "at once"),
}


@pytest.mark.parametrize("broken", MUTANTS)
def test_a_broken_rule_is_noticed(broken: str) -> None:
    rules, complaint = MUTANTS[broken]

    class Broken(Fencing):
        rules_in_use = rules

    search = settings(
        QUICK,
        max_examples=1_000,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        database=None,
        print_blob=False,
    )
    with pytest.raises(AssertionError, match=complaint):
        run_state_machine_as_test(Broken, settings=search)
