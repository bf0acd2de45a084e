"""Submitting, listing, showing and awaiting runs over HTTP."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.restore import restore
from stoker.engine.kubernetes import names
from stoker.errors import Conflict, NotFound, SpecError, StoreDamaged
from stoker.settings import Home
from stoker.store import Store
from stoker.store.placement import TaskPlacement, decode
from stoker.store.rows import (
    AddAttempt,
    AddCheckpoint,
    AddEvent,
    AddMetrics,
    AttemptRow,
    CheckpointRow,
    EventRow,
    Point,
    PutTask,
    TaskRow,
    UpdateRun,
)

RUN_KEYS = {
    "id", "name", "project", "state", "priority", "tags", "seq", "created_at", "started_at", "ended_at", "user",
    "exit_code", "cause", "reason", "job", "command", "code", "outputs", "folder", "warnings", "place", "attempts",
}  # fmt: skip


def test_a_run_as_it_is_documented(rig: Any) -> None:
    run = rig.client.submit(
        key="k", job={"name": "digits"}, secrets={"HF_TOKEN": "hunter2-hunter2"}, record={"host": "h"}
    )
    attempt = AttemptRow(
        run["id"],
        1,
        placement={"worker-0": TaskPlacement(node="local", gpus=("GPU-1",))},
        evidence={"x": math.nan},
    )
    rig.store.apply(
        [
            AddAttempt(attempt),
            AddAttempt(AttemptRow(run["id"], 2, state="running")),
            PutTask(TaskRow(run["id"], 2, "worker-0", phase="running", usage={"memory": 5})),
            AddCheckpoint(CheckpointRow("c1", run["id"], 1, 1, "step-1", "0" * 64, 7, "sdk", 1.0, step=1)),
            AddEvent(EventRow(run["id"], 1.0, "starting", "attempt 1 starts")),
            UpdateRun(run["id"], {"state": "running", "attempt": 2}),
        ]
    )
    shown = rig.client.run(run["id"])
    assert set(shown) == RUN_KEYS | {"record", "checkpoints", "scaling"}
    assert shown["record"] == {"host": "h"} and shown["user"] == "tester" and shown["place"] is None
    first, second = shown["attempts"]
    assert (first["node"], first["gpus"], first["evidence"]) == ("local", ["GPU-1"], {"x": "NaN"})
    assert second["tasks"] == [
        {
            "name": "worker-0",
            "role": "worker",
            "node": None,
            "gpus": [],
            "incarnation": 1,
            "generation": 1,
            "phase": "running",
            "exit_code": None,
            "usage": {"memory": 5},
        }
    ]
    assert (first["placed"], first["world"]) == (1, None)
    assert shown["checkpoints"][0]["id"] == "c1"
    assert "hunter2" not in json.dumps(shown)
    listed = rig.client.runs()["runs"][0]
    assert set(listed) == RUN_KEYS
    assert [entry["number"] for entry in listed["attempts"]] == [2] and "tasks" not in listed["attempts"][0]
    kinds = [event["kind"] for event in rig.client.events(run["id"])["events"]]
    assert "starting" in kinds


def test_the_same_key_is_the_same_run_once(rig: Any) -> None:
    body = json.dumps({"key": "k", "job": {"name": "a"}}).encode()
    first = rig.raw("POST", "/api/v1/runs", {"Content-Type": "application/json"}, body)
    again = rig.raw("POST", "/api/v1/runs", {"Content-Type": "application/json"}, body)
    assert (first[0], again[0]) == (201, 200)
    assert json.loads(first[2])["id"] == json.loads(again[2])["id"]
    with pytest.raises(Conflict):
        rig.client.submit(key="k", job={"name": "b"})


def test_missing_code_is_a_conflict(rig: Any) -> None:
    with pytest.raises(Conflict) as caught:
        rig.client.submit(key="k", job={}, code="0" * 64)
    assert caught.value.details == {"missing": "code"}


def test_by_id_name_or_beginning(rig: Any) -> None:
    run = rig.submit("digits")
    for ref in (run["id"], "digits", run["id"][:-1]):
        assert rig.client.run(ref)["id"] == run["id"]
    for ref in ("nothing", "../etc/passwd", "a/b", "%2e%2e", "' OR 1=1 --", "x" * 3000, "ünï", "a b"):
        with pytest.raises(NotFound):
            rig.client.run(ref)
    rig.submit("digits")
    with pytest.raises(Conflict) as caught:
        rig.client.run("dig")
    assert len(caught.value.details["candidates"]) == 2


def test_pages_and_filters(rig: Any) -> None:
    ids = [rig.submit(f"run{n}", tags=["even"] if n % 2 == 0 else [])["id"] for n in range(7)]
    rig.end(ids[0])
    page = rig.client.runs(limit=3)
    assert [run["id"] for run in page["runs"]] == ids[:3:-1]
    rest = rig.client.runs(limit=10, before=page["next"])
    assert [run["id"] for run in rest["runs"]] == ids[3::-1] and rest["next"] is None
    assert [run["id"] for run in rig.client.runs(state=["succeeded", "failed"])["runs"]] == ids[:1]
    assert len(rig.client.runs(tag="even")["runs"]) == 4
    assert len(rig.client.runs(name="run3")["runs"]) == len(rig.client.runs(name_like="n3")["runs"]) == 1
    assert rig.client.runs(limit=7)["next"] is None


def test_filters_are_values_not_sql(rig: Any) -> None:
    rig.submit("digits")
    for evil in ("' OR '1'='1", "digits' --", "%", "_igits", "'; DROP TABLE runs; --", "\\"):
        for name in ("name", "name_like", "tag", "project"):
            assert rig.client.runs(**{name: evil})["runs"] == []
        with pytest.raises(SpecError, match="no such state"):
            rig.client.runs(state=evil)
    for query in (
        "limit=0",
        "limit=-1",
        "limit=1e9",
        "limit=99999",
        "before=x",
        "before=-1",
        "before=99999999999999999999",
    ):
        assert rig.raw("GET", f"/api/v1/runs?{query}")[0] == 422
    assert len(rig.client.runs()["runs"]) == 1


def test_stopping_suspending_resuming_drilling(rig: Any) -> None:
    run = rig.submit()["id"]
    assert rig.client.suspend(run)["id"] == run
    assert rig.client.stop(run)["id"] == rig.client.stop(run, kill=True)["id"] == run
    assert rig.store.run(run).desired == "kill"
    rig.end(run, "stopped", 143)
    assert rig.client.resume(run, key="r1", set=["retries=3"])["state"] == "queued"
    assert rig.client.drill(run, "launcher") == {"did": f"hurt {run} by launcher"}
    assert rig.client.why(run)["text"] == "it waits"
    assert rig.client.nodes() == {"nodes": [{"name": "local"}]}
    assert rig.client.check(job={"name": "x"})["fits"] is True


def test_waiting(rig: Any) -> None:
    run = rig.submit()["id"]
    assert rig.client.wait(run, timeout=0)["state"] == "queued"
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(rig.client.wait(run, timeout=60)))
    waiting.start()
    rig.controller.hub.publish(run)
    rig.end(run, "failed", 3)
    waiting.join(50)
    assert [(answer["state"], answer["exit_code"]) for answer in answers] == [("failed", 3)]
    assert rig.client.wait("digits")["state"] == "failed"


def test_metrics_and_invalid_numbers(rig: Any) -> None:
    run = rig.submit()["id"]
    points = [Point("loss", 1, 0.5, 1.0), Point("loss", 2, math.nan, 2.0), Point("loss", 3, math.inf, 3.0)]
    rig.store.apply([AddMetrics(run, 1, [*points, Point("val/acc", 1, 1.0, 1.0)])])
    assert [entry["key"] for entry in rig.client.metrics(run)["keys"]] == ["loss", "val/acc"]
    assert [point[1] for point in rig.client.metric(run, "loss")["points"]] == [0.5, "NaN", "Infinity"]
    assert rig.client.metric(run, "val/acc")["points"] == [[1, 1.0, 1.0, 1]]
    with pytest.raises(NotFound, match="no metric"):
        rig.client.metric(run, "<script>")


def test_metrics_name_their_task(rig: Any) -> None:
    run = rig.submit()["id"]
    keys = ["loss", "loss@worker-1", "loss@worker-0.1", "acc@top-5", "@"]
    rig.store.apply([AddMetrics(run, 1, [Point(key, 1, 1.0, 1.0) for key in keys])])
    rig.store.apply([AddAttempt(AttemptRow(run, 1, placement=decode({"worker-0": {}})))])
    assert not [entry for entry in rig.client.metrics(run)["keys"] if "task" in entry]
    rig.store.apply([AddAttempt(AttemptRow(run, 2, placement=decode({"worker-0": {}, "worker-1": {}})))])
    found = {entry["key"]: entry.get("task") for entry in rig.client.metrics(run)["keys"]}
    assert found == {
        "loss": None, "loss@worker-1": "worker-1", "loss@worker-0.1": "worker-0", "acc@top-5": None, "@": None,
    }  # fmt: skip


def test_names_are_shown_unchanged(rig: Any) -> None:
    run = rig.client.submit(
        key="k", job={"name": "digits", "tags": ["<script>alert(1)</script>", "\x1b[31m"]}
    )
    status, sent, body = rig.raw("GET", f"/api/v1/runs/{run['id']}")
    assert status == 200 and sent["content-type"] == "application/json"
    assert json.loads(body)["tags"] == ["<script>alert(1)</script>", "\x1b[31m"]
    assert b"\x1b" not in body


def test_a_home_that_turned_read_only_is_not_called_ok(rig: Any) -> None:
    home = str(rig.home.root)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    for command in (["--bind", home, home], ["-o", "remount,ro,bind", home]):
        if subprocess.run(["mount", *command], capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
    try:
        found = rig.client.server()["store"]
    finally:
        subprocess.run(["umount", "--lazy", home], check=True)
    assert f"read-only file system {home}" in found["status"] and "Nothing was damaged" in found["hint"]
    assert rig.client.server()["store"]["status"] == "ok"


def test_a_damaged_database(serve: Callable[..., Any]) -> None:
    rig = serve(damage="the file is not a database")
    assert rig.client.health()["status"] == "damaged"
    assert "not a database" in rig.client.server()["store"]["status"]
    for call in (rig.client.runs, rig.client.nodes, lambda: rig.submit(), lambda: rig.client.run("x")):
        with pytest.raises(StoreDamaged) as caught:
            call()
        assert "stoker backup restore" in (caught.value.hint or "")


def test_backups(rig: Any) -> None:
    run = rig.submit("kept")
    digest, _ = rig.blobs.put_stream([b"weights"])
    rig.log(run["id"], "hello")
    target = rig.home.root.parent / "copy of it ü"
    answer = rig.client.backup(str(target))
    assert answer["path"] == str(target) and answer["runs"] == 1
    assert (target / "blobs" / "objects" / digest[:2] / digest[2:]).read_bytes() == b"weights"
    assert (target / "runs" / run["id"] / "logs" / "1" / "worker-0" / "000001.log").exists()
    assert (target / "stoker.db").stat().st_size > 0
    assert not any("token" in path.name or "secret" in path.name for path in target.rglob("*"))
    for bad in (str(target), "relative", str(rig.home.root / "runs" / "x"), str(target / ".." / "y")):
        with pytest.raises(Exception, match=r"exists already|must be absolute|inside the home"):
            rig.client.backup(bad)
    assert rig.client.backup()["path"].startswith(str(rig.home.backups))


def test_a_restored_home_has_the_name_of_its_pods(rig: Any, tmp_path: Path) -> None:
    run = rig.submit("kept")
    name = names.home_id(rig.home)
    rig.client.backup(str(tmp_path / "copy"))
    fresh, used = Home(tmp_path / "fresh"), Home(tmp_path / "used")
    assert names.home_id(used) != name
    for home in (fresh, used):
        restore(home, tmp_path / "copy")
        assert names.home_id(home) == name, "it goes with the database, in which the runs of these pods are"
        with Store.open(home.database, create=False) as store:
            assert [found.id for found in store.runs()] == [run["id"]]
    restore(used, tmp_path / "copy" / "stoker.db")
    assert names.home_id(used) == name, "a database alone is a copy of this home"


def test_the_server_describes_itself_and_ends(rig: Any) -> None:
    rig.submit()
    described = rig.client.server()
    assert described["counts"]["queued"] == 1 and described["store"]["status"] == "ok"
    assert rig.client.shutdown() == {"stopping": True}
    deadline = time.monotonic() + 20
    while not rig.services.closing.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rig.services.closing.is_set()


def test_what_a_killed_backup_left_is_cleared_away(rig: Any, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".copy.{ended.pid}.partial"
    left.mkdir()
    (left / "stoker.db").write_bytes(b"half")
    other = tmp_path / ".other.1.partial"
    other.mkdir()
    rig.client.backup(str(tmp_path / "copy"))
    assert (tmp_path / "copy/backup.json").exists()
    assert not left.exists() and other.exists()
