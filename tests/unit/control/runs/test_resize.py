"""More or fewer resources for a run: in the queue, in place, by a restart, or refused."""

from __future__ import annotations

import pytest

from stoker.errors import Conflict, Refused
from stoker.spec import Job
from stoker.spec.states import RunState
from support.control.driven import Driven


def cpu_of(server: Driven, run: str) -> float | None:
    return Job.from_json(server.row(run).job).resources.cpu


def test_a_queued_run_starts_with_the_new_size(server: Driven) -> None:
    first = server.submit(resources={"cpu": 3})
    run = server.submit(resources={"cpu": 2})
    assert server.state(run) is RunState.QUEUED
    assert server.controller.resize(run, cpu=1.0, memory=None)["how"] == "queued"
    assert cpu_of(server, run) == 1 and server.state(run) is RunState.RUNNING
    assert server.attempt(run).placement["worker-0"].cpu == 1
    assert server.state(first) is RunState.RUNNING


def test_a_running_one_is_resized_in_place_and_others_get_the_rest(server: Driven) -> None:
    run = server.submit(resources={"cpu": 4})
    other = server.submit(resources={"cpu": 2})
    assert server.state(other) is RunState.QUEUED
    answer = server.controller.resize(run, cpu=2.0, memory=1 << 30)
    assert answer == {"how": "in place", "text": "resized while it runs"}
    server.settle()
    place = server.attempt(run).placement["worker-0"]
    assert (place.cpu, place.memory) == (2, 1 << 30)
    assert server.state(other) is RunState.RUNNING and server.starts(run, 1, "worker-0") == [(1, 1)]
    server.restart()
    assert server.task(run).place.cpu == 2, "it is recorded"


def test_without_support_of_the_engine_it_restarts_with_the_new_size(server: Driven) -> None:
    server.engine.resize_problem = "this kernel cannot"
    run = server.submit(resources={"cpu": 1}, retries=0)
    answer = server.controller.resize(run, cpu=2.0, memory=None)
    assert answer["how"] == "restart" and answer["text"].startswith("this kernel cannot; it checkpoints")
    server.advance(5)
    row = server.row(run)
    assert (row.state, row.attempt, row.failures) == ("running", 2, 0)
    assert server.attempt(run).placement["worker-0"].cpu == 2
    assert server.events(run, "resized")[0].data == {"how": "restart", "cpu": 2.0, "memory": None}


@pytest.mark.parametrize(
    ("job", "why"),
    [({"workers": 2, "resources": {"cpu": 1}}, "it has several tasks"), ({}, "it is not up yet")],
)
def test_why_not_in_place(server: Driven, job: dict[str, object], why: str) -> None:
    if not job:
        server.engine.waiting = ("pulling its image", "", 600.0)
    run = server.submit(**job)
    answer = server.controller.resize(run, cpu=2.0, memory=None)
    assert answer["how"] == "restart" and answer["text"].startswith(why)


def test_impossible_sizes_are_refused(server: Driven) -> None:
    run = server.submit()
    with pytest.raises(Refused, match="nothing to change"):
        server.controller.resize(run, cpu=None, memory=None)
    with pytest.raises(Refused, match="never fit"):
        server.controller.resize(run, cpu=64.0, memory=None)
    server.stop(run)
    with pytest.raises(Conflict, match="not waiting or running"):
        server.controller.resize(run, cpu=1.0, memory=None)
