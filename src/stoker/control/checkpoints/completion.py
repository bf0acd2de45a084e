"""Decides when a checkpoint that several tasks write is complete. Pure: parts and task states in, complete rounds out.

A launcher commits what its task wrote: a part. Nothing announces which tasks write parts of a checkpoint, so the
writers are learnt. For the first checkpoint, every task must finish a scan that began after the last part arrived, and
have nothing of that name pending. After that the writers are known: the next checkpoint is complete as soon as each of
them has written its part, without waiting for scans. If another task then writes a part of a complete checkpoint, that
checkpoint is withdrawn. It is complete again once the new part has arrived.

    group     parts whose names differ only in a rank: `step-100`, `last-rank0.pt`
    round     one state of a group, identified by its step (from the SDK or from the name). Files without a step that
              several tasks overwrite in place count in the newest state of each task, and only while no task is
              writing one of them. Clocks of different tasks are never compared.
    family    groups that differ only in numbers; their writers are learnt together

A task that was killed may have been about to write. A round without its part is complete only if the task is known not
to write one, or if it finished a scan after the last part arrived. A round without its format's own marker is never
complete: torch's DCP writes `.metadata` last, `-00001-of-00004` says how many files there are.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.store.rows import PartRow
from stoker.task import checkpoint_names

OPEN = 4
"""Most rounds of one family that wait for a task which has written none since the oldest of them. When one more comes,
the oldest is given up. If the task kept running without writing, later rounds do not wait for it."""
ABSTAINS = 3
"""Scans of a task without a part of a family, since another task wrote the first part. After these the task counts as
one that writes none."""
MOST = 256
ROOM = 8 << 30
"""Most rounds of one family, and bytes of their parts, that wait for a task which is only slow."""

_RANK = re.compile(r"[-_.]?(?<![a-z])(?:rank|worker|task|proc|process|node)[-_=.]?\d+", re.IGNORECASE)
_OF = re.compile(r"^(?P<stem>.*[-_.])(?P<number>\d{5})-of-(?P<count>\d{5})(?P<rest>[^/]*)$")

Slot = tuple[str, str]
"""A task and a name."""


@dataclass(frozen=True)
class WrittenPart:
    row: PartRow
    paths: tuple[str, ...] = ()

    @property
    def slot(self) -> Slot:
        return self.row.task, self.row.name

    @property
    def key(self) -> tuple[str, int, int]:
        return self.row.task, self.row.generation, self.row.number


@dataclass(eq=False)
class Round:
    group: str
    parts: dict[Slot, WrittenPart] = field(default_factory=dict)
    last: WrittenPart | None = None
    """The newest part."""
    checkpoint: str | None = None
    """Id of the checkpoint, once complete; empty: it was refused."""
    replaces: str | None = None
    """Id of the checkpoint before another part arrived."""
    asked: dict[str, int] = field(default_factory=dict)
    """By task: its number of scans in its first status after the newest part."""
    passed: set[str] = field(default_factory=set)
    """Tasks that have finished a scan since then."""

    def put(self, part: WrittenPart) -> None:
        self.parts[part.slot] = part
        self.last = part
        self.asked, self.passed = {}, set()

    def tasks(self) -> Counter[str]:
        return Counter(task for task, _ in self.parts)


@dataclass
class _Task:
    generation: int
    state: str = "running"
    """running | done (by itself) | stopped (on request) | lost"""
    pending: frozenset[str] = frozenset()

    def is_writing(self, family: str) -> bool:
        return any(family_of(name) == family for name in self.pending)


@dataclass
class Settled:
    """Changes of rounds and parts."""

    complete: list[Round] = field(default_factory=list)
    reopened: list[Round] = field(default_factory=list)
    """Were complete; another part has arrived since."""
    withdrawn: list[str] = field(default_factory=list)
    """Ids of checkpoints that were called complete although a part was missing."""
    dropped: list[WrittenPart] = field(default_factory=list)


class Completion:
    """One generation of an attempt. Used by one thread. After a restart it is rebuilt from the parts in the store; only
    the scans have to be waited for again."""

    def __init__(self, members: Mapping[str, int]) -> None:
        """`members`: task -> generation of its body, in the order of the ranks."""
        self._tasks = {task: _Task(generation) for task, generation in members.items()}
        self._rounds: list[Round] = []
        self._writers: dict[str, Counter[str]] = {}
        """By family: how many parts each task writes."""
        self._refused: dict[str, set[str]] = {}
        """By group: tasks whose newest part was damaged."""
        self._silent: dict[str, Counter[str]] = {}
        """By family and task: rounds that other tasks have begun since it last wrote."""
        self._unstepped: set[str] = set()
        """Groups with a part whose step is unknown."""
        self._scans: dict[str, dict[str, tuple[int, int]]] = {}
        """By family and task: its number of scans in its first status after the first part, and in its newest status."""

    # -- input ---------------------------------------------------------------------------------------------------

    def see(self, task: str, generation: int, scans: int, pending: Iterable[str]) -> None:
        """A status of the task, read after all parts added so far. `pending`: names that the task is writing, or whose
        committed bytes are still being transferred."""
        known = self._current(task, generation)
        if known is None:
            return
        known.pending = frozenset(pending)
        for counts in self._scans.values():
            first = min(counts.get(task, (scans, scans))[0], scans)
            counts[task] = first, scans
        for round_ in self._rounds:
            if round_.asked.get(task, scans + 1) > scans:
                round_.asked[task] = (
                    scans  # the first status; or its launcher was restarted and counts from 0
                )
            elif scans > round_.asked[task]:
                round_.passed.add(task)

    def add(self, part: WrittenPart) -> Settled:
        """A committed part. One of another generation is refused."""
        settled = Settled()
        if self._current(part.row.task, part.row.generation) is None:
            settled.dropped.append(part)
            return settled
        group = group_of(part.row.name)
        self._refused.get(group, set()).discard(part.row.task)
        if any(part.key == other.key for round_ in self._rounds for other in round_.parts.values()):
            return settled
        if step_of(part) is None and group not in self._unstepped:
            self._unstepped.add(group)
            for round_ in [other for other in self.waiting if other.group == group][:-1]:
                self._drop(round_, settled)
        self._place(part, settled)
        self._silent.setdefault(family_of(group), Counter())[part.row.task] = 0
        return settled

    def refuse(self, task: str, generation: int, name: str) -> None:
        """The part of this name is damaged. No round of the name is complete until the task writes a good one."""
        if self._current(task, generation) is not None:
            self._refused.setdefault(group_of(name), set()).add(task)

    def end(self, task: str, generation: int, state: str) -> None:
        """The body has ended (done | stopped | lost) and its last look was taken: everything pending has become a part or
        was refused."""
        known = self._current(task, generation)
        if known is not None:
            known.state, known.pending = state, frozenset()

    def lose(self, task: str) -> None:
        """The task will report nothing more. What it had pending is lost."""
        if task in self._tasks and self._tasks[task].state == "running":
            self._tasks[task].state = "lost"

    def leave(self, task: str) -> None:
        """The task has left the world and is not waited for. Its parts stay."""
        self._tasks.pop(task, None)

    def replace(self, task: str, generation: int) -> Settled:
        """The task restarts alone, with a new body. Parts of the old body in incomplete rounds are dropped."""
        self._tasks[task] = _Task(generation)
        settled = Settled()
        for round_ in list(self._rounds):
            mine = [slot for slot in round_.parts if slot[0] == task]
            if mine and round_.checkpoint is None:
                settled.dropped += [round_.parts.pop(slot) for slot in mine]
                if not round_.parts:
                    self._rounds.remove(round_)
        return settled

    def restore(self, parts: Sequence[WrittenPart]) -> Settled:
        """Parts from the store, after a restart."""
        settled = Settled()
        complete: dict[str, Round] = {}
        for part in parts:
            name = part.row.checkpoint
            if name is not None:
                complete.setdefault(name, Round(group_of(part.row.name), checkpoint=name)).put(part)
        for round_ in complete.values():
            if all(self._current(part.row.task, part.row.generation) for part in round_.parts.values()):
                self._rounds.append(round_)
                self._learn(round_)
            else:
                settled.dropped += round_.parts.values()
        for part in parts:
            if part.row.checkpoint is None:
                settled.dropped += self.add(part).dropped
        return settled

    def forget(self) -> list[WrittenPart]:
        """End the generation; returns all its parts."""
        parts = [part for round_ in self._rounds for part in round_.parts.values()]
        self._rounds = []
        return parts

    def writers(self) -> dict[str, Counter[str]]:
        return self._writers

    def know(self, writers: Mapping[str, Counter[str]]) -> None:
        """Take over the writers learnt in an earlier generation with the same members."""
        self._writers = {family: Counter(tasks) for family, tasks in writers.items()}

    # -- decisions -----------------------------------------------------------------------------------------------

    def settle(self) -> Settled:
        """Rounds that have become complete, oldest first, each once. The caller must name each with `call` before it calls
        any other method."""
        settled = Settled()
        for round_ in sorted(self.waiting, key=self._numbers):
            if round_ in self._rounds and self._complete(round_):
                settled.complete.append(round_)
                self._learn(round_)
                self._supersede(round_, settled)
        for family in {family_of(round_.group) for round_ in self.waiting}:
            self._limit(family, settled)
        return settled

    def call(self, round_: Round, checkpoint: str) -> None:
        round_.checkpoint, round_.replaces = checkpoint, None

    @property
    def waiting(self) -> list[Round]:
        return [round_ for round_ in self._rounds if round_.checkpoint is None]

    def _complete(self, round_: Round) -> bool:
        have = round_.tasks()
        refused = self._refused.get(round_.group, set())
        if refused and (self._step(round_) is None or refused - set(have)):
            return False
        if lacking(path for part in round_.parts.values() for path in part.paths):
            return False
        known = self._writers.get(family_of(round_.group))
        exact = self._step(round_) is not None
        for name, task in self._tasks.items():
            under_way = {other for other in task.pending if group_of(other) == round_.group}
            if under_way - {other for owner, other in round_.parts if owner == name}:
                return False
            if task.state == "done" and exact and not self._wrote_later(name, round_):
                continue
            if known is not None:
                lacks = have[name] < known[name]
            elif self._wrote_others(name, round_):
                # Where names contain ranks, one task may write several parts.
                lacks = not have[name] or ("*" in round_.group and not self._looked(name, round_))
            else:
                lacks = not (
                    self._looked(name, round_) or self._needless(task, round_) or self._abstains(name, round_)
                )
            if lacks:
                return False
        alone = max(len(round_.parts), sum(known.values()) if known else 0) == 1
        return exact or alone or self._at_rest(round_)

    def _looked(self, task: str, round_: Round) -> bool:
        return task in round_.passed or self._tasks[task].state == "done"

    def _abstains(self, task: str, round_: Round) -> bool:
        """Whether the task has run for ABSTAINS scans while others wrote such checkpoints, and wrote none itself. No scan
        after the newest part is needed then; it might never come, because parts keep arriving."""
        first, now = self._scans.get(family_of(round_.group), {}).get(task, (0, 0))
        return self._tasks[task].state == "running" and now - first >= ABSTAINS

    def _wrote_others(self, task: str, round_: Round) -> bool:
        """Whether the task has written a part of the family, or is writing one."""
        family = family_of(round_.group)
        if self._tasks[task].is_writing(family):
            return True
        return any(task in other.tasks() for other in self._rounds if family_of(other.group) == family)

    def _wrote_later(self, task: str, round_: Round) -> bool:
        """Whether the task wrote a later round of the family. Then it wrote a part of this one too."""
        family, mine = family_of(round_.group), self._numbers(round_)
        return any(
            task in other.tasks() and self._numbers(other) > mine
            for other in self._rounds
            if family_of(other.group) == family
        )

    def _numbers(self, round_: Round) -> tuple[int, ...]:
        """Orders the rounds of a family."""
        named = tuple(int(number) for number in re.findall(r"\d+", round_.group))
        return (*named, self._step(round_) or 0)

    def _at_rest(self, round_: Round) -> bool:
        """Whether every task was seen without a pending part of the group since the newest part arrived."""
        for name, task in self._tasks.items():
            if task.state == "done":
                continue
            if name not in round_.passed or any(group_of(other) == round_.group for other in task.pending):
                return False
        return True

    def _needless(self, task: _Task, round_: Round) -> bool:
        """Whether no scan of the task is needed. It is the only task, or it was stopped with its grace period to write in.
        Not where names contain ranks: then other tasks write too."""
        if any(
            _RANK.search(path) for part in round_.parts.values() for path in part.paths or (part.row.name,)
        ):
            return False
        return len(self._tasks) == 1 or task.state == "stopped"

    def _learn(self, round_: Round) -> None:
        self._writers[family_of(round_.group)] = round_.tasks()

    def _supersede(self, round_: Round, settled: Settled) -> None:
        """Drop the older rounds of the family: they will not become complete, or were and may be forgotten."""
        family, mine = family_of(round_.group), self._numbers(round_)
        for other in [one for one in self._rounds if one is not round_ and family_of(one.group) == family]:
            if other not in settled.complete and (
                other.checkpoint is not None or self._numbers(other) <= mine
            ):
                self._drop(other, settled)

    def _limit(self, family: str, settled: Settled) -> None:
        waiting = [
            one for one in self.waiting if family_of(one.group) == family and one not in settled.complete
        ]
        waiting.sort(key=self._numbers)
        held = sum(part.row.size for one in waiting for part in one.parts.values())
        while len(waiting) > OPEN:
            if len(waiting) <= MOST and held <= ROOM and self._slow(waiting[0], family):
                return
            oldest = waiting.pop(0)
            held -= sum(part.row.size for part in oldest.parts.values())
            known = self._writers.get(family)
            if known is not None and self._writes_no_more(oldest, known):
                self._learn(oldest)
            self._drop(oldest, settled)

    def _slow(self, round_: Round, family: str) -> bool:
        """Whether a task whose part is missing still writes other parts of the family, or has one pending."""
        have, silent = round_.tasks(), self._silent.get(family, Counter())
        writers = set(self._writers.get(family, ())) | {
            task for other in self._rounds if family_of(other.group) == family for task in other.tasks()
        }
        return any(
            known.state == "running"
            and not have[task]
            and (known.is_writing(family) or (task in writers and silent[task] <= OPEN))
            for task, known in self._tasks.items()
        )

    def _writes_no_more(self, round_: Round, known: Counter[str]) -> bool:
        have, family = round_.tasks(), family_of(round_.group)
        missing = [name for name in known if name in self._tasks and have[name] < known[name]]
        return all(
            self._tasks[name].state == "running"
            and name in round_.passed
            and not self._tasks[name].is_writing(family)
            for name in missing
        )

    def _drop(self, round_: Round, settled: Settled) -> None:
        self._rounds.remove(round_)
        settled.dropped += round_.parts.values()

    def _place(self, part: WrittenPart, settled: Settled) -> None:
        group = group_of(part.row.name)
        for round_ in reversed([other for other in self._rounds if other.group == group]):
            if self._step(round_) != (None if group in self._unstepped else step_of(part)):
                continue
            if round_.checkpoint is None or part.slot not in round_.parts or self._step(round_) is not None:
                self._join(round_, part, settled)
                return
            break  # overwritten in place; the old state is complete
        round_ = Round(group)
        round_.put(part)
        self._scans.setdefault(family_of(group), {})
        self._rounds.append(round_)
        self._silent.setdefault(family_of(group), Counter()).update(list(self._tasks))

    def _step(self, round_: Round) -> int | None:
        if round_.group in self._unstepped:
            return None
        return next((step_of(part) for part in round_.parts.values()), None)

    def _join(self, round_: Round, part: WrittenPart, settled: Settled) -> None:
        old = round_.parts.get(part.slot)
        if old is not None:
            settled.dropped.append(old)
        if round_.checkpoint is not None:
            round_.replaces, round_.checkpoint = round_.checkpoint, None
            settled.reopened.append(round_)
            if old is None:
                settled.withdrawn.append(round_.replaces)
                self._writers.pop(family_of(round_.group), None)
        round_.put(part)

    def _current(self, task: str, generation: int) -> _Task | None:
        known = self._tasks.get(task)
        return known if known is not None and known.generation == generation else None


@functools.lru_cache(maxsize=4096)
def group_of(name: str) -> str:
    """The name with its rank replaced by a star."""
    return _RANK.sub("*", name)


@functools.lru_cache(maxsize=4096)
def family_of(name: str) -> str:
    return re.sub(r"\d+", "#", group_of(name))


def step_of(part: WrittenPart) -> int | None:
    """Where the name contains a rank, only a step in the rest of the name counts."""
    group = group_of(part.row.name)
    return (
        part.row.step if part.row.how == "sdk" or group == part.row.name else checkpoint_names.step_of(group)
    )


def lacking(paths: Iterable[str]) -> str:
    """What is missing according to the format's own markers; empty: nothing known."""
    there = set(paths)
    counts: dict[tuple[str, str, str], set[str]] = {}
    for path in sorted(there):
        directory, _, name = path.rpartition("/")
        if name.endswith(".distcp"):
            marker = f"{directory}/.metadata" if directory else ".metadata"
            if marker not in there:
                return marker
        found = _OF.match(path)
        if found is not None:
            key = found.group("stem"), found.group("count"), found.group("rest")
            counts.setdefault(key, set()).add(found.group("number"))
    for (stem, count, rest), numbers in counts.items():
        if len(numbers) < int(count):
            return f"{int(count) - len(numbers)} of {stem}*-of-{count}{rest}"
    return ""
