"""A guard on a real folder, with a driven clock: what is put back, what is set aside, and what is left alone."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.checkpoints import stager
from stoker.launcher.folder import aftermath, decisions, guard_state, repair
from stoker.launcher.folder.guard import folder_of
from stoker.task import layout
from stoker.task.formats import TaskInfo
from support.folder.guarding import ENDS, Ends, Guarded, archive

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

ends = pytest.mark.parametrize("end", ENDS, ids=["killed", "launcher killed"])


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path / "task").begin()
    yield made
    made.close()


def paths(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["path"] for entry in entries]


class TestOneFile:
    @ends
    def test_torn_in_place_it_is_put_back(self, it: Guarded, end: Ends) -> None:
        whole = archive(b"one" * 1000)
        saved = it.save("checkpoints/last.pt", whole)
        written = saved.stat().st_mtime
        it.write("checkpoints/last.pt", archive(b"two" * 1000)[:2000])
        report = end(it)
        assert saved.read_bytes() == whole and saved.stat().st_mtime == written
        assert paths(report["put_back"]) == ["checkpoints/last.pt"] and report["torn"] == []
        assert report["put_back"][0]["written_at"] == pytest.approx(written)
        assert it.entries("folder") == [report]
        assert [
            entry["k"] for entry in map(json.loads, (it.root / "journal.jsonl").read_text().splitlines())
        ] == [
            "folder-plan",
            "folder",
        ]

    @ends
    def test_its_last_write_was_complete(self, it: Guarded, end: Ends) -> None:
        it.save("last.pt", archive(b"one"))
        it.write("last.pt", archive(b"two"))
        assert end(it) == {}
        assert (it.dir / "last.pt").read_bytes() == archive(b"two")

    @ends
    def test_a_format_that_proves_nothing_is_put_back_too(self, it: Guarded, end: Ends) -> None:
        it.save("state.bin", b"\1" * 5000)
        it.write("state.bin", b"\2" * 100)
        assert paths(end(it)["put_back"]) == ["state.bin"]
        assert (it.dir / "state.bin").read_bytes() == b"\1" * 5000

    @ends
    def test_what_has_settled_stays_whatever_its_format(self, it: Guarded, end: Ends) -> None:
        it.save("state.bin", b"\1" * 5000)
        it.save("state.bin", b"\2" * 100)
        assert end(it) == {}
        assert (it.dir / "state.bin").read_bytes() == b"\2" * 100

    @ends
    def test_torn_without_a_version_it_is_set_aside(self, it: Guarded, end: Ends) -> None:
        (it.dir / "snapshot.pt.torn").write_bytes(b"of an earlier death")
        torn = archive(b"one" * 1000)[:500]
        it.write("snapshot.pt", torn)
        assert end(it)["torn"] == ["snapshot.pt"]
        assert sorted(path.name for path in it.dir.iterdir()) == ["snapshot.pt.torn"]
        assert (it.dir / "snapshot.pt.torn").read_bytes() == torn

    @ends
    def test_emptied_but_not_yet_written(self, it: Guarded, end: Ends) -> None:
        it.save("last.pt", archive(b"one"))
        it.write("last.pt", b"")
        it.write("first.pt", b"")
        report = end(it)
        assert paths(report["put_back"]) == ["last.pt"] and report["torn"] == ["first.pt"]

    @ends
    def test_an_empty_file_that_is_no_state_stays(self, it: Guarded, end: Ends) -> None:
        """A mark that a script leaves, or a lock."""
        for name in ("done", "up-1-0", "train.lock", "log.csv"):
            it.write(name, b"")
        assert end(it) == {}
        assert {"done", "up-1-0", "train.lock", "log.csv"} <= set(os.listdir(it.dir))

    @ends
    def test_an_unknown_format_without_a_version_stays(self, it: Guarded, end: Ends) -> None:
        it.write("state.bin", b"\1" * 5000)
        assert end(it) == {}
        assert (it.dir / "state.bin").exists()

    @ends
    def test_known_by_its_first_bytes(self, it: Guarded, end: Ends) -> None:
        it.save("weights", archive(b"one"))
        it.save("notes", b"text " * 100)
        it.write("weights", archive(b"two" * 100)[:200])
        it.write("notes", b"te")
        assert paths(end(it)["put_back"]) == ["weights"]
        assert (it.dir / "notes").read_bytes() == b"te"

    @ends
    def test_deleted_and_written_anew(self, it: Guarded, end: Ends) -> None:
        it.rename("last.pt", archive(b"one"))
        it.pass_time(1)
        assert it.versions == ["000001/last.pt"]
        (it.dir / "last.pt").unlink()
        it.write("last.pt", b"PK\x03\x04")
        assert paths(end(it)["put_back"]) == ["last.pt"]
        assert (it.dir / "last.pt").read_bytes() == archive(b"one")

    def test_it_is_put_back_again_and_again(self, it: Guarded) -> None:
        it.save("last.pt", archive(b"one"))
        for _ in range(3):
            it.write("last.pt", b"PK\x03\x04")
            assert paths(it.killed()["put_back"]) == ["last.pt"]
            assert (it.dir / "last.pt").read_bytes() == archive(b"one")
            it.begin()
            it.pass_time(1)

    def test_the_first_write_of_an_attempt_is_torn(self, tmp_path: Path) -> None:
        """The folder was placed with a file of the attempt before; the task directory has no version of it."""
        it = Guarded(tmp_path / "task")
        (it.dir / "last.pt").write_bytes(archive(b"of attempt 1"))
        (it.dir / "epoch_1.pt").write_bytes(archive(b"once"))
        it.begin().pass_time(1)
        assert it.versions == ["000001/last.pt"]
        it.write("last.pt", b"PK\x03\x04")
        assert paths(it.killed()["put_back"]) == ["last.pt"]
        assert (it.dir / "last.pt").read_bytes() == archive(b"of attempt 1")
        it.close()

    def test_a_number_in_the_name_means_no_copy(self, it: Guarded) -> None:
        it.save("epoch_3.pt", archive(b"three"))
        assert it.versions == []
        it.write("epoch_4.pt", archive(b"four")[:30])
        assert it.killed()["torn"] == ["epoch_4.pt"]

    def test_one_process_of_the_body_died_long_before_the_others(self, it: Guarded) -> None:
        """The torn file was closed, quiet, and the body lived on: it is no version, and does not count as settled."""
        it.save("last.pt", archive(b"one"))
        it.save("last.pt", archive(b"two" * 1000)[:2000], seconds=10)
        it.save("first.pt", archive(b"two" * 1000)[:2000], seconds=10)
        report = it.killed()
        assert paths(report["put_back"]) == ["last.pt"] and report["torn"] == ["first.pt"]
        assert (it.dir / "last.pt").read_bytes() == archive(b"one")

    def test_while_a_process_has_it_open_nothing_settles(self, it: Guarded) -> None:
        with open(it.dir / "state.bin", "wb") as file:
            file.write(b"half")
            file.flush()
            it.pass_time(20, 1.0)
            assert it.versions == []
        it.pass_time(2)
        assert it.versions == ["000001/state.bin"]

    def test_a_file_that_another_task_is_writing_is_left_alone(self, it: Guarded) -> None:
        it.save("last.pt", archive(b"one"))
        with open(it.dir / "last.pt", "wb") as file:
            file.write(b"PK\x03\x04")
            file.flush()
            assert it.killed() == {}


class TestRenamed:
    @ends
    def test_it_is_never_touched(self, it: Guarded, end: Ends) -> None:
        path = it.rename("last.pt", archive(b"one")[:40])  # not even if it is damaged when it arrives
        path = it.rename("state.bin", b"one")
        it.pass_time(1)
        it.rename("state.bin", b"two")
        inode = path.stat().st_ino
        report = end(it)
        assert paths(report.get("put_back", [])) == []
        assert path.read_bytes() == b"two" and path.stat().st_ino == inode

    def test_its_version_is_a_link_and_the_one_before_goes(self, it: Guarded) -> None:
        for number in range(5):
            path = it.rename("state.bin", b"%d" % number * 1000)
            it.pass_time(1)
            assert len(it.versions) == 1 and path.stat().st_nlink == 2

    def test_a_later_write_in_place_makes_a_copy(self, it: Guarded) -> None:
        it.rename("state.bin", b"one")
        it.pass_time(1)
        it.save("state.bin", b"two", seconds=5)
        it.write("state.bin", b"t")
        assert paths(it.killed()["put_back"]) == ["state.bin"]
        assert (it.dir / "state.bin").read_bytes() == b"two"


class TestSeveralFiles:
    FILES = ("model.safetensors", "optimizer.bin", "random_states_0.pkl")

    def save(self, it: Guarded, content: bytes, count: int = 3) -> None:
        for name in self.FILES[:count]:
            it.write(
                f"state/{name}", content * 100 if name != "random_states_0.pkl" else pickle.dumps(content)
            )
            it.pass_time(0.5)

    def content(self, it: Guarded) -> list[bytes]:
        return [(it.dir / "state" / name).read_bytes() for name in self.FILES]

    @ends
    def test_they_are_put_back_as_a_whole(self, it: Guarded, end: Ends) -> None:
        it.write("state/train.log", b"line 1\n")
        self.save(it, b"one")
        it.pass_time(5)
        before = self.content(it)
        self.save(it, b"two", 1)  # whole by itself, but of another save than the others
        it.write("state/train.log", b"line 1\nline 2\n")
        report = end(it)
        assert paths(report["put_back"]) == ["state"] and report["torn"] == []
        assert self.content(it) == before
        assert (it.dir / "state/train.log").read_bytes() == b"line 1\nline 2\n"

    def test_files_that_did_not_change_are_not_copied_again(self, it: Guarded) -> None:
        self.save(it, b"one")
        it.pass_time(5)
        it.save("state/model.safetensors", b"two" * 100, seconds=5)
        versions = sorted(path for path in (it.root / "versions").iterdir() if path.is_dir())[-2:]
        first, second = [
            [(version / "state" / name).stat().st_ino for name in self.FILES] for version in versions
        ]
        assert first[0] != second[0] and first[1:] == second[1:]

    @ends
    def test_a_numbered_directory_that_is_half_written_is_set_aside(self, it: Guarded, end: Ends) -> None:
        it.write("out/checkpoint-10/model.safetensors", b"ten" * 100)
        it.pass_time(5)
        it.write("out/checkpoint-20/model.safetensors", b"twenty" * 100)
        it.pass_time(1)
        assert end(it)["torn"] == ["out/checkpoint-20"]
        assert sorted(path.name for path in (it.dir / "out").iterdir()) == [
            "checkpoint-10",
            "checkpoint-20.torn",
        ]

    @ends
    def test_a_numbered_directory_that_was_there_before_is_not(self, it: Guarded, end: Ends) -> None:
        it.guard.finish(False)
        it.write("step1/config.bin", b"work of the user")
        it.begin()
        it.write("step1/cache.bin", b"half")
        it.write("step2/table.parquet", b"half")
        it.write("step3/what.dat", b"half")
        assert end(it) == {}

    @ends
    def test_a_numbered_directory_that_was_renamed_into_place_is_complete(
        self, it: Guarded, end: Ends
    ) -> None:
        it.write("checkpoint-10.part/model.safetensors", b"ten" * 100)
        it.write("checkpoint-10.part/optimizer.pt", b"ten" * 100)
        (it.dir / "checkpoint-10.part").rename(it.dir / "checkpoint-10")
        it.poll()
        it.pass_time(0.3)
        assert end(it) == {}


@ends
def test_a_log_keeps_its_last_line(it: Guarded, end: Ends) -> None:
    it.write("train.log", b"line 1\n")
    it.write("log.json", b'{"step": 1}\n{"step": 2}\n')
    it.write("log.jsonl", b'{"step": 1}\n')
    it.write("loss.csv", b"1,2\n")
    it.pass_time(5)
    for name, more in (
        ("train.log", b"li"),
        ("log.json", b'{"st'),
        ("log.jsonl", b'{"s'),
        ("loss.csv", b"3"),
    ):
        with open(it.dir / name, "ab") as file:
            file.write(more)
    it.newer()
    it.poll()
    before = {path.name: path.read_bytes() for path in it.dir.iterdir()}
    assert it.versions == []
    assert end(it) == {}
    assert {path.name: path.read_bytes() for path in it.dir.iterdir()} == before


def test_after_an_ordinary_end_nothing_is_touched(it: Guarded) -> None:
    it.save("last.pt", archive(b"one"))
    torn = it.write("last.pt", b"PK\x03\x04").read_bytes()
    assert it.guard.finish(False) is None
    assert (it.dir / "last.pt").read_bytes() == torn
    assert it.entries("folder") == []


def test_after_an_error_what_is_proven_damaged_is_put_back(it: Guarded) -> None:
    it.save("last.pt", archive(b"one"))
    it.save("state.bin", b"one")
    it.write("last.pt", b"PK\x03\x04")
    it.write("state.bin", b"two")
    report = it.guard.finish(False, failed=True)
    assert report is not None and paths(report["put_back"]) == ["last.pt"]
    assert (it.dir / "state.bin").read_bytes() == b"two"


class TestLimits:
    def test_rewriting_for_days_does_not_fill_the_disk(self, it: Guarded) -> None:
        for number in range(200):
            it.save("last.pt", archive(b"%d" % number * 100), seconds=1.0)
            assert len(it.versions) <= decisions.KEPT
        assert len(it.versions) == decisions.KEPT
        it.write("last.pt", b"PK\x03\x04")
        it.killed()
        assert (it.dir / "last.pt").read_bytes() == archive(b"199" * 100)

    def test_its_record_stays_small(self, it: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard_state, "_LARGEST", 4000)
        for number in range(100):
            it.save("last.pt", b"%d" % number * 100, seconds=0.8)
        assert (it.root / layout.GUARD).stat().st_size < 6000
        it.write("last.pt", b"half")
        assert paths(it.launcher_killed()["put_back"]) == ["last.pt"]

    def test_a_full_disk_is_said_once_and_harms_nothing(
        self, it: Guarded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it.save("last.pt", b"one" * 100)

        def full(job: Any, signature: Any) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(stager, "_check_room", full)
        for number in range(5):
            it.save("last.pt", b"%d" % number * 300, seconds=40)
        assert [entry["k"] for entry in it.entries("warning")] == ["warning"]
        assert "last.pt" in it.entries("warning")[0]["message"]
        it.write("last.pt", b"t")
        assert paths(it.killed()["put_back"]) == ["last.pt"]
        assert (it.dir / "last.pt").read_bytes() == b"one" * 100

    def test_with_little_room_the_older_version_goes_first(
        self, it: Guarded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it.save("last.pt", b"one" * 100)
        it.save("last.pt", b"two" * 100)
        assert len(it.versions) == 2

        def full(job: Any, signature: Any) -> None:
            if len(it.versions) > 1:
                raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(stager, "_check_room", full)
        it.save("last.pt", b"three" * 100, seconds=5)
        assert it.entries("warning") == []
        it.write("last.pt", b"t")
        it.killed()
        assert (it.dir / "last.pt").read_bytes() == b"three" * 100

    def test_a_data_set_that_is_written_gets_few_versions(self, it: Guarded) -> None:
        for number in range(60):
            it.write(f"data/{number:x}q.npy", b"\x93NUMPY")
        it.pass_time(20)
        assert len(it.versions) <= decisions.CROWD

    def test_the_entry_names_twenty(self, it: Guarded) -> None:
        for number in range(25):
            it.write(f"{chr(97 + number)}.pt", b"PK\x03\x04")
        assert len(it.killed()["torn"]) == aftermath.NAMED
        assert len(list(it.dir.glob("*.torn"))) == 25


class TestSight:
    @pytest.mark.parametrize("watches", [0, 1])
    def test_without_watches_the_folder_is_scanned(self, tmp_path: Path, watches: int) -> None:
        it = Guarded(tmp_path / "task", watches=watches)
        it.generation = 1
        it.guard.begin(1)
        it.newer()
        it.save("a/last.bin", b"one" * 100, seconds=10)
        it.save("a/last.bin", b"two" * 100, seconds=10)
        it.write("a/last.bin", b"t")
        assert paths(it.killed()["put_back"]) == ["a/last.bin"]
        assert (it.dir / "a/last.bin").read_bytes() == b"two" * 100
        it.close()

    def test_events_that_the_kernel_dropped_are_made_up_for(self, it: Guarded) -> None:
        it.save("last.bin", b"one" * 100)
        watch = it.guard._watch
        assert watch is not None
        it.write("last.bin", b"two" * 100)
        watch.read()
        watch.overflowed = True
        it.pass_time(5)
        it.write("last.bin", b"t")
        it.killed()
        assert (it.dir / "last.bin").read_bytes() == b"two" * 100

    def test_a_directory_that_is_renamed_is_watched_under_its_new_name(self, it: Guarded) -> None:
        it.save("old/in/last.bin", b"one")
        (it.dir / "old").rename(it.dir / "new")
        it.pass_time(1)
        it.save("new/in/last.bin", b"two" * 100)
        it.write("new/in/last.bin", b"t")
        assert paths(it.killed()["put_back"]) == ["new/in/last.bin"]
        assert (it.dir / "new/in/last.bin").read_bytes() == b"two" * 100

    def test_caches_are_not_watched(self, it: Guarded) -> None:
        it.write(".cache/hub/last.bin", b"one")
        it.write("a/__pycache__/last.bin", b"one")
        it.pass_time(5)
        assert it.versions == []
        assert it.guard._watch is not None and set(it.guard._watch._watches) == {"", "a"}

    def test_nothing_happens_while_nothing_is_written(self, it: Guarded) -> None:
        assert it.poll() is None
        it.save("last.bin", b"one")
        assert it.poll() is None
        with open(it.dir / "train.log", "ab") as file:
            it.pass_time(1)
            for _ in range(100):
                file.write(b"line\n")
                file.flush()
            assert it.guard._watch is not None and it.guard._watch.read() == []


class TestLinks:
    @ends
    def test_nothing_outside_of_the_folder_is_touched(self, it: Guarded, end: Ends) -> None:
        outside = it.root / "outside"
        outside.mkdir()
        (outside / "last.pt").write_bytes(b"PK\x03\x04")
        (it.dir / "linked").symlink_to(outside)
        (it.dir / "last.pt").symlink_to(outside / "last.pt")
        it.pass_time(5)
        (outside / "last.pt").write_bytes(b"PK\x03\x04 torn")
        assert end(it) == {}
        assert sorted(path.name for path in outside.iterdir()) == ["last.pt"]

    @ends
    def test_a_directory_that_was_replaced_by_a_link(self, it: Guarded, end: Ends) -> None:
        it.save("sub/last.pt", archive(b"one"))
        outside = it.root / "outside"
        (it.dir / "sub").rename(outside)
        (outside / "last.pt").write_bytes(b"PK\x03\x04")
        (it.dir / "sub").symlink_to(outside)
        assert end(it) == {}
        assert (outside / "last.pt").read_bytes() == b"PK\x03\x04"

    def test_records_that_user_code_has_written_lead_nowhere(self, it: Guarded) -> None:
        it.save("last.pt", archive(b"one"))
        (it.root / "victim.pt").write_bytes(b"whole")
        plan = {
            "k": "folder-plan",
            "generation": 1,
            "put_back": [{"path": "../victim.pt", "written_at": 1.0}, 7],
        }
        it.journal({**plan, "torn": ["../victim.pt", "..", "", "/etc", 5]})
        record = json.loads((it.root / layout.GUARD).read_text().splitlines()[-1])
        assert record["k"] == "version"
        files = [["../../victim.pt", *record["files"][0][1:]]]
        with open(it.root / layout.GUARD, "a") as file:
            file.write(json.dumps({**record, "number": 9, "path": "../victim.pt", "files": files}) + "\n")
            file.write(json.dumps({"k": "version", "number": 10, "path": 3, "files": "x"}) + "\n")
        assert it.launcher_killed()["put_back"] == []
        assert (it.root / "victim.pt").read_bytes() == b"whole"
        assert not list(it.root.rglob("*.torn"))


class TestCrashes:
    @pytest.mark.parametrize("step", ["put_back", "set_aside"])
    def test_a_launcher_that_dies_while_it_repairs(
        self, it: Guarded, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it.save("last.pt", archive(b"one"))
        it.write("last.pt", b"PK\x03\x04")
        it.write("first.pt", b"PK\x03\x04")
        real = getattr(repair, step)

        def dies(*args: Any) -> None:
            real(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(repair, step, dies)
            with pytest.raises(KeyboardInterrupt):
                it.killed()
        assert it.entries("folder") == []
        report = it.launcher_killed()
        assert paths(report["put_back"]) == ["last.pt"] and report["torn"] == ["first.pt"]
        assert (it.dir / "last.pt").read_bytes() == archive(b"one")
        assert (it.dir / "first.pt.torn").exists() and not (it.dir / "first.pt").exists()
        assert it.launcher_killed() == {} and len(it.entries("folder")) == 1

    def test_a_generation_that_has_ended_is_not_repaired_again(self, it: Guarded) -> None:
        it.save("last.pt", archive(b"one"))
        assert it.killed() == {}
        it.write("last.pt", b"PK\x03\x04")  # not by the body
        assert it.launcher_killed() == {}

    def test_after_a_restart_of_the_machine_only_formats_are_trusted(
        self, it: Guarded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it.save("last.pt", archive(b"one"))
        it.save("state.bin", b"one")
        it.write("last.pt", b"PK\x03\x04")
        it.write("state.bin", b"o")
        monkeypatch.setattr(guard_state, "boot_id", lambda: "another")
        assert paths(it.launcher_killed()["put_back"]) == ["last.pt"]
        assert (it.dir / "state.bin").read_bytes() == b"o"

    def test_a_version_that_was_changed_does_not_count(self, it: Guarded) -> None:
        it.save("last.pt", archive(b"one"))
        it.save("last.pt", archive(b"two"))
        newest = it.root / "versions" / it.versions[-1]
        newest.write_bytes(b"x")
        it.write("last.pt", b"PK\x03\x04")
        it.killed()
        assert (it.dir / "last.pt").read_bytes() == archive(b"one")


def test_without_links_it_is_copied_back(it: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    it.save("last.pt", archive(b"one"))
    it.write("last.pt", b"PK\x03\x04")

    def refused(*args: Any, **more: Any) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert paths(it.killed()["put_back"]) == ["last.pt"]
    assert (it.dir / "last.pt").read_bytes() == archive(b"one")


def test_which_folder_a_task_guards() -> None:
    def info(**more: Any) -> TaskInfo:
        return TaskInfo("r", 1, "worker-0", **more)

    assert folder_of("/t/r/1/worker-0", info()) is None
    assert folder_of("/t/r/1/worker-0", info(guards=True)) == "/t/r/1/worker-0/code"
    assert folder_of("/t/r/1/worker-0", info(guards=True, common="/t/r/1/.common")) == "/t/r/1/.common/code"
    assert folder_of("/t/r/1/worker-0", info(guards=True, common="/home/victim")) is None
