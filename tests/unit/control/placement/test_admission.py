"""Decisions of the queue become attempts; starts of one moment are recorded in one transaction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.spec.states import RunState
from stoker.store.rows import AddAttempt
from support.control.driven import NODE, Driven


def test_runs_start_in_the_order_of_priority_then_time(server: Driven) -> None:
    first = server.submit(resources={"cpu": 4})
    low = server.submit(resources={"cpu": 4}, priority="low")
    normal, later = server.submit(resources={"cpu": 4}), server.submit(resources={"cpu": 4})
    assert [server.controller.place(run) for run in (normal, later, low)] == [1, 2, 3]
    for run, following in ((first, normal), (normal, later), (later, low)):
        server.stop(run)
        server.advance(3)
        assert server.state(following) is RunState.RUNNING
    assert server.store.attempt(low, 1).placement["worker-0"].node == "local"


def test_runs_that_start_together_are_recorded_together(server: Driven) -> None:
    first = server.submit(resources={"cpu": 4})
    runs = [server.submit(resources={"cpu": 1}) for _ in range(4)]
    seen: list[int] = []
    apply = server.store.apply

    def counted(changes: Any) -> None:
        seen.append(sum(isinstance(change, AddAttempt) for change in changes))
        apply(changes)

    server.store.apply = counted  # type: ignore[method-assign]
    server.stop(first)
    server.advance(3)
    assert {server.state(run) for run in runs} == {RunState.RUNNING}
    assert [count for count in seen if count] == [4]


def test_the_attempt_is_recorded_before_the_engine_is_asked(server: Driven) -> None:
    found: list[str] = []

    def asked(method: str, argument: Any) -> None:
        if method == "submit":
            found.append(server.store.run(argument.run).state)
            assert server.store.attempt(argument.run, argument.number).placement.keys() == {
                "worker-0",
                "worker-1",
            }

    server.engine.before = asked
    server.submit(workers=2, resources={"cpu": 1})
    assert found == ["starting"]


def test_tasks_of_one_machine_have_different_ports(server: Driven) -> None:
    runs = [server.submit(workers=2, resources={"cpu": 1}) for _ in range(2)]
    ports = [port for run in runs for place in server.attempt(run).placement.values() for port in place.ports]
    assert len(ports) == len(set(ports)) >= 4
    assert server.loop.context.ports.taken == set(ports)
    server.stop(runs[0])
    server.advance(3)
    assert server.loop.context.ports.taken < set(ports), "given back when its tasks have ended"


def test_a_restarted_server_knows_the_held_places(server: Driven) -> None:
    run = server.submit(workers=2, resources={"cpu": 2})
    ports = server.loop.context.ports.taken
    server.restart()
    waiting = server.submit(resources={"cpu": 1})
    server.advance(10)
    assert server.state(waiting) is RunState.QUEUED and server.loop.context.ports.taken == ports
    server.stop(run)
    server.advance(3)
    assert server.state(waiting) is RunState.RUNNING


def test_a_node_that_is_not_ready_is_not_used_until_it_is(server: Driven) -> None:
    server.engine.nodes = [replace(NODE, ready=False)]
    server.advance(6)
    run = server.submit()
    server.advance(20)
    assert server.state(run) is RunState.QUEUED
    server.engine.nodes = [NODE]
    server.advance(6)
    assert server.state(run) is RunState.RUNNING


def test_a_stop_at_the_moment_of_the_start_frees_the_place(server: Driven) -> None:
    run = server.submit(resources={"cpu": 4}, settle=False)
    server.turn(6)
    server.stop(run)
    assert server.state(run) is RunState.STOPPED
    other = server.submit(resources={"cpu": 4})
    server.advance(3)
    assert server.state(other) is RunState.RUNNING
