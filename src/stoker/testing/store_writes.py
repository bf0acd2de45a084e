"""The part of the store suite about writing."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from stoker.errors import Conflict, NotFound
from stoker.store import Store
from stoker.store.placement import TaskPlacement
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    AttemptRow,
    Change,
    ClusterRow,
    DropPart,
    DropParts,
    EventRow,
    MoveCursor,
    Point,
    PutPart,
    PutTask,
    RunFilter,
    RunRow,
    TaskRow,
    UpdateAttempt,
    UpdateCheckpoint,
    UpdateRun,
)
from stoker.testing.store_case import StoreCase, checkpoint, new_run, part


class SubmissionTests(StoreCase):
    """Submit, stop, resume."""

    def test_a_submission_comes_back_as_it_was(self, store: Store) -> None:
        new = new_run(
            "k",
            priority=7,
            project="vision",
            user="ada",
            tags=("b", "a", "ünï"),
            code="c0de",
            job={"name": "digits", "lr": 1e-5, "nested": {"list": [1, None, "\ud800"]}},
            command=["sh", "-c", "echo 'ä'\n"],
            record={"git": {"diff": "+" * 100_000}},
        )
        run, is_new = store.submit(new, now=12.5)
        assert is_new
        assert (run.state, run.desired, run.attempt, run.created_at) == ("queued", "run", 0, 12.5)
        for name in (
            "key",
            "name",
            "project",
            "user",
            "priority",
            "tags",
            "job",
            "command",
            "code",
            "record",
        ):
            assert getattr(run, name) == getattr(new, name), name
        assert store.run(run.id) == run
        assert store.runs() == [run] == store.live()
        assert store.runs(records=False) == [replace(run, record={})]
        assert [(event.kind, event.t) for event in store.events(run.id)] == [("queued", 12.5)]

    def test_the_same_key_is_the_same_run_once(self, store: Store) -> None:
        run, _ = store.submit(new_run("k"), now=1.0)
        assert store.submit(new_run("k"), now=2.0) == (run, False)
        with pytest.raises(Conflict, match=run.id):
            store.submit(new_run("k", fingerprint="something else"), now=3.0)
        assert store.counts()["queued"] == 1
        assert len(store.events(run.id)) == 1

    @pytest.mark.parametrize(
        ("name", "start"),
        [("Größe 7/x", "gro-e-7-x-"), ("数字", "run-"), ("a" * 100, "a" * 40 + "-"), ("--", "run-")],
    )
    def test_ids_are_readable_whatever_the_name(self, store: Store, name: str, start: str) -> None:
        run, _ = store.submit(new_run("k", name=name), now=1.0)
        expected = "gro" if name.startswith("Gr") else start
        assert run.id.startswith(expected)
        assert run.id.isascii() and len(run.id) <= 45 and "/" not in run.id and " " not in run.id
        assert store.resolve(name).id == run.id

    def test_threads_that_submit_the_same_keys_get_the_same_runs(self, store: Store) -> None:
        keys = [f"key-{number}" for number in range(50)]
        answers: list[dict[str, tuple[str, bool]]] = [{} for _ in range(8)]
        failures: list[BaseException] = []
        start = threading.Barrier(8)

        def work(mine: dict[str, tuple[str, bool]], seed: int) -> None:
            try:
                start.wait(timeout=30)
                for key in random.Random(seed).sample(keys, len(keys)):
                    run, is_new = store.submit(new_run(key), now=1.0)
                    mine[key] = (run.id, is_new)
                    assert store.run(run.id).key == key
            except BaseException as exc:  # noqa: BLE001 - handed to the main thread, which raises it
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(mine, seed)) for seed, mine in enumerate(answers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not failures, failures
        for key in keys:
            assert len({mine[key][0] for mine in answers}) == 1
            assert sum(mine[key][1] for mine in answers) == 1
        assert store.counts()["queued"] == len(keys)

    def test_the_desired_state_only_gets_stronger(self, store: Store, run: RunRow) -> None:
        def ask(desired: str) -> str:
            return store.set_desired(run.id, desired, 2.0, by="ada").desired

        assert [ask(wish) for wish in ("suspend", "run", "suspend", "stop", "stop", "suspend", "run")] == [
            *("suspend", "run", "suspend", "stop", "stop", "stop", "stop")
        ]
        assert [ask(wish) for wish in ("kill", "stop", "kill")] == ["kill"] * 3
        kinds = [event.kind for event in store.events(run.id)]
        assert kinds == ["queued", "suspend", "run", "suspend", "stop", "kill"]
        with pytest.raises(ValueError, match="choices"):
            ask("explode")
        with pytest.raises(NotFound):
            store.set_desired("nobody-0000", "stop", 2.0, by="ada")

    @pytest.mark.parametrize("state", ["succeeded", "failed", "stopped"])
    def test_an_ended_run_is_not_asked_to_stop(self, store: Store, run: RunRow, state: str) -> None:
        store.apply([UpdateRun(run.id, {"state": state})])
        before = store.run(run.id)
        assert store.set_desired(run.id, "kill", 3.0, by="ada") == before
        assert len(store.events(run.id)) == 1

    def test_resume_only_from_an_end_and_once_per_key(self, store: Store, run: RunRow) -> None:
        for state in ("queued", "starting", "running", "stopping"):
            store.apply([UpdateRun(run.id, {"state": state})])
            with pytest.raises(Conflict, match=state):
                store.resume(run.id, key="r0", now=2.0)
        ended = {"state": "failed", "desired": "stop", "ended_at": 3.0, "cause": "oom", "exit_code": 137}
        store.apply(
            [UpdateRun(run.id, {**ended, "failures": 2, "faults": 3, "not_before": 9.0, "attempt": 4})]
        )
        resumed, is_new = store.resume(run.id, key="r1", now=4.0, job={"name": "digits", "retries": 5})
        assert is_new
        assert (resumed.state, resumed.desired, resumed.attempt) == ("queued", "run", 4)
        assert (resumed.ended_at, resumed.cause, resumed.exit_code) == (None, None, None)
        assert (resumed.failures, resumed.faults, resumed.not_before) == (0, 0, 0.0)
        assert resumed.job == {"name": "digits", "retries": 5}
        assert store.resume(run.id, key="r1", now=5.0) == (resumed, False)
        store.apply([UpdateRun(run.id, {"state": "suspended"})])
        assert store.resume(run.id, key="r1", now=5.0)[0].state == "suspended"
        assert store.resume(run.id, key="r2", now=5.0)[0].state == "queued"
        assert [event.kind for event in store.events(run.id)] == ["queued", "resumed", "resumed"]
        other, _ = store.submit(new_run("other"), now=6.0)
        with pytest.raises(Conflict, match=run.id):
            store.resume(other.id, key="r1", now=6.0)


class MutationTests(StoreCase):
    """What the control loop writes."""

    def test_everything_comes_back(self, store: Store, run: RunRow) -> None:
        attempt = AttemptRow(
            run.id, 1, handle={"opaque": [1]}, placement={"worker-0": TaskPlacement(gpus=("GPU-1",))}
        )
        task = TaskRow(run.id, 1, "worker-0")
        first = checkpoint(
            run, 1, name="odd \udcff \\ name", metrics={"loss": math.inf}, step=2**62, world_size=4
        )
        store.apply(
            [
                AddAttempt(attempt),
                PutTask(task),
                PutTask(replace(task, phase="running", usage={"cpu": 1.5})),
                AddCheckpoint(first),
                AddCheckpoint(first),
                AddCheckpoint(checkpoint(run, 2)),
                UpdateCheckpoint(first.id, {"kept": False}),
                AddEvent(EventRow(run.id, 2.0, "warning", "line\0with \ud800 rubbish", {"n": 1})),
                UpdateAttempt(run.id, 1, {"state": "running", "started_at": 2.0}),
                UpdateRun(
                    run.id, {"state": "running", "attempt": 1, "started_at": 2.0, "warnings": ("hot",)}
                ),
                UpdateRun(
                    run.id, {"tags": ("t",), "record": {"python": "3.12"}, "outputs": {"digest": "out"}}
                ),
                MoveCursor(run.id, 1, "worker-0", "metrics/\udcff ü.jsonl", 10),
                MoveCursor(run.id, 1, "worker-0", "metrics/\udcff ü.jsonl", 20),
            ]
        )
        now = store.run(run.id)
        assert (now.state, now.attempt, now.warnings, now.tags) == ("running", 1, ("hot",), ("t",))
        assert (now.record, now.outputs) == ({"python": "3.12"}, {"digest": "out"})
        assert store.attempt(run.id, 1) == replace(attempt, state="running", started_at=2.0)
        assert store.tasks(run.id, 1) == [replace(task, phase="running", usage={"cpu": 1.5})]
        stored = store.checkpoints(run.id)
        assert [replace(row, seq=0) for row in stored] == [replace(first, kept=False), checkpoint(run, 2)]
        assert stored[0].seq < stored[1].seq
        assert store.checkpoints(run.id, kept_only=True) == [store.checkpoint(f"{run.id}-c2")]
        assert store.events(run.id)[-1].text == "line\ufffdwith ? rubbish"
        assert store.cursors(run.id, 1) == {("worker-0", "metrics/\udcff ü.jsonl"): 20}
        assert store.runs(RunFilter(tags=("t",))) == [now]

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (UpdateRun("nobody-0000", {"state": "failed"}), NotFound),
            (UpdateAttempt("nobody-0000", 1, {"state": "ended"}), NotFound),
            (UpdateCheckpoint("none", {"kept": False}), NotFound),
            (AddAttempt(AttemptRow("nobody-0000", 1)), Conflict),
            (PutTask(TaskRow("nobody-0000", 1, "worker-0")), Conflict),
            (AddMetrics("nobody-0000", 1, [Point("loss", 1, 1.0, 1.0)]), Conflict),
            (UpdateRun("nobody-0000", {"seq": 1}), ValueError),
            (UpdateRun("nobody-0000", {"colour": "red"}), ValueError),
        ],
    )
    def test_all_or_nothing(self, store: Store, run: RunRow, bad: Change, error: type[Exception]) -> None:
        good: list[Change] = [
            UpdateRun(run.id, {"state": "running", "tags": ("x",)}),
            AddAttempt(AttemptRow(run.id, 1)),
            AddMetrics(run.id, 1, [Point("loss", 1, 1.0, 1.0)]),
            AddEvent(EventRow(run.id, 2.0, "running", "running")),
            MoveCursor(run.id, 1, "worker-0", "journal.jsonl", 10),
        ]
        for changes in ([*good, bad], [bad, *good], [*good[:2], bad, *good[2:]]):
            with pytest.raises(error):
                store.apply(changes)
            assert store.run(run.id) == run
            assert store.attempts(run.id) == [] and len(store.events(run.id)) == 1
            assert store.metric_keys(run.id) == [] and store.cursors(run.id, 1) == {}
            assert store.runs(RunFilter(tags=("x",))) == []
        store.apply(good)
        assert store.latest_metrics(run.id) == {"loss": 1.0}

    def test_numbers_and_text_that_not_every_database_takes(self, store: Store, run: RunRow) -> None:
        most = 2**63 - 1
        store.apply(
            [
                AddAttempt(
                    AttemptRow(run.id, 1, exit_code=-(2**40), evidence={"big": 10**30, "nul": "a\0b"})
                ),
                UpdateRun(
                    run.id, {"priority": 10**30, "exit_code": 2**31, "failures": most, "started_at": math.inf}
                ),
                AddCheckpoint(checkpoint(run, 1, size=10**20, name="nul\0 in it", how="re\0name")),
                AddEvent(EventRow(run.id, 10**400, "warning", "\0\ud800", {"\0": "\ud800"})),
                AddMetrics(run.id, 1, [Point("nul\0 \ud800", -(10**30), 10**400, 1.0)]),
                PutTask(TaskRow(run.id, 1, "worker\0-0", exit_code=2**33)),
                MoveCursor(run.id, 1, "worker\0-0", "nul\0", 10**30),
            ]
        )
        now = store.run(run.id)
        assert (now.priority, now.exit_code, now.failures, now.started_at) == (most, 2**31, most, math.inf)
        attempt = store.attempt(run.id, 1)
        assert (attempt.exit_code, attempt.evidence) == (-(2**40), {"big": 10**30, "nul": "a\0b"})
        (stored,) = store.checkpoints(run.id)
        assert (stored.size, stored.name, stored.how) == (most, "nul\0 in it", "re\ufffdname")
        event = store.events(run.id)[-1]
        assert (event.t, event.text, event.data) == (math.inf, "\ufffd?", {"\0": "\ud800"})
        assert store.metric_points(run.id, "nul\0 \ud800") == [(-most, math.inf, 1.0, 1)]
        assert store.tasks(run.id, 1)[0].task == "worker\ufffd-0"
        assert store.cursors(run.id, 1) == {("worker\ufffd-0", "nul\0"): most}

    @pytest.mark.parametrize("name", ["a\0b", "\0", "\ud800", "'; DROP TABLE runs; --", "%s %(id)s :id", ""])
    def test_unknown_names_are_not_found(self, store: Store, run: RunRow, name: str) -> None:
        for missing in (
            lambda: store.run(name),
            lambda: store.resolve(name),
            lambda: store.attempt(name, 1),
            lambda: store.checkpoint(name),
            lambda: store.set_desired(name, "stop", 1.0, by=name),
            lambda: store.resume(name, key=name, now=1.0),
            lambda: store.apply([UpdateRun(name, {"state": name, "tags": (name,)})]),
            lambda: store.apply([UpdateRun(name, {"record": {}})]),
            lambda: store.apply([UpdateAttempt(name, 1, {"state": name})]),
            lambda: store.apply([UpdateCheckpoint(name, {"kept": False})]),
            lambda: store.remove_cluster(name),
        ):
            with pytest.raises(NotFound):
                missing()
        for refused in (
            AddAttempt(AttemptRow(name, 1)),
            AddEvent(EventRow(name, 1.0, name, name)),
            PutPart(replace(part(run, name, 1), run=name)),
            MoveCursor(name, 1, name, name, 1),
            AddMetrics(name, 1, [Point(name, 1, 1.0, 1.0)]),
        ):
            with pytest.raises(Conflict):
                store.apply([refused])
        wanted = RunFilter(states=(name,), tags=(name,), name=name, name_like=name, project=name)
        assert store.runs(wanted) == [] and store.latest_attempts([name]) == {}
        for found in (
            store.attempts(name),
            store.tasks(name, 1),
            store.checkpoints(name),
            store.events(name),
        ):
            assert found == []
        assert store.cursors(name, 1) == {} and store.metric_keys(name) == [] == store.metric_points(
            name, name
        )
        assert store.runs() == [run]

    def test_parts_are_kept_until_they_are_dropped(self, store: Store, run: RunRow, url: str) -> None:
        odd = part(run, "worker-0", 1, name="odd \udcff \\ name", metrics={"loss": math.inf}, step=2**62)
        peer, later = part(run, "worker-1", 1), part(run, "worker-0", 1, generation=2)
        next_ = part(run, "worker-0", 1, attempt=2)
        store.apply([PutPart(row) for row in (odd, peer, later, next_, odd)])
        assert store.checkpoint_parts(run.id, 1) == [odd, peer, later]
        assert store.blob_roots() == {"worker-0-tree1", "worker-1-tree1"}
        store.apply([PutPart(replace(odd, checkpoint="c1")), DropPart(peer), DropPart(peer)])
        assert store.checkpoint_parts(run.id, 1) == [replace(odd, checkpoint="c1"), later]
        store.apply([DropParts(run.id, 1), DropParts("nobody-0000", 1)])
        store.apply([AddAttempt(AttemptRow(run.id, 3)), PutPart(replace(odd, attempt=3))])
        ends = UpdateAttempt(run.id, 3, {"state": "ended"})
        store.apply([ends, PutPart(replace(peer, attempt=3))])
        assert store.checkpoint_parts(run.id, 3) == []
        assert store.checkpoint_parts(run.id, 1) == [] == store.checkpoint_parts("nobody-0000", 1)
        store.close()
        with Store.open(url, create=False) as again:
            assert again.checkpoint_parts(run.id, 2) == [next_]

    def test_an_attempt_is_added_once(self, store: Store, run: RunRow) -> None:
        store.apply([AddAttempt(AttemptRow(run.id, 1, handle={"first": True}))])
        with pytest.raises(Conflict):
            store.apply([AddAttempt(AttemptRow(run.id, 1))])
        assert store.attempt(run.id, 1).handle == {"first": True}
        with pytest.raises(NotFound, match="attempt 2"):
            store.attempt(run.id, 2)

    def test_changes_of_one_row_keep_their_order(self, store: Store, run: RunRow) -> None:
        seed = 20
        print(f"seed {seed}")
        chance = random.Random(seed)
        wanted: dict[str, Any] = {}
        changes: list[Change] = []
        for number in range(200):
            values: dict[str, Any] = {"reason": f"r{number}", "faults": number, "state": f"s{number}"}
            chosen = {name: values[name] for name in chance.sample(sorted(values), chance.randint(1, 3))}
            wanted.update(chosen)
            changes.append(UpdateRun(run.id, chosen))
            changes.append(AddEvent(EventRow(run.id, 1.0, "warning", str(number))))
        store.apply(changes)
        now = store.run(run.id)
        assert {name: getattr(now, name) for name in wanted} == wanted
        assert [event.text for event in store.events(run.id)][1:] == [str(number) for number in range(200)]

    def test_unfinished_attempts_are_found_until_they_are_removed(self, store: Store, run: RunRow) -> None:
        store.apply([AddAttempt(AttemptRow(run.id, number)) for number in (1, 2, 3, 4)])
        store.apply(
            [
                UpdateAttempt(run.id, 1, {"state": "ended", "removed": True}),
                UpdateAttempt(run.id, 2, {"state": "ended"}),
                UpdateAttempt(run.id, 4, {"state": "running", "removed": True}),
            ]
        )
        assert [row.number for row in store.unfinished_attempts()] == [2, 3, 4]
        assert store.latest_attempts([run.id, "nobody-0000"]) == {run.id: store.attempt(run.id, 4)}


class ClusterTests(StoreCase):
    """Clusters."""

    def test_clusters_are_kept_changed_and_removed(self, store: Store, url: str) -> None:
        assert store.clusters() == []
        config = {"context": "prod", "namespace": "ml", "pools": {"a100": {"selector": {"gpu": "ünï\ud800"}}}}
        store.put_cluster("zeta", {}, 1.0)
        store.put_cluster("alpha", config, 2.0)
        assert store.clusters() == [ClusterRow("alpha", config, 2.0, 2.0), ClusterRow("zeta", {}, 1.0, 1.0)]
        store.put_cluster("zeta", {"context": "other"}, 3.0)
        assert store.clusters()[1] == ClusterRow("zeta", {"context": "other"}, 1.0, 3.0)
        with pytest.raises(NotFound) as caught:
            store.remove_cluster("alfa")
        assert "alpha, zeta" in (caught.value.hint or "")
        store.remove_cluster("alpha")
        store.close()
        with Store.open(url, create=False) as again:
            assert [row.name for row in again.clusters()] == ["zeta"]
            again.remove_cluster("zeta")
            with pytest.raises(NotFound, match="zeta"):
                again.remove_cluster("zeta")
