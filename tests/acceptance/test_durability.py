"""Acknowledged runs are durable, and a body starts at most once: 300 submits, 8 clients, server kills."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from stoker.errors import ServerUnreachable, StokerError
from support.box import Box
from support.seeds import seeds
from support.waiting import wait

SUBMITS = 300
CLIENTS = 8
KILLS = 8
"""A minimum."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_submits_survive_a_server_that_is_killed_again_and_again(box: Box, seed: int) -> None:
    print(f"seed {seed}")
    starts = box.work / "starts"
    command = [
        "/bin/sh",
        "-c",
        f'echo "$STOKER_RUN $STOKER_ATTEMPT $STOKER_GENERATION $STOKER_TASK_INDEX" >> {starts}',
    ]
    acknowledged: dict[str, str] = {}
    lock = threading.Lock()
    done = threading.Event()

    def client(number: int) -> None:
        for index in range(number, SUBMITS, CLIENTS):
            key = f"{seed}-{index}"
            run = _submit(box, key, command)
            with lock:
                acknowledged[key] = run

    kills = 0

    def killer() -> None:
        """Kill servers until all submits are acknowledged, and a few more times while the runs are worked
        off. Two of three servers are killed only after they answer, so submits make progress."""
        nonlocal kills
        chance = random.Random(seed)
        while not done.is_set() or kills < KILLS:
            if done.is_set() or chance.random() < 2 / 3:
                _quietly(box.client().server)
            time.sleep(chance.uniform(0.1, 2.0))
            kills += box.kill_server()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    killing = threading.Thread(target=killer)
    for thread in [*clients, killing]:
        thread.start()
    for thread in clients:
        thread.join()
    done.set()
    killing.join()
    print(f"{kills} kills")

    assert len(acknowledged) == SUBMITS
    assert len(set(acknowledged.values())) == SUBMITS, "two keys gave one run"
    try:
        wait(lambda: box.client().server()["counts"].get("succeeded", 0), lambda n: n >= SUBMITS, limit=400)
    except AssertionError:
        pytest.fail(f"not all succeeded: {_left_over(box)}\n{box.server_log()}")
    states = Counter(run["state"] for run in _all(box))
    assert states == {"succeeded": SUBMITS}
    bodies = Counter(starts.read_text().splitlines())
    assert [line for line, count in bodies.items() if count > 1] == [], "a body started twice"
    assert {line.split()[0] for line in bodies} == set(acknowledged.values())


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(StokerError, OSError):
        call()


def _submit(box: Box, key: str, command: list[str]) -> str:
    """Retry with the same key until a server answers."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return str(
                box.client().submit(key=key, job={"run": command, "name": "noop", "resources": {"cpu": 0.1}})[
                    "id"
                ]
            )
        except (ServerUnreachable, StokerError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _left_over(box: Box) -> list[dict[str, object]]:
    """The runs that have not succeeded; the first few with all details."""
    others = [run for run in _all(box) if run["state"] != "succeeded"]
    return [{"run": run, "events": box.client().events(str(run["id"]))["events"]} for run in others[:3]]


def _all(box: Box) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    before = None
    while True:
        page = box.client().runs(limit=200, before=before)
        found += page["runs"]
        before = page["next"]
        if before is None:
            return found
