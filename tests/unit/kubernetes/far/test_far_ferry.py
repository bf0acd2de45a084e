"""Calls to couriers that are unreachable, that give false answers, or that are other programs."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.kubernetes.courier_client import (
    Courier,
    CourierGone,
    CourierLost,
    Mirror,
    Poller,
    PollInterval,
    RemoteTaskDir,
)
from stoker.engine.kubernetes.courier_client import poller as ferry_module
from stoker.engine.kubernetes.courier_client.client import Incomplete
from stoker.engine.kubernetes.courier_client.transport import StreamTransport
from stoker.errors import BlobDamaged, EngineUnavailable
from stoker.task import courier_protocol, formats, layout
from stoker.task.local_directory import UnsafePath
from stoker.testing.couriers import LoopThread

KEY = bytes(32)
Handler = Callable[[str, dict[str, Any], memoryview], tuple[int, dict[str, Any], bytes]]
NOTHING: dict[str, Any] = {"deltas": [], "records": [], "resets": [], "gone": [], "mark": None}


class Wire:
    """A transport with a scripted courier behind it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.guard = courier_protocol.Guard()
        self.calls: list[str] = []
        self.fail: Exception | None = None
        self.spoil: Callable[[int, str, bytes], tuple[int, str, bytes]] = lambda *answer: answer
        self.before: Callable[[], Awaitable[None]] | None = None

    async def call(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        self.calls.append(path)
        if self.before is not None:
            await self.before()
        if self.fail is not None:
            raise self.fail
        claim = courier_protocol.check_request(KEY, "POST", path, headers[courier_protocol.SESSION])
        courier_protocol.check_body(claim, body)
        try:
            self.guard.admit(claim)
            status, header, data = self.handler(path, *courier_protocol.unpack(body))
        except courier_protocol.WrongBoot:
            status, header, data = 409, {"boot": self.guard.boot}, b""
        answer = courier_protocol.pack(header, data)
        status, session, answer = self.spoil(
            status, courier_protocol.sign_answer(KEY, claim.nonce, status, [answer]), answer
        )
        return status, {courier_protocol.SESSION.lower(): session}, answer


def quiet(path: str, header: dict[str, Any], data: memoryview) -> tuple[int, dict[str, Any], bytes]:
    return 200, NOTHING, b""


def test_a_call_learns_the_boot_id_and_again_after_a_restart() -> None:
    line = Wire(lambda *_: (200, {"hello": 1}, b"data"))

    async def calls() -> None:
        courier = Courier(KEY, line)
        for _ in range(2):
            header, data = await courier.call(courier_protocol.READ, {})
            assert header == {"hello": 1} and bytes(data) == b"data"
        line.guard = courier_protocol.Guard()
        assert (await courier.call(courier_protocol.READ, {}))[0] == {"hello": 1}

    asyncio.run(calls())
    assert len(line.calls) == 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda status, session, body: (status, "", body),
        lambda status, session, body: (status, session, body + b"x"),
        lambda status, session, body: (status, session, body[:-1]),
        lambda status, session, body: (404, session, body),
        lambda status, session, body: (502, "", b"<html>bad gateway</html>"),
        lambda status, session, body: (200, courier_protocol.sign_answer(KEY, "f" * 32, 200, [body]), body),
        lambda status, session, body: (409, "", courier_protocol.pack({"boot": "f" * 32})),
    ],
)
def test_an_answer_that_is_not_from_the_courier_is_refused(
    spoil: Callable[[int, str, bytes], tuple[int, str, bytes]],
) -> None:
    line = Wire(lambda *_: (200, {}, b"data"))
    line.spoil = spoil
    with pytest.raises(CourierLost) as caught:
        asyncio.run(Courier(KEY, line).call(courier_protocol.READ, {}))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    "fail", [TimeoutError(), ConnectionResetError("reset"), EngineUnavailable("the API server is away")]
)
def test_all_transport_errors_become_one_error(fail: Exception) -> None:
    line = Wire(quiet)
    line.fail = fail
    with pytest.raises(CourierLost):
        asyncio.run(Courier(KEY, line).call(courier_protocol.READ, {}))


