"""The control loop on the fake engine: real store, real blobs, real task directories, simulated bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stoker.control.logs.reader import LogArchive
from stoker.errors import Conflict, Refused, StoreBusy
from stoker.store.rows import AddAttempt, Change, RunRow
from support.control.rigs import Rig
from support.waiting import wait


def test_a_run_from_submit_to_success(rig: Rig) -> None:
    row = rig.ended(rig.submit(name="digits").id)
    assert (row.state, row.exit_code, row.cause, row.attempt) == ("succeeded", 0, "completed", 1)
    texts = [record["text"] for record in LogArchive(rig.settings.home).read(row.id, None)[0]]
    assert texts == ["hello", "bye"]
    assert [(p[0], p[1]) for p in rig.store.metric_points(row.id, "loss")] == [(1, 0.5), (2, 0.25)]
    assert [event.kind for event in rig.store.events(row.id)] == ["queued", "starting", "running", "ended"]
    wait(lambda: rig.store.attempt(row.id, 1).removed)
    assert not (rig.settings.home.tasks / row.id).exists()


def test_the_same_key_is_the_same_run(rig: Rig) -> None:
    assert rig.submit(key="k").id == rig.submit(key="k").id
    with pytest.raises(Conflict):
        rig.submit("fail", key="k")


def test_a_failing_run_spends_its_retries_and_says_why(rig: Rig) -> None:
    row = rig.ended(rig.submit("fail", retries=2).id)
    assert (row.state, row.exit_code, row.attempt, row.failures) == ("failed", 3, 3, 3)
    assert rig.store.attempt(row.id, 3).evidence["last_lines"][-1] == "ValueError: no"
    answer = rig.controller.why(row.id)
    assert "ValueError: no" in answer["text"] and "user-error" in answer["text"]


def test_a_lost_launcher_costs_no_retry(rig: Rig) -> None:
    row, _ = rig.controller.submit(
        key="lost", job={"run": ["die", "train"]}, code=None, secrets={}, record={}, user="ada"
    )
    done = rig.ended(row.id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 0)
    assert rig.store.attempt(row.id, 1).cause == "lost"


def test_a_run_that_is_lost_every_time_fails_in_the_end(rig: Rig) -> None:
    row = rig.ended(rig.submit("die").id)
    assert (row.state, row.cause, row.attempt) == ("failed", "lost", 4)


def test_a_stop_while_a_start_is_being_recorded_gives_the_place_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = rig.store.apply

    async def nothing() -> None:
        """Returns after the loop has processed all earlier events."""

    def slow(changes: Sequence[Change]) -> Any:
        for change in changes:
            if isinstance(change, AddAttempt) and rig.store.run(change.row.run).name == "late":
                rig.controller.stop_run(change.row.run, kill=True, by="ada")
                for _ in range(5):
                    rig.controller._loop.ask(nothing)
        return apply(changes)

    monkeypatch.setattr(rig.store, "apply", slow)
    late = rig.ended(rig.submit("hang", name="late", resources={"cpu": 2}).id)
    assert (late.state, late.cause) == ("stopped", "stopped")
    assert rig.ended(rig.submit("train", resources={"cpu": 2}).id).state == "succeeded"
    assert wait(lambda: rig.store.attempt(late.id, 1).removed)


def test_waiting_runs_start_by_priority_then_time(rig: Rig) -> None:
    blocker = rig.submit("hang", resources={"cpu": 2})
    rig.until(blocker.id, "running")
    waiting = [rig.submit(resources={"cpu": 2}, priority=p) for p in ("low", "normal", "high", "normal")]
    wait(lambda: rig.controller.place(waiting[0].id), lambda place: place == 4)
    assert [rig.controller.place(row.id) for row in waiting] == [4, 2, 1, 3]
    why = rig.controller.why(waiting[0].id)
    assert "number 4 of 4" in why["text"]
    rig.controller.stop_run(blocker.id, kill=True, by="ada")
    rig.engine.advance(5)
    ends = {row.id: rig.ended(row.id) for row in waiting}
    started = sorted(waiting, key=lambda row: ends[row.id].started_at or 0.0)
    assert [row.id for row in started] == [waiting[i].id for i in (2, 1, 3, 0)]


def test_what_can_never_fit_is_refused_at_submit(rig: Rig) -> None:
    with pytest.raises(Refused, match="2 GPUs"):
        rig.submit(resources={"gpu": 2})
    rig.engine.name = "local"  # under its own name the fake refuses nothing
    with pytest.raises(Refused, match="pool"):
        rig.submit(pool="a100")


def test_stop_is_graceful_then_stopped(rig: Rig) -> None:
    row = rig.submit("hang")
    rig.until(row.id, "running")
    rig.controller.stop_run(row.id, kill=False, by="ada")
    rig.until(row.id, "stopping", "stopped")
    rig.engine.advance(5)
    done = rig.ended(row.id)
    assert (done.state, done.cause) == ("stopped", "stopped")


def test_stop_of_a_queued_run_starts_nothing(rig: Rig) -> None:
    blocker = rig.submit("hang", resources={"cpu": 2})
    rig.until(blocker.id, "running")
    row = rig.submit(resources={"cpu": 2})
    rig.controller.stop_run(row.id, kill=False, by="ada")
    assert (rig.ended(row.id).state, rig.store.run(row.id).attempt) == ("stopped", 0)


def test_suspend_and_resume(rig: Rig) -> None:
    row, _ = rig.controller.submit(
        key="s", job={"run": ["hang", "train"]}, code=None, secrets={}, record={}, user="ada"
    )
    rig.until(row.id, "running")
    rig.controller.suspend(row.id, by="ada")
    rig.until(row.id, "stopping", "suspended")
    rig.engine.advance(5)
    rig.until(row.id, "suspended")
    wait(lambda: rig.controller.nodes()[0]["used"]["cpu"] == 0)
    rig.controller.resume(row.id, key="r1", secrets={}, changes=[])
    done = rig.ended(row.id)
    assert (done.state, done.attempt) == ("succeeded", 2)


def test_a_drill_preempts_and_the_run_comes_back(rig: Rig) -> None:
    row, _ = rig.controller.submit(
        key="d", job={"run": ["hang", "train"]}, code=None, secrets={}, record={}, user="ada"
    )
    rig.until(row.id, "running")
    rig.controller.drill(row.id, "preempt")
    wait(lambda: rig.store.run(row.id).state != "running")
    rig.engine.advance(5)
    done = rig.ended(row.id)
    assert (done.state, done.failures) == ("succeeded", 0)
    assert rig.store.attempt(row.id, 1).cause == "preempted"


def test_a_restarted_server_adopts_what_runs(rig: Rig) -> None:
    hanging = rig.submit("hang")
    rig.until(hanging.id, "running")
    rig.restart()
    wait(lambda: rig.controller.nodes()[0]["used"]["cpu"], lambda used: used == 1)
    assert rig.engine.starts(hanging.id, 1, "worker-0") == [(1, 1)]
    rig.controller.stop_run(hanging.id, kill=True, by="ada")
    rig.engine.advance(5)
    assert rig.ended(hanging.id).state == "stopped"


def test_after_a_reboot_runs_go_on(rig: Rig) -> None:
    row, _ = rig.controller.submit(
        key="b", job={"run": ["hang", "train"]}, code=None, secrets={}, record={}, user="ada"
    )
    rig.until(row.id, "running")
    rig.engine.reboot()
    done = rig.ended(row.id)
    assert (done.state, done.attempt, rig.store.attempt(row.id, 1).cause) == ("succeeded", 2, "lost")


def test_an_engine_that_does_not_answer_proves_nothing(rig: Rig) -> None:
    row = rig.submit("hang")
    rig.until(row.id, "running")
    rig.engine.unavailable = True
    before = rig.engine.calls.get("observe", 0)
    wait(lambda: rig.engine.calls.get("observe", 0) > before + 5)
    assert rig.store.run(row.id).state == "running"
    rig.engine.unavailable = False


def test_a_store_that_fails_for_a_while_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done that could not be recorded; once the store is back everything continues."""
    real = rig.store.apply
    failing = True

    def apply(changes: Any) -> None:
        if failing:
            raise StoreBusy("the database is locked")
        real(changes)

    monkeypatch.setattr(rig.store, "apply", apply)
    rows = [rig.submit() for _ in range(5)]
    wait(lambda: rig.controller._loop.trouble)
    assert rig.engine.calls.get("submit", 0) == 0
    failing = False
    assert {rig.ended(row.id).state for row in rows} == {"succeeded"}
    for row in rows:
        assert rig.store.run(row.id).attempt == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_run_submitted_while_the_loop_loads_is_not_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Whether the database already had the run during loading or not, it starts exactly once."""
    real_live, real_apply = rig.store.live, rig.store.apply
    failing = [True]
    rows: list[RunRow] = []

    def live() -> Any:
        found = real_live() if first else None
        if not rows:
            rows.append(rig.submit())
        return found if found is not None else real_live()

    def apply(changes: Any) -> None:
        if failing:
            failing.pop()
            raise StoreBusy("the database is locked")
        real_apply(changes)

    monkeypatch.setattr(rig.store, "apply", apply)
    monkeypatch.setattr(rig.store, "live", live)
    before = rig.submit()
    assert rig.ended(before.id).state == "succeeded"
    assert rig.ended(rows[0].id).state == "succeeded"
    assert rig.store.run(rows[0].id).attempt == 1
    assert rig.engine.calls.get("submit", 0) == 2


def test_late_notices_of_an_earlier_session_are_discarded(rig: Rig) -> None:
    row = rig.submit("hang")
    rig.until(row.id, "running")
    loop = rig.controller._loop

    async def story() -> None:
        before = loop.context.runs[row.id]
        loop.context.runs[row.id] = replace(before, working=None)
        wanted, before.working = before.working, None
        loop.kick(before)
        assert before.working is None
        loop.context.runs[row.id], before.working = before, wanted

    loop.ask(story)


def test_an_attempt_that_cannot_be_removed_yet_delays_no_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.control.runs.cleanup._CLEAN_AGAIN", 0.1)
    remove, refused = rig.engine.remove, []

    async def late(handle: Any) -> None:
        if len(refused) < 2:
            refused.append(handle)
            raise Conflict("it still has worker-0")
        await remove(handle)

    monkeypatch.setattr(rig.engine, "remove", late)
    row = rig.submit()
    assert rig.ended(row.id).state == "succeeded"
    wait(lambda: rig.store.attempt(row.id, 1).removed)
    assert len(refused) == 2 and rig.controller._loop.trouble is None


def test_secrets_are_gone_when_the_run_is_over(rig: Rig) -> None:
    with pytest.raises(Refused, match="HF_TOKEN"):
        rig.controller.submit(
            key="none",
            job={"run": ["train"], "secrets": ["HF_TOKEN"]},
            code=None,
            secrets={},
            record={},
            user="a",
        )
    row, _ = rig.controller.submit(
        key="secret", job={"run": ["hang"], "secrets": ["HF_TOKEN"]}, code=None,
        secrets={"HF_TOKEN": "hf_sesame"}, record={}, user="a",
    )  # fmt: skip
    rig.until(row.id, "running")
    holding = [
        path
        for path in rig.settings.home.root.rglob("*")
        if path.is_file() and b"hf_sesame" in path.read_bytes()
    ]
    assert {oct(path.stat().st_mode & 0o777) for path in holding} == {"0o600"}
    rig.controller.stop_run(row.id, kill=True, by="a")
    rig.engine.advance(5)
    rig.ended(row.id)
    wait(lambda: rig.store.attempt(row.id, 1).removed)
    assert not [
        p for p in rig.settings.home.root.rglob("*") if p.is_file() and b"hf_sesame" in p.read_bytes()
    ]


def test_more_processes_than_a_task_can_have_are_refused(rig: Rig) -> None:
    with pytest.raises(Refused, match="100000 is more than one task can have"):
        rig.controller.submit(
            key="many",
            job={"run": ["train"], "processes": 100_000},
            code=None,
            secrets={},
            record={},
            user="a",
        )


def test_a_key_used_again_brings_no_other_secrets_and_leaves_none(rig: Rig) -> None:
    def submit(value: str, run: str = "hang") -> RunRow:
        return rig.controller.submit(
            key="secret", job={"run": [run], "secrets": ["HF_TOKEN"]}, code=None,
            secrets={"HF_TOKEN": value}, record={}, user="a",
        )[0]  # fmt: skip

    home = rig.settings.home
    row = submit("hf_sesame")
    submit("hf_other")
    with pytest.raises(Conflict):
        submit("hf_other", run="train")
    assert [json.loads(path.read_text()) for path in home.secrets.iterdir()] == [{"HF_TOKEN": "hf_sesame"}]
    rig.until(row.id, "running")
    rig.controller.stop_run(row.id, kill=True, by="a")
    rig.ended(row.id)
    assert submit("hf_late").id == row.id
    with pytest.raises(Conflict):
        submit("hf_late", run="train")
    assert list(home.secrets.iterdir()) == []


def test_one_runs_rows_that_cannot_be_stored_stop_nobody_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rig.store.apply
    poison = rig.submit("hang")
    rig.until(poison.id, "running")

    def apply(changes: Any) -> None:
        if any(getattr(change, "run", getattr(change, "id", None)) == poison.id for change in changes):
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")
        real(changes)

    monkeypatch.setattr(rig.store, "apply", apply)
    rig.controller.stop_run(poison.id, kill=True, by="a")
    rows = [rig.submit() for _ in range(5)]
    assert {rig.ended(row.id).state for row in rows} == {"succeeded"}
    monkeypatch.setattr(rig.store, "apply", real)
    assert rig.ended(poison.id).state == "stopped"


def test_whatever_goes_wrong_in_the_loop_it_begins_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rig.engine.observe
    failed = []

    async def observe() -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("unexpected")
        return await real()

    monkeypatch.setattr(rig.engine, "observe", observe)
    wait(lambda: failed)
    assert rig.ended(rig.submit().id).state == "succeeded"
