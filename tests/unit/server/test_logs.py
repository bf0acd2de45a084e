"""Reading and following logs."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.waiting import wait


def texts(records: Any) -> list[str]:
    return [record["text"] for record in records if "text" in record]


def test_existing_lines(rig: Any) -> None:
    run = rig.submit()["id"]
    assert list(rig.client.logs(run)) == []
    rig.log(run, "one", "two \x1b[31mred", "ünï")
    rig.log(run, "warn", stream="e")
    rig.log(run, "other", task="worker-1")
    assert texts(rig.client.logs(run)) == ["one", "two \x1b[31mred", "ünï", "warn", "other"]
    assert texts(rig.client.logs(run, stream="stderr")) == ["warn"]
    assert texts(rig.client.logs(run, task="worker-1")) == ["other"]
    assert texts(rig.client.logs(run, tail=1, task="worker-0")) == ["warn"]
    assert texts(rig.client.logs(run, since=time.time() + 60)) == []
    assert texts(rig.client.logs(run, attempt=2)) == []
    for query in ("stream=x", "tail=-1", "attempt=0", "since=nan", "follow=maybe"):
        assert rig.raw("GET", f"/api/v1/runs/{run}/logs?{query}")[0] == 422
    assert texts(rig.client.logs(run, task="../../../etc")) == []


def test_following_to_the_end(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, "first")
    followed: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: followed.extend(rig.client.logs(run, follow=True)))
    thread.start()
    rig.log(run, "second")
    rig.log(run, *[f"line {n}" for n in range(5000)])
    rig.end(run, "failed", 7)
    thread.join(30)
    assert texts(followed) == ["first", "second", *[f"line {n}" for n in range(5000)]]
    assert followed[-1] == {"end": {"state": "failed", "exit_code": 7, "cause": "completed"}}


def test_lines_written_just_before_the_end_are_not_lost(rig: Any) -> None:
    for n in range(20):
        run = rig.submit()["id"]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(lambda run=run: list(rig.client.logs(run, follow=True)))
            rig.log(run, f"last words {n}")
            rig.end(run)
            records = following.result(30)
        assert texts(records) == [f"last words {n}"] and "end" in records[-1]


def test_two_hundred_followers(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, "start")
    before = threading.active_count()
    sockets = []
    try:
        for _ in range(200):
            sock = socket.create_connection(("127.0.0.1", rig.port), 30)
            request = f"GET /api/v1/runs/{run}/logs?follow=1 HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\n"
            sock.sendall(
                f"{request}Authorization: Bearer {rig.client._token}\r\nConnection: close\r\n\r\n".encode()
            )
            sockets.append(sock)
        wait(lambda: len(rig.controller.hub._waiters.get(run, ())) == 200)
        assert threading.active_count() - before < 60, "followers must not hold threads"
        assert rig.client.health()["status"] == "ok"
        rig.log(run, "more")
        rig.end(run)
        for sock in sockets:
            data = b""
            while piece := sock.recv(65536):
                data += piece
            assert data.count(b'"text"') == 2 and b'"end"' in data
    finally:
        for sock in sockets:
            sock.close()


def test_a_follower_that_disconnects_frees_everything(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, "start")
    for _ in range(5):
        records = rig.client.logs(run, follow=True)
        assert next(records)["text"] == "start"
        wait(lambda: len(rig.controller.hub._waiters.get(run, ())) == 1)
        records.close()
        wait(lambda: not rig.controller.hub._waiters.get(run))


def test_followers_let_go_when_the_server_ends(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, "start")
    followed: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: followed.extend(rig.client.logs(run, follow=True)))
    thread.start()
    wait(lambda: bool(rig.controller.hub._waiters.get(run)))
    rig.client.shutdown()
    thread.join(30)
    assert not thread.is_alive() and texts(followed) == ["start"] and "end" not in followed[-1]


def test_a_large_log_is_sent_in_pieces(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, *["x" * 1000 for _ in range(3000)])
    assert len(list(rig.client.logs(run))) == 3000


def test_a_filter_that_drops_the_whole_first_piece(rig: Any) -> None:
    run = rig.submit()["id"]
    rig.log(run, *["x" * 1000 for _ in range(1000)])
    rig.log(run, "at last", stream="e")
    assert texts(rig.client.logs(run, stream="stderr")) == ["at last"]
    rig.end(run)
    assert texts(rig.client.logs(run, stream="stderr", follow=True)) == ["at last"]