@pytest.mark.parametrize(
    ("verb", "status", "header", "kind"),
    [
        (courier_protocol.READ, 422, {"errno": 2, "error": "gone"}, FileNotFoundError),
        (courier_protocol.READ, 422, {"errno": 13, "error": "no"}, PermissionError),
        (courier_protocol.READ, 422, {"errno": 1, "error": "a link", "unsafe": True}, UnsafePath),
        (courier_protocol.BLOB, 422, {"error": "hash", "damaged": True}, BlobDamaged),
        (courier_protocol.PLACE, 422, {"error": "not all there", "incomplete": True}, Incomplete),
        (courier_protocol.WALK, 413, {"error": "too many"}, ValueError),
        (courier_protocol.READ, 503, {"error": "busy"}, CourierLost),
        # An error that its verb cannot raise is an error of the courier itself.
        (courier_protocol.SYNC, 422, {"error": "hash", "damaged": True}, OSError),
        (courier_protocol.ORDER, 422, {"error": "hash", "incomplete": True}, OSError),
        (courier_protocol.ORDER, 413, {"error": "too many"}, OSError),
        (courier_protocol.READ, 500, {"error": "oops"}, OSError),
        (courier_protocol.READ, 400, {}, OSError),
        (courier_protocol.READ, 422, {"errno": "2"}, OSError),
        (courier_protocol.READ, 422, {"errno": -5}, OSError),
    ],
)
def test_errors_at_the_courier_are_raised_here(
    verb: str, status: int, header: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        asyncio.run(Courier(KEY, Wire(lambda *_: (status, header, b""))).call(verb, {}))


def test_a_courier_that_restarts_all_the_time_is_given_up() -> None:
    line = Wire(quiet)

    async def restart() -> None:
        line.guard = courier_protocol.Guard()

    line.before = restart
    with pytest.raises(CourierLost):
        asyncio.run(Courier(KEY, line).call(courier_protocol.READ, {}))


def test_a_key_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError):
        Courier(b"short", Wire(quiet))


class Far:
    """A remote task directory over a wire, with a loop in a thread."""

    def __init__(self, tmp_path: Path, handler: Handler, **more: Any) -> None:
        self.thread = LoopThread()
        self.wire = Wire(handler)
        self.mirror = Mirror(tmp_path / "mirror", source="pod", boot_id="boot")
        self.directory = RemoteTaskDir(
            Courier(KEY, self.wire), self.mirror, self.thread.loop, **{"patience": 0.0, **more}
        )

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *exc: object) -> None:
        self.thread.close()


def test_a_directory_exists_after_its_first_sync(tmp_path: Path) -> None:
    with Far(tmp_path, quiet) as far:
        assert not far.directory.exists()
        far.wire.fail = ConnectionRefusedError()
        assert not far.directory.catch_up(0.3)
        assert not far.directory.exists()
        far.wire.fail = None
        assert far.directory.catch_up(30)
        assert far.directory.exists()
    with Far(tmp_path, quiet) as far:
        assert not far.directory.exists()
        far.mirror.record(layout.ORDER, b'{"seq":1,"generation":1,"verb":"run"}')
        assert far.directory.exists(), "a known order was given"


def test_catching_up_continues_to_the_end(tmp_path: Path) -> None:
    answers = [{**NOTHING, "mark": {"journal": 0, "files": {}}} for _ in range(5)]

    def handler(path: str, header: dict[str, Any], data: memoryview) -> tuple[int, dict[str, Any], bytes]:
        assert header["final"] is True
        assert header["mark"] == (None if len(answers) == 5 else {"journal": 0, "files": {}})
        return 200, answers.pop() if answers else NOTHING, b""

    with Far(tmp_path, handler) as far:
        assert far.directory.catch_up(30)
        assert len(far.wire.calls) == 7


