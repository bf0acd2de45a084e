"""Reports of tasks become rows."""

from __future__ import annotations

import json

import pytest

from stoker.errors import StokerError
from stoker.spec.states import RunState
from stoker.task import layout
from stoker.testing.fake_engine import Behaviour
from support.control.driven import DONE, Driven, journal, scanned, stage

GANG = {"workers": 2, "resources": {"cpu": 1}}


def test_a_run_has_started_when_its_first_process_has(server: Driven) -> None:
    run = server.submit()
    row, attempt = server.row(run), server.attempt(run)
    assert row.started_at == attempt.started_at and row.started_at is not None
    assert attempt.state == "running" and server.events(run, "running")[0].text == "attempt 1 runs"
    server.stop(run)
    server.advance(1)
    server.resume(run)
    assert server.row(run).started_at == row.started_at, "the first time counts"
    assert server.attempt(run).started_at != attempt.started_at


def test_tasks_are_recorded_as_they_report_and_as_they_ended(server: Driven) -> None:
    server.bodies = {("worker-1", 1): DONE}
    run = server.submit(**GANG)
    rows = {row.task: row for row in server.store.tasks(run, 1)}
    assert rows["worker-0"].phase == "running" and rows["worker-0"].exit_code is None
    assert (rows["worker-1"].phase, rows["worker-1"].exit_code) == ("ended", 0), (
        "said while the other goes on"
    )
    status = json.loads((server.directory(run) / layout.STATUS).read_text())
    (server.directory(run) / layout.STATUS).write_text(json.dumps({**status, "usage": {"cpu": 2.5}}))
    server.kick(run)
    assert {row.task: row.usage for row in server.store.tasks(run, 1)}["worker-0"] == {"cpu": 2.5}
    server.kill_launcher(run, "worker-1")
    server.stop(run)
    assert {row.task: row.phase for row in server.store.tasks(run, 1)} == dict.fromkeys(rows, "ended")


def test_output_and_metrics_of_tasks_are_kept(server: Driven) -> None:
    server.otherwise = Behaviour(lines=("hello",), metrics=((1, {"loss": 0.5}), (2, {"loss": 0.25})))
    run = server.submit()
    assert server.state(run) is RunState.SUCCEEDED
    assert [point[:2] for point in server.store.metric_points(run, "loss")] == [(1, 0.5), (2, 0.25)]
    assert server.loop.context.archive.last_lines(run, 1, 5, task="worker-0") == ["hello"]


def test_old_checkpoints_are_dropped(server: Driven) -> None:
    run = server.submit(checkpoint={"keep": 2})
    for number in (1, 2, 3):
        stage(server.directory(run), number, f"step-{number}.pt", step=number, data=b"%d" % number)
        server.kick(run)
    kept = server.store.checkpoints(run, kept_only=True)
    assert sorted(row.name for row in kept) == ["step-2.pt", "step-3.pt"]
    dropped = [row.digest for row in server.store.checkpoints(run) if not row.kept]
    assert len(dropped) == 1 and server.live(run).progressed
    assert server.loop.context.dropped == set(dropped)
    server.advance(90)
    assert server.loop.context.dropped == set(), "and their bytes are freed"


def test_the_best_checkpoint_is_kept(server: Driven) -> None:
    run = server.submit(checkpoint={"keep": 1, "best": {"metric": "acc", "mode": "max"}})
    directory = server.directory(run)
    for number, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2)):
        report = {"step": number, "t": 50.0, "v": {"acc": accuracy}}
        with open(directory / layout.METRICS / "1-7.jsonl", "a") as file:
            file.write(json.dumps(report) + "\n")
        server.kick(run)
        stage(directory, number, f"step-{number}.pt", step=number, data=b"%d" % number)
        server.kick(run)
    kept = {row.name for row in server.store.checkpoints(run, kept_only=True)}
    assert kept == {"step-1.pt", "step-3.pt"}


def test_a_refused_checkpoint_is_in_the_warnings_until_another_is_kept(server: Driven) -> None:
    run = server.submit()
    journal(
        server.directory(run), {"k": "rejected", "generation": 1, "name": "last.pt", "reason": "it is torn"}
    )
    server.kick(run)
    assert any("last.pt" in text and "it is torn" in text for text in server.row(run).warnings)
    stage(server.directory(run), 1, "last.pt", step=1)
    server.kick(run)
    assert server.row(run).warnings == ()


def test_a_run_without_any_kept_checkpoint_ends_with_a_note(server: Driven) -> None:
    server.otherwise = Behaviour(exit_code=3, steps=1)
    run = server.submit()
    journal(
        server.directory(run), {"k": "rejected", "generation": 1, "name": "last.pt", "reason": "it is torn"}
    )
    server.steps()
    assert server.state(run) is RunState.FAILED
    assert "no checkpoint of this run is kept" in server.events(run, "warning")[-1].text


def test_outputs_are_kept_and_those_of_several_tasks_merged(server: Driven) -> None:
    server.otherwise = Behaviour(steps=1)
    run = server.submit(**GANG)
    for task, text in (("worker-0", "zero"), ("worker-1", "one")):
        outputs = server.directory(run, task) / layout.OUTPUT
        (outputs / f"{task}.txt").write_text(text)
        (outputs / "both.txt").write_text(text)
    server.steps()
    row = server.row(run)
    assert row.state == "succeeded" and row.outputs is not None
    paths = [file.path for file in server.blobs.tree(row.outputs["digest"]).files]
    assert {"worker-0.txt", "worker-1.txt"} <= set(paths) and len(paths) == 4
    assert any(
        "different outputs under the same name: both.txt" in event.text for event in server.events(run)
    )


def test_a_run_ends_although_its_outputs_cannot_be_kept(
    server: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StokerError("the disk is full")

    monkeypatch.setattr("stoker.control.runs.recorder.carry_outputs", full)
    server.otherwise = DONE
    run = server.submit()
    assert server.state(run) is RunState.SUCCEEDED and server.row(run).outputs is None
    assert "outputs could not be kept: the disk is full" in server.said(run)


def test_checkpoints_of_several_tasks_are_assembled(server: Driven) -> None:
    run = server.submit(**GANG)
    for number, task in enumerate(("worker-0", "worker-1")):
        stage(server.directory(run, task), 1, f"step-5-rank{number}.pt", step=5, data=b"%d" % number)
    server.kick(run)
    for scans in (1, 2, 3):
        for task in ("worker-0", "worker-1"):
            scanned(server.directory(run, task), scans)
        server.kick(run)
    [row] = server.store.checkpoints(run, kept_only=True)
    assert row.world_size == 2 and row.step == 5
