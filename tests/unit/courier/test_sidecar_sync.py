"""What is new in a task directory, and in which order it is sent."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.courier import sync
from stoker.courier.sync import ClientGone, Sync, SyncAnswer, SyncRequest
from stoker.linux import inotify
from stoker.task import courier_protocol, layout
from stoker.task.courier_protocol import Malformed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in layout.DIRECTORIES:
        (tmp_path / name).mkdir()
    return tmp_path


class Asker:
    """The other side, which remembers what it has received."""

    def __init__(self, root: Path) -> None:
        self.sync = Sync(str(root))
        self.files: dict[str, bytes] = {}
        self.records: dict[str, bytes] = {}

    def request(self, **more: Any) -> SyncRequest:
        have = {
            path: [len(data), courier_protocol.tag(data[-courier_protocol.TAIL :])]
            for path, data in self.files.items()
        }
        records = {path: courier_protocol.tag(data) for path, data in self.records.items()}
        return SyncRequest.parse({"have": have, "records": records, "wait": 0, **more})

    def take(self, news: SyncAnswer) -> dict[str, Any]:
        header, data = news.header(), list(news.data)
        for path in header["resets"]:
            self.files[path] = b""
        for path, offset, length in header["deltas"]:
            piece = bytes(data.pop(0))
            assert len(piece) == length and offset == len(self.files.get(path, b""))
            self.files[path] = self.files.get(path, b"") + piece
        for path, tag, length in header["records"]:
            self.records[path] = bytes(data.pop(0))
            assert courier_protocol.tag(self.records[path]) == tag and len(self.records[path]) == length
        for path in header["gone"]:
            self.files.pop(path, None)
            self.records.pop(path, None)
        assert not data
        return header

    def ask(self, **more: Any) -> dict[str, Any]:
        return self.take(self.sync.wait(self.request(**more)))


def test_without_news_the_answer_is_empty(root: Path) -> None:
    asker = Asker(root)
    (root / layout.STATUS).write_bytes(b"{}")
    assert asker.ask()["records"]
    header = asker.ask()
    assert not any(header.values())


def test_only_whole_lines_until_the_end(root: Path) -> None:
    asker = Asker(root)
    (root / layout.JOURNAL).write_bytes(b"one\ntw")
    (root / layout.segment(0)).write_bytes(b"no end")
    asker.ask()
    assert asker.files == {layout.JOURNAL: b"one\n"}
    asker.ask(final=True)
    assert asker.files == {layout.JOURNAL: b"one\ntw", layout.segment(0): b"no end"}


def test_a_line_without_end_is_sent_when_it_is_long(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "LONG_LINE", 100)
    asker = Asker(root)
    (root / layout.segment(0)).write_bytes(b"x" * 99)
    assert asker.ask()["deltas"] == []
    (root / layout.segment(0)).write_bytes(b"x" * 100)
    asker.ask()
    assert asker.files[layout.segment(0)] == b"x" * 100


def test_the_journal_is_sent_after_the_lines_before_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "ANSWER", 100)
    asker = Asker(root)
    (root / layout.segment(0)).write_bytes(b"123456789\n" * 15)
    (root / layout.segment(1)).write_bytes(b"123456789\n" * 15)
    (root / layout.METRICS / "1-1-a.jsonl").write_bytes(b"{}\n")
    (root / layout.JOURNAL).write_bytes(b"ended\n")
    (root / layout.STATUS).write_bytes(b"{}")
    mark, answers = None, 0
    while True:
        # The log grows faster than it is read, and the journal grows too.
        with (root / layout.segment(1)).open("ab") as file:
            file.write(b"123456789\n" * 30)
        header = asker.ask(mark=mark)
        answers += 1
        if header["mark"] is None:
            break
        assert layout.JOURNAL not in asker.files and not asker.records
        mark = header["mark"]
        (root / layout.JOURNAL).write_bytes(b"ended\nmore\n")
    assert asker.files[layout.JOURNAL] == b"ended\n", "what came later may have lines before it"
    assert len(asker.files[layout.segment(0)]) == 150 and len(asker.files[layout.segment(1)]) >= 150
    assert layout.STATUS in asker.records
    assert answers < 8


def test_a_journal_longer_than_an_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "ANSWER", 100)
    asker = Asker(root)
    (root / layout.JOURNAL).write_bytes(b"123456789\n" * 55)
    mark = asker.ask()["mark"]
    while mark is not None:
        mark = asker.ask(mark=mark)["mark"]
    assert asker.files[layout.JOURNAL] == b"123456789\n" * 55


def test_a_file_that_shrinks_or_is_removed_delays_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "ANSWER", 100)
    asker = Asker(root)
    for number in range(3):
        (root / layout.segment(number)).write_bytes(b"123456789\n" * 50)
    (root / layout.JOURNAL).write_bytes(b"123456789\n" * 50)
    mark = asker.ask()["mark"]
    os.truncate(root / layout.segment(1), 10)
    (root / layout.segment(2)).unlink()
    os.truncate(root / layout.JOURNAL, 30)
    answers = 0
    while mark is not None:
        mark = asker.ask(mark=mark)["mark"]
        answers += 1
        assert answers < 20
    asker.ask()
    assert asker.files == {
        layout.segment(0): b"123456789\n" * 50,
        layout.segment(1): b"123456789\n",
        layout.JOURNAL: b"123456789\n" * 3,
    }


def test_a_replaced_file_is_sent_again(root: Path) -> None:
    asker = Asker(root)
    path = root / layout.METRICS / "1-1-a.jsonl"
    for content in (b"one\n" * 100, b"two\n" * 100, b"three\n" * 200, b"x\n"):
        path.write_bytes(content)
        asker.ask()
        assert asker.files == {f"{layout.METRICS}/1-1-a.jsonl": content}


def test_removed_files_are_reported(root: Path) -> None:
    asker = Asker(root)
    (root / layout.segment(0)).write_bytes(b"a\n")
    (root / layout.segment(1)).write_bytes(b"a\n")
    (root / layout.STATUS).write_bytes(b"{}")
    (root / layout.JOURNAL).write_bytes(b"a\n")
    asker.ask()
    for path in (layout.segment(0), layout.STATUS, layout.JOURNAL):
        (root / path).unlink()
    (root / layout.segment(1)).unlink()
    (root / layout.segment(1)).symlink_to(root / layout.TASK)
    asker.ask()
    assert asker.files == {} and asker.records == {}


def test_unrequested_files_are_not_sent(root: Path) -> None:
    asker = Asker(root)
    (root / layout.segment(0)).write_bytes(b"a\n")
    news = asker.sync.wait(asker.request(have={layout.segment(0): [-1, ""]}))
    assert not news and news.mark is None


def test_only_the_newest_files_are_sent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "FILES", 3)
    asker = Asker(root)
    for generation in (1, 9, 10):
        for process in (1, 2):
            (root / layout.METRICS / f"{generation}-{process}-a.jsonl").write_bytes(b"{}\n")
    asker.ask()
    assert sorted(asker.files) == [f"metrics/{name}-a.jsonl" for name in ("10-1", "10-2", "9-2")]
    monkeypatch.setattr(sync, "FILES", 1)
    assert asker.ask()["gone"] == [], "not looked at is not gone"


def test_files_with_other_names_are_not_sent(root: Path) -> None:
    asker = Asker(root)
    for name in ("a b.jsonl", ".hidden.jsonl", "x.txt", "ä.jsonl"):
        (root / layout.METRICS / name).write_bytes(b"{}\n")
    (root / layout.LOG / "secret.log").write_bytes(b"x\n")
    assert not any(asker.ask().values())


@pytest.mark.parametrize("watching", [True, False])
def test_a_request_is_answered_when_something_arrives(
    root: Path, watching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not watching:

        def refused(self: inotify.Inotify) -> None:
            raise OSError(24, "no more instances")

        monkeypatch.setattr(inotify.Inotify, "__init__", refused)
        monkeypatch.setattr(inotify.Inotify, "close", lambda self: None)
        monkeypatch.setattr(sync, "CHECK_SECONDS", 0.05)
    for path, data in (
        (layout.JOURNAL, b"entry\n"),
        (layout.segment(0), b"line\n"),
        (f"{layout.METRICS}/1-1-a.jsonl", b"{}\n"),
    ):
        asker = Asker(root)
        asker.ask()
        found: list[SyncAnswer] = []
        thread = threading.Thread(
            target=lambda asker=asker, found=found: found.append(asker.sync.wait(asker.request(wait=30)))
        )
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive()
        with (root / path).open("ab") as file:
            file.write(data)
        thread.join(25)
        assert [header[0] for header in found[0].deltas] == [path]


def test_a_request_whose_client_has_left_ends(root: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(ClientGone):
            Sync(str(root)).wait(SyncRequest({}, {}, 30.0, False, None), ours.fileno())


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"have": [], "records": {}, "wait": 0},
        {"have": {"a": 1}, "records": {}, "wait": 0},
        {"have": {"a": ["1", ""]}, "records": {}, "wait": 0},
        {"have": {}, "records": {"status.json": 7}, "wait": 0},
        {"have": {}, "records": {}, "wait": "long"},
        {"have": {}, "records": {}, "wait": 0, "mark": 7},
        {"have": {}, "records": {}, "wait": 0, "mark": {"journal": -1, "files": {}}},
        {"have": {}, "records": {}, "wait": 0, "mark": {"journal": 1, "files": {"../x": 1}}},
    ],
)
def test_invalid_requests(raw: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        SyncRequest.parse(raw)
