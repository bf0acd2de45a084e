"""The mirror of a remote task directory, with untrusted couriers and servers that may be killed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.kubernetes.courier_client import mirror as mirror_module
from stoker.engine.kubernetes.courier_client.mirror import Mirror
from stoker.task import courier_protocol, layout
from stoker.task.courier_protocol import Malformed

LOG = layout.segment(0)


def make(root: Path, **more: Any) -> Mirror:
    return Mirror(root / "mirror", **{"source": "pod", "boot_id": "boot", **more})


def answer(
    deltas: list[tuple[str, int, bytes]] = [],  # noqa: B006 - never changed
    records: dict[str, bytes] = {},  # noqa: B006 - never changed
    **more: Any,
) -> tuple[dict[str, Any], memoryview]:
    header = {
        "deltas": [[path, offset, len(data)] for path, offset, data in deltas],
        "records": [[path, courier_protocol.tag(data), len(data)] for path, data in records.items()],
        "resets": [],
        "gone": [],
        "mark": None,
        **more,
    }
    return header, memoryview(b"".join([*(data for _, _, data in deltas), *records.values()]))


def test_new_bytes_are_appended(tmp_path: Path) -> None:
    mirror = make(tmp_path)
    assert not mirror.synced
    assert mirror.apply(*answer([(LOG, 0, b"one\n"), (layout.JOURNAL, 0, b"{}\n")], {layout.STATUS: b"{}"}))
    assert mirror.synced
    assert mirror.apply(*answer([(LOG, 4, b"two\n")]))
    assert not mirror.apply(*answer())
    assert (mirror.root / LOG).read_bytes() == b"one\ntwo\n"
    assert mirror.request(wait=1)["have"] == {
        LOG: [8, courier_protocol.tag(b"one\ntwo\n")],
        layout.JOURNAL: [3, courier_protocol.tag(b"{}\n")],
    }
    assert mirror.request(wait=1)["records"] == {layout.STATUS: courier_protocol.tag(b"{}")}


def test_answers_to_older_requests_do_no_harm(tmp_path: Path) -> None:
    """Two requests run at once; their answers overlap and arrive in any order."""
    data = b"".join(b"line %d\n" % number for number in range(200))
    for seed in range(20):
        chance = random.Random(seed)
        mirror = make(tmp_path / str(seed))
        have = 0
        waiting: list[tuple[int, bytes]] = []
        while have < len(data):
            have = mirror.request(wait=0)["have"].get(LOG, [0])[0]
            waiting.append((have, data[have : have + chance.randrange(1, 300)]))
            if len(waiting) > 2 or chance.random() < 0.5:
                offset, piece = waiting.pop(chance.randrange(len(waiting)))
                mirror.apply(*answer([(LOG, offset, piece)]))
        assert (mirror.root / LOG).read_bytes() == data


def test_a_gap_is_not_written(tmp_path: Path) -> None:
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 100, b"far ahead\n")]))
    assert not (mirror.root / LOG).exists()


def test_another_server_continues_where_this_one_was(tmp_path: Path) -> None:
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 0, b"x" * 1000)], {layout.ORDER: b'{"seq":1}'}))
    # Killed during an append, and while a record was replaced.
    with (mirror.root / LOG).open("ab") as file:
        file.write(b"y" * 10)
    (mirror.root / f"{layout.STATUS}.tmp").write_bytes(b'{"pha')
    again = make(tmp_path)
    assert not again.synced
    assert again.request(wait=0)["have"] == {LOG: [1010, courier_protocol.tag(b"x" * 246 + b"y" * 10)]}
    again.apply(*answer([(LOG, 1010, b"z")], {layout.STATUS: b"{}"}))
    assert (again.root / LOG).read_bytes() == b"x" * 1000 + b"y" * 10 + b"z"
    assert (again.root / layout.STATUS).read_bytes() == b"{}"


@pytest.mark.parametrize("other", [{"source": "another pod"}, {"boot_id": "another boot"}])
def test_a_mirror_that_may_be_wrong_is_dropped(tmp_path: Path, other: dict[str, str]) -> None:
    make(tmp_path).apply(*answer([(LOG, 0, b"one\n")], {layout.ORDER: b"{}"}))
    mirror = make(tmp_path, **other)
    assert mirror.request(wait=0)["have"] == {} and mirror.request(wait=0)["records"] == {}
    assert not (mirror.root / LOG).exists() and not (mirror.root / layout.ORDER).exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff"])
def test_a_mirror_of_an_unknown_source_is_dropped(tmp_path: Path, damage: bytes) -> None:
    make(tmp_path).apply(*answer([(LOG, 0, b"one\n")]))
    (tmp_path / "mirror" / ".mirror").write_bytes(damage)
    assert make(tmp_path).request(wait=0)["have"] == {}


def test_resets_and_removed_files(tmp_path: Path) -> None:
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 0, b"one\n"), (layout.JOURNAL, 0, b"{}\n")], {layout.STATUS: b"{}"}))
    mirror.apply(*answer([(LOG, 0, b"2\n")], resets=[LOG]))
    assert (mirror.root / LOG).read_bytes() == b"2\n"
    mirror.apply(*answer(gone=[LOG, layout.STATUS, layout.segment(77)]))
    assert not (mirror.root / LOG).exists() and not (mirror.root / layout.STATUS).exists()
    assert list(mirror.request(wait=0)["have"]) == [layout.JOURNAL]


def test_lines_arrive_before_the_entry_that_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = make(tmp_path)
    seen: list[str] = []
    real_append, real_replace = Mirror._append, Mirror._replace
    monkeypatch.setattr(
        Mirror, "_append", lambda self, path, *rest: seen.append(path) or real_append(self, path, *rest)
    )
    monkeypatch.setattr(
        Mirror, "_replace", lambda self, path, *rest: seen.append(path) or real_replace(self, path, *rest)
    )
    deltas = [(layout.JOURNAL, 0, b"j"), (LOG, 0, b"l"), ("metrics/1-1-a.jsonl", 0, b"m")]
    mirror.apply(*answer(deltas, {layout.STATUS: b"{}"}))
    assert seen == [LOG, "metrics/1-1-a.jsonl", layout.JOURNAL, layout.STATUS]


def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 0, b"one\n")]))
    real = os.pwrite
    calls = []

    def full(fd: int, data: bytes, at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError(28, "no space left on device")
        return real(fd, data[:2], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError):
            mirror.apply(*answer([(LOG, 4, b"two\n")]))
    assert mirror.request(wait=0)["have"] == {LOG: [6, courier_protocol.tag(b"one\ntw")]}
    mirror.apply(*answer([(LOG, 6, b"o\n")]))
    assert (mirror.root / LOG).read_bytes() == b"one\ntwo\n"


HOSTILE: list[tuple[dict[str, Any], bytes]] = [
    ({}, b""),
    ({"deltas": [["../evil", 0, 1]]}, b"x"),
    ({"deltas": [["/etc/evil", 0, 1]]}, b"x"),
    ({"deltas": [["log/../../evil", 0, 1]]}, b"x"),
    ({"deltas": [["metrics/../x.jsonl", 0, 1]]}, b"x"),
    ({"deltas": [[layout.STATUS, 0, 1]]}, b"x"),
    ({"deltas": [["secrets.json", 0, 1]]}, b"x"),
    ({"deltas": [[".mirror", 0, 1]]}, b"x"),
    ({"deltas": [[LOG, -1, 1]]}, b"x"),
    ({"deltas": [[LOG, 0, -1]]}, b""),
    ({"deltas": [[LOG, 1 << 62, 1]]}, b"x"),
    ({"deltas": [[LOG, 0, 2]]}, b"x"),
    ({"deltas": [[LOG, 0, 1]]}, b"xx"),
    ({"deltas": [[LOG, "0", 1]]}, b"x"),
    ({"deltas": [[LOG, 0]]}, b""),
    ({"deltas": {"a": 1}}, b""),
    ({"deltas": [[LOG, 0, 0]] * 100_000}, b""),
    ({"records": [["../evil", "", 1]]}, b"x"),
    ({"records": [[LOG, "", 1]]}, b"x"),
    ({"records": [["secrets.json", "", 1]]}, b"x"),
    (
        {"records": [[layout.STATUS, "", courier_protocol.LARGEST_RECORD + 1]]},
        b"x" * (courier_protocol.LARGEST_RECORD + 1),
    ),
    ({"gone": ["../evil"]}, b""),
    ({"gone": [".mirror"]}, b""),
    ({"gone": [7]}, b""),
    ({"gone": "all"}, b""),
    ({"resets": ["../evil"]}, b""),
    ({"resets": [layout.STATUS]}, b""),
]


@pytest.mark.parametrize(("header", "data"), HOSTILE)
def test_answers_that_no_courier_sends_are_refused(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    (tmp_path / "evil").write_bytes(b"untouched")
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 0, b"one\n")]))
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    whole = {"deltas": [], "records": [], "resets": [], "gone": [], **header} if header else {}
    with pytest.raises(Malformed):
        mirror.apply(whole, memoryview(data))
    assert {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_mirror_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "LARGEST_FILE", 1000)
    monkeypatch.setattr(mirror_module, "MOST_FILES", 20)
    mirror = make(tmp_path, limit=3000)
    mirror.apply(*answer([(LOG, 0, b"x" * 900)]))
    mirror.apply(*answer([(LOG, 900, b"x" * 101)]))
    assert mirror.request(wait=0)["have"][LOG] == [-1, ""], "it is not asked for any more"
    assert LOG in mirror.problem
    for number in range(1, 10):
        mirror.apply(*answer([(layout.segment(number), 0, b"x" * 500)]))
    assert sum(path.stat().st_size for path in mirror.root.rglob("*.log")) <= 3000
    mirror.apply(*answer([(layout.JOURNAL, 0, b"x" * 900)]))
    assert (mirror.root / layout.JOURNAL).stat().st_size == 900, "the journal is not crowded out"
    for number in range(50):
        mirror.apply(*answer([(f"metrics/1-{number}-a.jsonl", 0, b"x")]))
    assert len(list(mirror.root.rglob("*.*l*"))) <= 21
    mirror.apply(*answer(gone=[LOG]))
    assert LOG not in mirror.request(wait=0)["have"], "another file of that name may be taken"


def test_a_link_in_a_mirror_is_not_followed(tmp_path: Path) -> None:
    """Only the server writes there; a foreign link does no harm."""
    mirror = make(tmp_path)
    (tmp_path / "outside").write_bytes(b"safe")
    (mirror.root / LOG).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        mirror.apply(*answer([(LOG, 0, b"x")]))
    assert (tmp_path / "outside").read_bytes() == b"safe"


def test_dropping(tmp_path: Path) -> None:
    mirror = make(tmp_path)
    mirror.apply(*answer([(LOG, 0, b"one\n")]))
    mirror.drop()
    assert not mirror.root.exists()