def test_all_threads_of_the_loop_may_wait_for_news(tmp_path: Path) -> None:
    """More requests than threads in the loop's executor, each for an answer that a thread writes."""
    data = b"x" * 200_000

    def handler(path: str, header: dict[str, Any], body: memoryview) -> tuple[int, dict[str, Any], bytes]:
        held = header["have"].get(layout.segment(0), [0])[0]
        return 200, {**NOTHING, "deltas": [[layout.segment(0), held, len(data)]]}, data

    with Far(tmp_path, handler) as far:

        async def all_at_once() -> list[bool]:
            return await asyncio.gather(*(asyncio.to_thread(far.directory.catch_up, 30) for _ in range(100)))

        found = far.thread.run(all_at_once())
        assert found == [True] * 100


def test_nothing_blocks_the_loop_it_waits_for(tmp_path: Path) -> None:
    with Far(tmp_path, quiet) as far:

        async def wrong() -> None:
            far.directory.write_order(formats.Order(seq=1, generation=1, verb="run"))

        with pytest.raises(RuntimeError, match="event loop's own thread"):
            far.thread.run(wrong())


def test_after_the_loop_has_ended(tmp_path: Path) -> None:
    far = Far(tmp_path, quiet)
    far.thread.close()
    with pytest.raises(CourierLost):
        far.directory.discard("x")


def test_a_task_that_is_proven_gone_is_not_awaited(tmp_path: Path) -> None:
    """Requests that already wait end too."""
    with Far(tmp_path, quiet, patience=600.0) as far:
        assert far.directory.catch_up(30)
        far.wire.fail = ConnectionRefusedError()
        found: list[Exception] = []

        def ask() -> None:
            try:
                far.directory.settle(1)
            except OSError as exc:
                found.append(exc)

        waiting = threading.Thread(target=ask)
        waiting.start()
        far.directory.abandon("its node was deleted")
        waiting.join(30)
        assert [type(exc) for exc in found] == [CourierGone] and "its node was deleted" in str(found[0])
        assert not far.directory.catch_up(600)
        assert far.directory.exists()


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"entries": 7, "seen": 1, "after": None},
        {"entries": [], "seen": -1, "after": None},
        {"entries": [7], "seen": 1, "after": None},
        {"entries": [{"path": 7}], "seen": 1, "after": None},
        {"entries": [{"path": "a", "size": -1, "mode": 0, "sha256": "0" * 64}], "seen": 1, "after": None},
        {"entries": [{"path": "a", "size": 1, "mode": 0, "sha256": "no"}], "seen": 1, "after": None},
        {
            "entries": [{"path": "a", "size": 1 << 70, "mode": 0, "sha256": "0" * 64}],
            "seen": 1,
            "after": None,
        },
        {"entries": [{"path": "a", "link": "b"}] * 20, "seen": 1, "after": None},
        {"entries": [], "seen": 20, "after": None},
        {"entries": [], "seen": 0, "after": ""},
        {"entries": [], "seen": 1, "after": 7},
    ],
)
def test_an_invalid_list(tmp_path: Path, page: dict[str, Any]) -> None:
    with (
        Far(tmp_path, lambda *_: (200, {"running": False, **page}, b"")) as far,
        pytest.raises((OSError, ValueError)),
    ):
        far.directory.walk("output", max_entries=10)


def test_an_endless_list_is_refused(tmp_path: Path) -> None:
    count = iter(range(1_000_000))

    def handler(*_: Any) -> tuple[int, dict[str, Any], bytes]:
        name = str(next(count))
        return 200, {"entries": [{"path": name, "link": "x"}], "seen": 0, "after": name}, b""

    with Far(tmp_path, handler) as far, pytest.raises(ValueError):
        far.directory.walk("output", max_entries=10)
    assert next(count) < 20


def test_more_bytes_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    with Far(tmp_path, lambda *_: (200, {}, b"x" * 100)) as far, pytest.raises(CourierLost):
        far.directory.fetch("x", 0, 10)


def test_a_late_order_is_an_error(tmp_path: Path) -> None:
    with Far(tmp_path, lambda *_: (200, {"stale": 7}, b"")) as far:
        with pytest.raises(OSError) as caught:
            far.directory.write_order(formats.Order(seq=1, generation=1, verb="run"))
        assert caught.value.errno == errno.ESTALE
        assert far.directory.order() is None


# -- pollers -------------------------------------------------------------------------------------------------


