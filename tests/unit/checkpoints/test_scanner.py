"""When a checkpoint counts as complete, what is kept of it, and what survives the scanner's death."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.checkpoints import directory_watch, open_files, scan_state, snapshot, stager
from stoker.task import checkpoint_names
from support.checkpoints.scanning import Task, archive


class TestSigns:
    def test_quiet_for_some_seconds(self, task: Task) -> None:
        task.write("step-1.bin", b"one")
        task.poll()
        task.poll(2.9)
        assert task.names == []
        task.poll(0.2)
        assert [(r["name"], r["how"], r["step"]) for r in task.offered] == [("step-1.bin", "quiet", 1)]

    def test_every_write_restarts_the_wait(self, task: Task) -> None:
        for _ in range(4):
            with open(task.dir / "a.bin", "ab") as file:
                file.write(b"more")
            task.poll()
            task.poll(2.0)
        assert task.names == []
        task.poll(1.1)
        assert task.names == ["a.bin"]

    def test_not_while_a_process_has_it_open_for_writing(self, task: Task) -> None:
        code = "import sys; f = open(sys.argv[1], 'wb'); f.write(b'x'); f.flush(); print(flush=True); input()"
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(task.dir / "a.bin")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        task.pass_time(30)
        assert task.names == []
        writer.communicate(b"\n")
        task.pass_time(5)
        assert task.names == ["a.bin"]

    def test_not_while_it_is_mapped_for_writing(self, task: Task) -> None:
        path = task.write("a.bin", b"x" * 4096)
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 4096)
        task.pass_time(10)
        assert task.names == []
        mapped.close()
        task.pass_time(5)
        assert task.names == ["a.bin"]

    def test_an_open_reader_does_not_delay_it(self, task: Task) -> None:
        path = task.write("a.bin", b"x")
        with open(path, "rb"):
            task.pass_time(5)
        assert task.names == ["a.bin"]

    def test_renamed_into_place_counts_at_once(self, task: Task) -> None:
        task.rename("a.bin", b"one")
        task.poll()
        task.poll(0.3)
        assert task.hows == {"a.bin": "rename"}

    def test_renamed_from_another_directory(self, task: Task) -> None:
        outside = task.root / "elsewhere"
        outside.write_bytes(b"one")
        os.rename(outside, task.dir / "a.bin")
        task.poll()
        task.poll(0.3)
        assert task.hows == {"a.bin": "rename"}

    def test_a_renamed_directory(self, task: Task) -> None:
        task.write("step-5.tmp/deep/weights.bin", b"w")
        task.poll()
        os.rename(task.dir / "step-5.tmp", task.dir / "step-5")
        task.poll()
        task.poll(0.3)
        (record,) = task.offered
        assert (record["how"], record["step"]) == ("rename", 5)
        assert [file["path"] for file in record["files"]] == ["step-5/deep/weights.bin"]

    def test_a_directory_that_is_written_to_after_the_rename_is_incomplete(self, task: Task) -> None:
        task.write("step-5.tmp/a.bin", b"w")
        task.poll()
        os.rename(task.dir / "step-5.tmp", task.dir / "step-5")
        task.write("step-5/b.bin", b"w")
        task.poll()
        task.poll(0.3)
        assert task.names == []
        task.pass_time(4)
        (record,) = task.offered
        assert (record["how"], len(record["files"])) == ("quiet", 2)

    def test_a_file_renamed_while_open_is_incomplete(self, task: Task) -> None:
        with open(task.dir / "a.tmp", "wb") as file:
            file.write(b"half")
            file.flush()
            os.rename(task.dir / "a.tmp", task.dir / "a.bin")
            task.poll()
            task.poll(0.3)
            assert task.names == []
            task.scanner.finish(violent=True)
        assert task.names == []

    def test_a_declaration_of_the_sdk_wins(self, task: Task) -> None:
        task.rename("a-5.bin", b"one")
        task.poll()
        task.say("a-5.bin", step=7, loss=0.5)
        task.poll()
        (record,) = task.offered
        assert (record["how"], record["step"], record["metrics"]) == ("sdk", 7, {"loss": 0.5})
        task.pass_time(10)
        assert len(task.offered) == 1

    def test_a_late_declaration_is_awaited(self, task: Task) -> None:
        """On a busy machine, time passes between the rename by the SDK and its declaration."""
        task.rename("last.bin", b"state 1")
        task.say("last.bin", step=1)
        task.poll()
        task.rename("last.bin", b"state 2")
        task.poll(1.0)
        assert [record["step"] for record in task.offered] == [1]
        task.say("last.bin", step=2)
        task.poll()
        task.poll(1.0)
        assert [record["step"] for record in task.offered] == [1, 2]
        task.rename("last.bin", b"state 3")
        task.poll()
        task.poll(1.0)
        assert len(task.offered) == 2, "no step has been said"
        task.scanner.finish(violent=True)
        assert [(record["how"], record["step"]) for record in task.offered][-1] == ("rename", None)

    def test_a_declaration_belongs_to_one_rename(self, task: Task) -> None:
        task.rename("last.bin", b"state 1")
        task.poll()
        task.say("last.bin", step=1)
        task.poll()
        task.rename("last.bin", b"state 2")
        task.rename("last.bin", b"state 3")
        task.say("last.bin", step=2)
        task.poll(1.0)
        assert [record["step"] for record in task.offered] == [1], "the third has not been declared"
        task.say("last.bin", step=3)
        task.poll()
        task.poll(1.0)
        assert [record["step"] for record in task.offered] == [1, 3]

    def test_a_rename_and_its_declaration_between_two_reads_of_a_poll(
        self, task: Task, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task.rename("last.bin", b"state 1")
        task.say("last.bin", step=1)
        task.poll()
        watch = task.scanner._watch
        read = watch.read

        def meanwhile() -> list[directory_watch.DirectoryChange]:
            found = read()
            task.rename("last.bin", b"state 2")
            task.say("last.bin", step=2)
            monkeypatch.undo()
            return found

        monkeypatch.setattr(watch, "read", meanwhile)
        task.poll()
        task.scanner.finish(violent=False)
        assert [record["step"] for record in task.offered] == [1, 2]

    @pytest.mark.parametrize(
        "declared", [False, True], ids=["declared later", "declared by the end of the copy"]
    )
    def test_a_copy_of_a_later_version_has_its_declaration(
        self, task: Task, monkeypatch: pytest.MonkeyPatch, declared: bool
    ) -> None:
        """The next save may replace the file between the decision to copy it and the copy."""
        stage = stager._stage

        def after_the_next_save(*args: Any) -> stager.StagingOutcome:
            monkeypatch.undo()
            task.rename("last.bin", b"state 2")
            if declared:
                task.say("last.bin", step=2)
            return stage(*args)

        monkeypatch.setattr(stager, "_stage", after_the_next_save)
        task.rename("last.bin", b"state 1")
        task.say("last.bin", step=1)
        task.poll()
        task.poll(1.0)
        assert [record["step"] for record in task.offered] == ([2] if declared else [])
        if not declared:
            task.say("last.bin", step=2)
            task.poll()
            task.poll(1.0)
        assert [record["step"] for record in task.offered] == [2]
        (record,) = task.offered
        assert task.staged(record, "last.bin") == b"state 2"

    def test_a_missing_declaration_is_awaited_only_briefly(self, task: Task) -> None:
        task.rename("last.bin", b"state 1")
        task.poll()
        task.say("last.bin", step=1)
        task.poll()
        task.rename("last.bin", b"state 2")
        task.pass_time(4.0)
        assert [(record["how"], record["step"]) for record in task.offered] == [("sdk", 1), ("rename", None)]

    @pytest.mark.parametrize(
        "line", ['{"name": "../x"}', '{"name": 3}', "[]", "{", '{"name": ".x"}', '{"name": "no"}']
    )
    def test_false_declarations(self, task: Task, line: str) -> None:
        (task.root / "sdk" / "commits.jsonl").write_text(line + "\n", encoding="utf-8")
        task.pass_time(5)
        assert task.offered == []

    def test_an_always_overwritten_file_is_proven_by_its_format(self, task: Task) -> None:
        for number in range(6):
            task.write("last.pt", archive(str(number)))
            task.poll()
            task.poll(1.0)
        assert {record["how"] for record in task.offered} == {"verified"}
        assert len(task.offered) >= 5


class TestWhatCounts:
    @pytest.mark.parametrize(
        "name",
        ["a.tmp", "a.pt.part", "a.partial", "a.incomplete", ".hidden", "x.orbax-checkpoint-tmp-12", "tmp-checkpoint-5",
         "run.log", "curve.png", "events.out.tfevents.1", "checkpoint"],
    )  # fmt: skip
    def test_names_that_never_count(self, task: Task, name: str) -> None:
        task.write(name, b"one")
        task.write(f"{name}-dir.tmp/inside.bin", b"one")
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.offered == []

    @pytest.mark.parametrize("name", ["weights.csv", "state.toml", "state.yaml", "state.ini"])
    @pytest.mark.parametrize("violent", [True, False])
    def test_text_counts_when_it_was_renamed(self, task: Task, name: str, violent: bool) -> None:
        task.write(name, b"[written, in, place]\n")
        task.pass_time(5)
        assert task.offered == []
        task.rename(name, b"[renamed]\n")
        task.poll()
        task.restart()
        task.pass_time(5)
        task.scanner.finish(violent=violent)
        assert task.hows == {name: "rename"}
        task.write("other.csv", b"[written]\n")
        task.scanner.finish(violent=violent)
        assert task.names == [name]

    def test_renamed_text_beside_a_checkpoint_does_not_count(self, task: Task) -> None:
        task.rename("step-1.bin", b"weights")
        task.rename("settings.toml", b"[model]")
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.names == ["step-1.bin"]

    def test_empty_files_and_directories_do_not_count(self, task: Task) -> None:
        task.write("empty.bin", b"")
        (task.dir / "directory" / "deep").mkdir(parents=True)
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.offered == []

    def test_links_and_devices_are_not_followed(self, task: Task, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        task.write("step-1/weights.bin", b"w")
        os.symlink(secret, task.dir / "link.bin")
        os.symlink(secret, task.dir / "step-1" / "link.bin")
        os.symlink(tmp_path, task.dir / "all")
        os.mkfifo(task.dir / "pipe")
        os.mkfifo(task.dir / "step-1" / "pipe")
        task.pass_time(5)
        task.scanner.finish(violent=False)
        (record,) = task.offered
        assert [file["path"] for file in record["files"]] == ["step-1/weights.bin"]

    def test_a_directory_written_in_place(self, task: Task) -> None:
        for name in ("a.bin", "deep/b.bin", ".metadata", "c.bin.tmp", ".tmpQw3rTy"):
            task.write(f"checkpoint-500/{name}", name.encode())
            task.poll(1)
        task.pass_time(5)
        (record,) = task.offered
        names = [file["path"].split("/", 1)[1] for file in record["files"]]
        assert (record["name"], record["step"], names) == (
            "checkpoint-500",
            500,
            [".metadata", "a.bin", "deep/b.bin"],
        )

    def test_siblings_with_one_stem(self, task: Task) -> None:
        for name in ("model-00001-of-00002.bin", "model-00002-of-00002.bin", "model.bin.index.json"):
            task.write(name, b"{}")
        task.pass_time(5)
        (record,) = task.offered
        assert (record["name"], len(record["files"])) == ("model", 3)

    def test_tensorflow_waits_for_its_index(self, task: Task) -> None:
        task.write("ckpt-3.data-00000-of-00001", b"data")
        task.pass_time(10)
        task.scanner.finish(violent=False)
        assert task.offered == []

    def test_the_framework_finds_a_restored_checkpoint_again(self, task: Task) -> None:
        task.write("global_step7/weights.bin", b"w")
        task.write("latest", b"global_step6")
        task.pass_time(5)
        (record,) = task.offered
        assert task.staged(record, "latest") == b"global_step7"

    @pytest.mark.parametrize("name", ["latest", "checkpoint"])
    def test_a_directory_named_like_a_pointer_may_be_a_checkpoint(self, task: Task, name: str) -> None:
        """As with `save_pretrained(place / "latest")` or `torch.save(state, place / "checkpoint")`."""
        (task.dir / "making.tmp").mkdir()
        task.write("making.tmp/weights.bin", b"w")
        (task.dir / "making.tmp").rename(task.dir / name)
        task.pass_time(1)
        assert task.hows == {name: "rename"}
        task.write(f"{name}/more.bin", b"m")
        task.pass_time(5)
        assert [len(record["files"]) for record in task.offered] == [1, 2]

    @pytest.mark.parametrize("name", ["latest", "checkpoint"])
    def test_a_file_named_like_a_pointer_may_be_a_checkpoint(self, task: Task, name: str) -> None:
        task.write(name, archive())
        task.pass_time(5)
        task.restart()
        task.pass_time(5)
        assert task.names == [name]
        task.write(name, b"step-7")
        task.write("step-7.pt", archive())
        task.pass_time(5)
        assert task.names == [name, "step-7.pt"]

    def test_a_link_to_the_newest_checkpoint_does_not_count(self, task: Task) -> None:
        task.write("step-1/weights.bin", b"w")
        (task.dir / "latest").symlink_to("step-1")
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.names == ["step-1"]

    def test_a_module_called_tilde_is_part_of_its_checkpoint(self, task: Task) -> None:
        """haiku names parameters outside of any module `mlp/~/linear_0`."""
        for path in ("step-1/mlp/~/linear_0", "step-1/~draft", "step-1/draft~"):
            task.write(path, b"w")
        task.pass_time(5)
        (record,) = task.offered
        assert [file["path"] for file in record["files"]] == ["step-1/mlp/~/linear_0"]

    def test_json_beside_a_checkpoint_does_not_count(self, task: Task) -> None:
        task.write("config.json", b"{}")
        task.write("last.pt", archive())
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.names == ["last.pt"]

    def test_json_alone_is_a_checkpoint(self, task: Task) -> None:
        task.write("state.json", b'{"step": 3}')
        task.pass_time(5)
        assert task.names == ["state.json"]

    @pytest.mark.parametrize(
        ("name", "step"),
        [("step-100", 100), ("checkpoint-500", 500), ("epoch=3-step=400.ckpt", 400), ("ckpt-3", 3), ("model_000012.pt", 12),
         ("epoch_7.pt", 7), ("1200", 1200), ("iter_0000100", 100), ("last.pt", None), ("resnet50.pt", None),
         ("global_step12", 12), ("best-model.keras", None)],
    )  # fmt: skip
    def test_the_step_in_a_name(self, name: str, step: int | None) -> None:
        assert checkpoint_names.step_of(name) == step


class TestVersions:
    def test_an_overwritten_file_is_a_new_checkpoint_and_the_old_one_stays(self, task: Task) -> None:
        for text in (b"one", b"two"):
            task.write("last.bin", text)
            task.pass_time(5)
        one, two = task.offered
        assert one["number"] < two["number"]
        assert [task.staged(record, "last.bin") for record in (one, two)] == [b"one", b"two"]

    def test_a_file_that_is_never_quiet_is_copied_now_and_then(self, task: Task) -> None:
        for step in range(100):
            task.rename("last.bin", b"%d" % step)
            task.poll(0.05)
        assert 3 <= len(task.offered) <= 25

    def test_the_same_bytes_again_are_not_announced(self, task: Task) -> None:
        for _ in range(3):
            task.rename("last.bin", b"same")
            task.pass_time(5)
        task.scanner.finish(violent=False)
        assert len(task.offered) == 1

    def test_a_copy_is_no_hard_link(self, task: Task) -> None:
        path = task.write("last.bin", b"one")
        task.pass_time(5)
        with open(path, "r+b") as file:
            file.write(b"TWO")
        assert task.staged(task.offered[0], "last.bin") == b"one"

    def test_written_to_while_it_is_copied(self, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        path = task.write("last.bin", b"one")
        real = stager._copy

        def interfering(*args: Any) -> str:
            result = real(*args)
            with open(path, "r+b") as file:
                file.write(b"torn")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(stager, "_copy", interfering)
            task.poll(0.1)
            task.poll(3.1)
        assert task.offered == []
        patience: list[bool] = []
        stage = stager.stage
        monkeypatch.setattr(
            stager, "stage", lambda job, pause: patience.append(job.patient) or stage(job, pause)
        )
        task.pass_time(6)
        assert [task.staged(record, "last.bin") for record in task.offered] == [b"torn"]
        task.write("last.bin", b"whole")
        task.pass_time(20)
        assert not patience[0], "the one after a copy that came to nothing hurries"
        assert patience[-1]

    def test_replaced_or_deleted_while_it_is_copied_is_kept(
        self, task: Task, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = stager._copy

        def rotating(source: int, target: str, *rest: Any) -> str:
            if target.endswith("step-1.bin"):
                os.unlink(task.dir / "step-1.bin")
            return real(source, target, *rest)

        monkeypatch.setattr(stager, "_copy", rotating)
        task.rename("step-1.bin", b"one")
        task.poll()
        task.poll(0.3)
        assert task.names == ["step-1.bin"]

    def test_files_from_before_the_start_are_not_announced(self, tmp_path: Path) -> None:
        task = Task(tmp_path)
        task.write("last.bin", b"restored")
        task.write("step-1/a.bin", b"restored")
        task.begin()
        task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.offered == []
        task.begin()
        task.write("last.bin", b"changed")
        task.scanner.finish(violent=False)
        assert task.names == ["last.bin"]
        task.close()

    def test_another_generation_has_a_directory_of_its_own(self, task: Task) -> None:
        task.rename("last.bin", b"one")
        task.scanner.finish(violent=True)
        task.scanner.begin(2)
        (task.root / "checkpoints" / "2" / "last.bin").write_bytes(b"one")
        task.scanner.finish(violent=False)
        assert [(r["generation"], r["number"]) for r in task.offered] == [(1, 1), (2, 2)]


class TestDeath:
    def test_after_a_clean_exit_everything_counts_at_once(self, task: Task) -> None:
        task.write("a.bin", b"one")
        task.scanner.finish(violent=False)
        assert task.hows == {"a.bin": "quiet"}

    def test_after_a_violent_death_only_proven_files_count(self, task: Task) -> None:
        task.write("early.bin", b"raw")
        task.pass_time(5)
        task.rename("renamed.bin", b"raw")
        task.write("raw.bin", b"raw")
        task.write("whole.pt", archive())
        task.write("torn.pt", archive()[:-7])
        task.scanner.finish(violent=True)
        assert task.hows == {"early.bin": "quiet", "renamed.bin": "rename", "whole.pt": "verified"}
        reasons = {entry["name"]: entry["reason"] for entry in task.entries("rejected")}
        assert set(reasons) == {"raw.bin", "torn.pt"}
        assert "zip" in reasons["torn.pt"]

    def test_damaged_and_quiet_is_rejected_once(self, task: Task) -> None:
        for _ in range(3):
            task.write("torn.pt", archive()[:-7])
            task.pass_time(5)
        task.scanner.finish(violent=False)
        assert task.offered == []
        assert len(task.entries("rejected")) == 1

    def test_damaged_and_renamed_is_rejected(self, task: Task) -> None:
        task.rename("torn.pt", archive()[:-7])
        task.pass_time(1)
        assert (task.offered, len(task.entries("rejected"))) == ([], 1)

    def test_oldest_first(self, task: Task) -> None:
        for number, name in enumerate(["b.pt", "c.pt", "a.pt"]):
            os.utime(task.write(name, archive(name)), (number + 1, number + 1))
        task.scanner.finish(violent=True)
        assert task.names == ["b.pt", "c.pt", "a.pt"]


class TestScannerKilled:
    """A new scanner on the same directory, as in recovery."""

    def test_it_keeps_renamed_and_quiet_files(self, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(task.scanner, "_submit", lambda *args, **rest: None)
            task.write("quiet.bin", b"raw")
            task.poll()
            task.poll(4)
            task.rename("renamed.bin", b"raw")
            task.write("raw.bin", b"raw")
            task.poll()
        task.restart()
        task.scanner.finish(violent=True)
        assert task.hows == {"quiet.bin": "quiet", "renamed.bin": "rename"}

    def test_writes_after_the_rename_are_not_trusted(self, task: Task) -> None:
        path = task.rename("renamed.bin", b"raw")
        task.poll()
        with open(path, "ab") as file:
            file.write(b"more")
        task.restart()
        task.scanner.finish(violent=True)
        assert task.offered == []

    def test_staged_and_not_announced(self, task: Task) -> None:
        """Killed between the rename of a copy and its journal entry: it is announced once, also if the file
        is gone."""
        task.scanner._journal = lambda entry: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        path = task.rename("a.bin", b"one")
        task.poll()
        task.poll(0.3)
        path.unlink()
        assert task.offered == []
        for _ in range(2):
            task.restart()
            task.scanner.finish(violent=True)
            assert task.names == ["a.bin"]

    def test_killed_before_the_copy_had_its_name(self, task: Task) -> None:
        task.rename("a.bin", b"one")
        task.poll()
        task.poll(0.3)
        os.rename(task.root / "staged" / "000001", task.root / "staged" / "000001.tmp")
        (task.root / "journal.jsonl").unlink()
        task.restart()
        task.scanner.finish(violent=True)
        assert task.names == ["a.bin"]
        assert task.copies == [f"{task.offered[0]['number']:06d}"]

    def test_unknown_copies_are_removed(self, task: Task) -> None:
        for name in ("000001", "000002.tmp"):
            (task.root / "staged" / name).mkdir()
            (task.root / "staged" / name / "junk").write_bytes(b"junk")
        task.restart()
        assert task.copies == []

    def test_numbers_continue_after_the_copies_were_transferred(self, task: Task) -> None:
        task.rename("a.bin", b"one")
        task.poll()
        task.poll(0.3)
        record = json.loads((task.root / "journal.jsonl").read_text(encoding="utf-8"))
        shutil.rmtree(task.root / "staged" / "000001")
        task.restart()
        task.rename("b.bin", b"two")
        task.scanner.finish(violent=True)
        numbers = [entry["number"] for entry in task.entries("checkpoint")]
        assert numbers[0] == record["number"] < numbers[1]

    def test_after_a_power_cut_a_rename_proves_nothing(
        self, task: Task, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task.rename("a.bin", b"\0\0\0")
        task.rename("b.pt", archive())
        task.poll()
        monkeypatch.setattr(scan_state, "boot_id", lambda: "another boot")
        task.restart()
        task.scanner.finish(violent=True)
        assert task.hows == {"b.pt": "verified"}


class TestDisk:
    def test_full_while_copying(self, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        task.write("old.bin", b"old")
        task.pass_time(5)
        with monkeypatch.context() as patch:
            patch.setattr(stager, "HEADROOM", 1 << 62)
            task.write("new.bin", b"new")
            task.pass_time(40, step=5)
            assert task.names == ["old.bin"]
            (warning,) = task.entries("warning")
            assert str(task.root / "staged") in warning["message"]
            assert len(task.copies) == 1
        task.pass_time(40, step=5)
        assert task.names == ["old.bin", "new.bin"]

    def test_really_full(self, tmp_path: Path) -> None:
        if (
            os.geteuid() != 0
            or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]).returncode
        ):
            pytest.skip("only root may mount a small disk")
        try:
            task = Task(tmp_path / "task").begin()
            staging_headroom, stager.HEADROOM = stager.HEADROOM, 0
            try:
                task.write("a.bin", bytes(300 << 10))
                task.pass_time(5)
                task.write("b.bin", bytes(250 << 10))
                task.pass_time(5)
                assert task.names == ["a.bin"]
                assert "no room" in task.entries("warning")[0]["message"]
                os.unlink(task.dir / "a.bin")
                task.pass_time(40, step=5)
                assert task.names == ["a.bin", "b.bin"]
            finally:
                stager.HEADROOM = staging_headroom
                task.close()
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def test_the_journal_cannot_be_written_for_a_while(self, task: Task) -> None:
        kept, task.scanner._journal = (
            task.scanner._journal,
            lambda entry: (_ for _ in ()).throw(OSError(28, "full")),
        )
        for name in ("a.bin", "b.bin"):
            task.rename(name, name.encode())
            task.poll()
            task.poll(0.3)
        assert task.offered == []
        task.scanner._journal = kept
        task.poll(1)
        assert task.names == ["a.bin", "b.bin"]


class TestWithoutInotify:
    @pytest.fixture
    def blind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
        def refuse() -> None:
            raise OSError(errno.EMFILE, "the limit on inotify instances is reached")

        monkeypatch.setattr(directory_watch.inotify, "Inotify", refuse)
        task = Task(tmp_path / "task", blind=True).begin()
        yield task
        task.close()

    def test_quiet_is_found_by_looking(self, blind: Task) -> None:
        blind.write("a.bin", b"raw")
        blind.write("step-1/a.bin", b"raw")
        blind.pass_time(2)
        assert blind.names == []
        blind.pass_time(4)
        assert sorted(blind.names) == ["a.bin", "step-1"]

    def test_a_rename_is_seen_when_the_temporary_file_was(self, blind: Task) -> None:
        blind.write("a.bin.tmp", b"raw")
        blind.pass_time(2)
        os.rename(blind.dir / "a.bin.tmp", blind.dir / "a.bin")
        blind.pass_time(1.5)
        assert blind.hows == {"a.bin": "rename"}

    def test_overwritten_all_the_time(self, blind: Task) -> None:
        for number in range(8):
            blind.write("last.pt", archive(str(number)))
            blind.pass_time(1.0)
        assert {record["how"] for record in blind.offered} == {"verified"}

    def test_it_uses_inotify_again_as_soon_as_it_can(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                directory_watch.inotify, "Inotify", lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, ""))
            )
            task = Task(tmp_path, blind=True).begin()
            task.write("a.bin", b"raw")
            task.pass_time(2)
        deadline = time.monotonic() + 120
        while task.scanner._watch is not None and not task.scanner._watch.active:
            assert time.monotonic() < deadline
            task.pass_time(1)
        task.rename("b.bin", b"raw")
        task.poll()
        task.poll(0.3)
        task.pass_time(4)
        assert task.hows == {"a.bin": "quiet", "b.bin": "rename"}
        task.close()

    def test_death(self, blind: Task) -> None:
        blind.write("raw.bin", b"raw")
        blind.write("whole.pt", archive())
        blind.scanner.finish(violent=True)
        assert blind.hows == {"whole.pt": "verified"}


def test_the_directory_is_deleted_and_made_again(task: Task) -> None:
    """Some scripts begin with `shutil.rmtree(checkpoints); os.makedirs(checkpoints)`."""
    task.write("old.bin", b"one")
    task.poll()
    shutil.rmtree(task.dir)
    task.pass_time(2)
    task.dir.mkdir()
    task.pass_time(2)
    task.rename("new.bin", b"two")
    task.pass_time(2)
    task.write("last.bin", b"three")
    task.pass_time(6)
    assert sorted(task.names) == ["last.bin", "new.bin"]


def test_a_directory_of_too_many_files(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILES", 10)
    for number in range(11):
        task.write(f"dataset/{number}.bin", b"x")
    task.rename("last.bin", b"one")
    task.pass_time(10)
    task.scanner.finish(violent=False)
    assert task.names == ["last.bin"]
    (warning,) = task.entries("warning")
    assert "dataset is not kept: more than 10 files" in warning["message"]


def test_a_link_in_its_place_is_not_followed(task: Task, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key.bin").write_bytes(b"secret")
    task.dir.rmdir()
    os.symlink(tmp_path / "secrets", task.dir)
    task.pass_time(6)
    task.scanner.finish(violent=False)
    assert task.offered == []


def test_lost_events_are_recovered_by_a_full_scan(task: Task) -> None:
    assert task.scanner._watch is not None
    task.write("a.bin", b"one")
    task.scanner._watch.read()
    task.scanner._watch.overflowed = True
    task.pass_time(5)
    assert task.names == ["a.bin"]


def test_thousands_of_files_do_not_slow_it_down(tmp_path: Path) -> None:
    """One more checkpoint among many costs less than one look at all of them."""
    task = Task(tmp_path)
    for number in range(5000):
        (task.dir / f"step-{number}.pt").touch()
    start = time.perf_counter()
    task.begin()
    begin = time.perf_counter() - start
    took = []
    for number in range(5):
        task.rename(f"new-{number}.bin", str(number).encode())
        for after in (0, 0.3, 0.3):
            task.clock.now += after
            start = time.perf_counter()
            task.scanner.poll(task.clock.now)
            took.append(time.perf_counter() - start)
    task.poll(1)
    assert len(task.offered) == 5
    assert sorted(took)[len(took) // 2] < begin
    task.close()


def test_open_files_are_seen_without_leases_too(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open(path, "wb") as file:
        info = os.fstat(file.fileno())
        wanted = {(info.st_dev, info.st_ino)}
        assert open_files.seen_in_processes(wanted) == wanted
        file.truncate(4096)
    assert open_files.seen_in_processes(wanted) == set()
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    assert open_files.seen_in_processes(wanted) == wanted
    mapped.close()
    with open(path, "rb"):
        assert open_files.seen_in_processes(wanted) == set()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    task = Task(tmp_path).begin()
    task.write("a.pkl", pickle.dumps([1]))
    task.pass_time(5)
    task.scanner.finish(violent=True)
    task.close()
    assert len(os.listdir("/proc/self/fd")) == before
