"""The mirror becomes equal to its source, and lines arrive before the journal entry that follows them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.courier import sync
from stoker.courier.sync import Sync, SyncRequest
from stoker.engine.kubernetes.courier_client.mirror import Mirror
from stoker.task import courier_protocol, layout
from stoker.task.local_directory import LocalTaskDir

GROWING = st.sampled_from(
    [layout.segment(0), layout.segment(1), "metrics/1-1-a.jsonl", "metrics/2-1-b.jsonl"]
)
LINES = st.lists(st.sampled_from([b"a\n", b"bb\n", b"a long line of the log\n"]), min_size=1, max_size=12)


class Mirroring(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="mirroring-"))
        self.source = self.home / "source"
        for name in layout.DIRECTORIES:
            (self.source / name).mkdir(parents=True)
        self.sync = Sync(str(self.source))
        self.before: list[dict[str, bytes]] = []
        """What was in the files when each entry of the journal was written."""
        self.disturbed: set[str] = set()
        """Files that were not only appended to: of those nothing is promised on the way."""
        self.answers: list[tuple[dict[str, Any], bytes]] = []
        self.mark: Any = None
        self.count = 0

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    @initialize()
    def begin(self) -> None:
        self.restart()

    # -- events at the source ---------------------------------------------------------------------------------

    @rule(path=GROWING, lines=LINES, torn=st.sampled_from([b"", b"half a li"]))
    def append(self, path: str, lines: list[bytes], torn: bytes) -> None:
        with (self.source / path).open("ab") as file:
            file.write(b"".join(lines) + torn)
        if torn:
            with (self.source / path).open("ab") as file:
                file.write(b"ne\n")

    @rule()
    def journal(self) -> None:
        self.before.append(
            {
                f"{folder}/{name}": (self.source / folder / name).read_bytes()
                for folder in (layout.LOG, layout.METRICS)
                for name in os.listdir(self.source / folder)
            }
        )
        with (self.source / layout.JOURNAL).open("ab") as file:
            file.write(b'{"n":%d}\n' % len(self.before))

    @rule()
    def no_room_for_an_entry(self) -> None:
        """The launcher writes a part of an entry and truncates it."""
        size = (self.source / layout.JOURNAL).stat().st_size if (self.source / layout.JOURNAL).exists() else 0
        with (self.source / layout.JOURNAL).open("ab") as file:
            file.write(b'{"never')
        self.ask_once()
        os.truncate(self.source / layout.JOURNAL, size)

    @rule()
    def status(self) -> None:
        self.count += 1
        (self.source / "new").write_bytes(b'{"phase":"%d"}' % self.count)
        os.replace(self.source / "new", self.source / layout.STATUS)

    @rule(path=GROWING)
    def drop(self, path: str) -> None:
        (self.source / path).unlink(missing_ok=True)
        self.disturbed.add(path)

    @rule(path=GROWING, content=LINES)
    def rewrite(self, path: str, content: list[bytes]) -> None:
        (self.source / path).write_bytes(b"new\n" + b"".join(content))
        self.disturbed.add(path)

    # -- events at the mirror ---------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        """The server was killed at any moment."""
        self.mirror = Mirror(self.home / "mirror", source="pod", boot_id="boot")
        self.near = LocalTaskDir(str(self.mirror.root))
        self.answers.clear()
        self.mark = None

    @rule()
    def ask_once(self) -> None:
        """An answer that arrives later."""
        self.answers.append(self._answer(None, final=False))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def late_answer(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.answers) - 1))
        header, body = self.answers.pop(at)
        self.mirror.apply(header, memoryview(body))

    @rule()
    def ferry(self) -> None:
        header, body = self._answer(self.mark, final=False)
        self.mirror.apply(header, memoryview(body))
        self.mark = header["mark"]

    @rule()
    def catch_up(self) -> None:
        mark: Any = None
        for _ in range(500):
            header, body = self._answer(mark, final=True)
            self.mirror.apply(header, memoryview(body))
            mark = header["mark"]
            if mark is None:
                break
        else:
            raise AssertionError("it never ends")
        assert self._files(self.mirror.root) == self._files(self.source)

    # -- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def lines_come_before_entries(self) -> None:
        if not hasattr(self, "near"):
            return
        entries, _ = self.near.journal()
        if not entries:
            return
        assert [entry["n"] for entry in entries] == list(range(1, len(entries) + 1))
        for path, content in self.before[len(entries) - 1].items():
            if path not in self.disturbed:
                assert self.near.read(path)[: len(content)] == content

    def _answer(self, mark: Any, *, final: bool) -> tuple[dict[str, Any], bytes]:
        question = json.loads(json.dumps(self.mirror.request(wait=0.0, final=final, mark=mark)))
        news = self.sync.wait(SyncRequest.parse(question))
        header, data = courier_protocol.unpack(courier_protocol.pack(news.header(), b"".join(news.data)))
        return header, bytes(data)

    def _files(self, root: Path) -> dict[str, bytes]:
        """Empty files are not sent."""
        found = {}
        for path in [
            *courier_protocol.GROWING,
            *courier_protocol.RECORDS,
            *self._names(root, layout.LOG),
            *self._names(root, layout.METRICS),
        ]:
            data = (root / path).read_bytes() if (root / path).exists() else b""
            if data:
                found[path] = data
        return found

    def _names(self, root: Path, folder: str) -> list[str]:
        return [f"{folder}/{name}" for name in os.listdir(root / folder)]


@pytest.mark.parametrize("answer", [40, 4 << 20])
def test_mirroring(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "ANSWER", answer)
    monkeypatch.setattr(sync, "LONG_LINE", 30)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Mirroring, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