def test_a_poller_fetches_news_and_reports_it(tmp_path: Path) -> None:
    news = [
        ({**NOTHING, "deltas": [[layout.segment(0), 0, 4]]}, b"one\n"),
        ({**NOTHING, "deltas": [[layout.segment(0), 4, 200_000]]}, b"x" * 200_000),
    ]
    arrived, idle = threading.Event(), threading.Event()

    def handler(path: str, header: dict[str, Any], data: memoryview) -> tuple[int, dict[str, Any], bytes]:
        if news:
            return 200, *news.pop(0)
        idle.set()
        return 200, NOTHING, b""

    with Far(tmp_path, handler) as far:
        changes = []
        ferry = Poller(far.directory, ("run", 1, "worker-0"), changes.append, pace=PollInterval(least=0.001))
        assert ferry.last_contact is None

        async def slow() -> None:
            await asyncio.sleep(0.001)
            if len(changes) == 2:
                arrived.set()

        far.wire.before = slow
        task = asyncio.run_coroutine_threadsafe(ferry.run(), far.thread.loop)
        assert arrived.wait(30) and idle.wait(30)
        task.cancel()
        assert changes == [("run", 1, "worker-0")] * 2
        assert far.directory.size(layout.segment(0)) == 200_004
        assert ferry.last_contact is not None and ferry.problem == ""


@pytest.mark.parametrize(
    "nonsense",
    [
        {},
        {**NOTHING, "deltas": [["../evil", 0, 1]]},
        {**NOTHING, "gone": ["/etc/passwd"]},
        {**NOTHING, "mark": {"a": ["b"]}},
    ],
)
def test_a_poller_survives_every_error(
    tmp_path: Path, nonsense: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ferry_module, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(ferry_module, "LONGEST_BACKOFF", 0.01)
    turns: list[Any] = [nonsense, ConnectionResetError(), nonsense, EngineUnavailable("away"), TimeoutError()]
    done = threading.Event()

    with Far(
        tmp_path, lambda *_: (200, turns[0] if turns and isinstance(turns[0], dict) else NOTHING, b"")
    ) as far:

        async def next_turn() -> None:
            far.wire.fail = turns[0] if turns and isinstance(turns[0], Exception) else None
            if not turns:
                done.set()
                await asyncio.sleep(0.01)

        real = far.wire.call

        async def call(*args: Any) -> Any:
            try:
                return await real(*args)
            finally:
                if turns and far.wire.guard.boot:
                    turns.pop(0)

        far.wire.before = next_turn
        far.wire.call = call  # type: ignore[method-assign]
        ferry = Poller(far.directory, ("run", 1, "worker-0"), lambda key: None)
        task = asyncio.run_coroutine_threadsafe(ferry.run(), far.thread.loop)
        assert done.wait(30)
        for _ in range(2000):
            if not ferry.problem and ferry.last_contact is not None:
                break
            threading.Event().wait(0.01)
        assert ferry.problem == "" and not task.done()
        task.cancel()
    assert not (tmp_path / "evil").exists()


def test_many_pollers_share_a_rate() -> None:
    pace = PollInterval(least=0.1, per_second=500)
    assert 0.07 < pace.pause() < 0.13
    pace.pollers = 1000
    assert 1.4 < pace.pause() < 2.6


# -- HTTP ----------------------------------------------------------------------------------------------------


def transport(answer: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """One call to a peer that always gives this answer."""

    async def work() -> tuple[int, Mapping[str, str], bytes]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        line = StreamTransport(lambda: asyncio.open_connection("127.0.0.1", port))
        try:
            return await line.call("/v1/sync", {"A": "b"}, b"", 20)
        finally:
            await line.close()
            server.close()
            await server.wait_closed()

    return asyncio.run(work())


def test_an_answer_is_read() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Y: z\r\n\r\nabc"
    assert transport(answer) == (200, {"content-length": "3", "x-y": "z"}, b"abc")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nabc",
        b"HTTP/1.1 abc\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    ],
)
def test_invalid_answers(answer: bytes) -> None:
    with pytest.raises(OSError):
        transport(answer)
