"""Requirements of every kind of task directory, as a pytest class: subclass `TaskDirSuite`, give it `reach`, and run it.

    class TestMine(TaskDirSuite):
        @contextmanager
        def reach(self, root, scratch): yield MyTaskDir(...)

The suite writes into the directory itself, as a launcher and training code do, and reads it through the tested
implementation.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from stoker.blobs import BlobStore
from stoker.errors import BlobDamaged, NotFound, SpecError, TooLarge
from stoker.launcher.journal import Journal
from stoker.spec.kept_files import KeepRules
from stoker.spec.tree import Tree, TreeFile
from stoker.task import formats, layout
from stoker.task.directory import TaskDir
from stoker.task.local_directory import UnsafePath
from stoker.transfer import bring_code, bring_outputs, carry_checkpoint, carry_outputs, restore_checkpoint
from stoker.transfer.folder import KeptFolder, Span, carry_folder, folder_tree

WAIT = 60.0
"""A limit for broken implementations, not a measure of good ones."""
SECRET = b"not readable through a task directory"


def tree_of(blobs: BlobStore, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    """A stored tree. Names that end in `.sh` are executable."""
    entries = [
        TreeFile(path, *blobs.put_stream([data]), 0o755 if path.endswith(".sh") else 0o644)
        for path, data in files.items()
    ]
    entries += [TreeFile(path, link=target) for path, target in (links or {}).items()]
    return blobs.put_tree(Tree.of(entries))


def contents(root: Path) -> dict[str, bytes | str]:
    """The files and links below a directory: bytes of files, targets of links as text."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


class TaskDirSuite:
    """Each test has its own directory, as an engine makes it."""

    def reach(self, root: Path, scratch: Path) -> AbstractContextManager[TaskDir]:
        """The implementation under test on the directory `root`. `scratch`: a directory for its own files."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.tmp = tmp_path
        self.root = tmp_path / "task ü"
        self.root.mkdir()
        for name in layout.DIRECTORIES:
            (self.root / name).mkdir()
        info = formats.TaskInfo(run="digits-7f3k", attempt=1, task="worker-0")
        formats.write_json(str(self.root / layout.TASK), info.to_json())
        self.blobs = BlobStore(tmp_path / "blobs")
        with self.reach(self.root, tmp_path / "scratch") as self.dir:
            yield

    def arrive(self) -> None:
        """Waits until everything that is there now can be read."""
        assert self.dir.catch_up(WAIT)

    def write(self, path: str, data: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def append(self, path: str, data: bytes) -> None:
        with (self.root / path).open("ab") as file:
            file.write(data)

    def stage(self, files: dict[str, bytes], number: int = 1) -> formats.StagedCheckpoint:
        listed = []
        for path, data in files.items():
            self.write(f"{layout.staged(number)}/{path}", data)
            sha = hashlib.sha256(data).hexdigest()
            listed.append({"path": path, "size": len(data), "sha256": sha, "mode": 0o600})
        return formats.StagedCheckpoint(number=number, generation=1, name="step-1", how="sdk", files=listed)

    def files(self, digest: str) -> dict[str, bytes | str]:
        """The content of a stored tree."""
        tree = self.blobs.tree(digest)
        return {
            file.path: file.link if file.link is not None else self.blobs.path(file.sha256).read_bytes()
            for file in tree.files
        }

    # -- orders and records ----------------------------------------------------------------------------------

    def test_order_round_trip(self) -> None:
        order = formats.Order(
            seq=1, generation=2, verb="run", argv=["python", "träin.py"], env={"A": "b\n"}, grace=7.5
        )
        self.dir.write_order(order)
        assert self.dir.order() == order
        assert formats.Order.from_json(_json(self.root / layout.ORDER)) == order
        self.arrive()
        assert self.dir.order() == order

    def test_the_newest_order_counts(self) -> None:
        for seq, verb in enumerate(("run", "stop", "release"), 1):
            self.dir.write_order(formats.Order(seq=seq, generation=1, verb=verb))
        self.arrive()
        order = self.dir.order()
        assert order is not None and (order.seq, order.verb) == (3, "release")
        assert stat.S_IMODE((self.root / layout.ORDER).stat().st_mode) == 0o600

    def test_an_order_replaces_a_link(self) -> None:
        (self.tmp / "outside").write_bytes(SECRET)
        (self.root / layout.ORDER).symlink_to(self.tmp / "outside")
        self.dir.write_order(formats.Order(seq=1, generation=1, verb="run"))
        assert (self.tmp / "outside").read_bytes() == SECRET
        assert not (self.root / layout.ORDER).is_symlink()

    def test_info_and_status(self) -> None:
        self.arrive()
        info = self.dir.info()
        assert info is not None and info.run == "digits-7f3k"
        assert self.dir.status() is None and self.dir.order() is None
        for phase in ("running", "ended"):
            formats.write_json(str(self.root / layout.STATUS), formats.Status(phase=phase, pid=7).to_json())
            self.arrive()
            status = self.dir.status()
            assert status is not None and (status.phase, status.pid) == (phase, 7)

    def test_an_invalid_record_reads_as_absent(self) -> None:
        for spoiled in (b"{", b"[1]", b'{"phase": 7}', b"\xff" * 100, b"[" * 100_000):
            self.write(layout.STATUS, spoiled)
            self.arrive()
            assert self.dir.status() is None

    def test_exists(self) -> None:
        self.arrive()
        assert self.dir.exists()

    # -- growing files ---------------------------------------------------------------------------------------

    def test_the_journal_is_read_from_the_last_offset(self) -> None:
        self.write(layout.JOURNAL, b'{"k":"one"}\n{"k":"two"}\n{"k":"th')
        self.arrive()
        entries, offset = self.dir.journal()
        assert [entry["k"] for entry in entries] == ["one", "two"]
        assert self.dir.journal(offset) == ([], offset)
        self.append(layout.JOURNAL, b'ree"}\nnot json\n{"k":"four"}\n')
        self.arrive()
        entries, offset = self.dir.journal(offset)
        assert [entry["k"] for entry in entries] == ["three", "four"]
        assert offset == self.dir.size(layout.JOURNAL) == (self.root / layout.JOURNAL).stat().st_size

    def test_a_truncated_line_is_not_read(self) -> None:
        """A line that did not fit on the disk is truncated, and another one is written in its place."""
        self.write(layout.JOURNAL, b'{"k":"one"}\n{"k":"a long one that does not f')
        self.arrive()
        os.truncate(self.root / layout.JOURNAL, 12)
        self.append(layout.JOURNAL, b'{"k":"two"}\n{"k":"three"}\n{"k":"four"}\n')
        self.arrive()
        assert [entry["k"] for entry in self.dir.journal()[0]] == ["one", "two", "three", "four"]

    def test_a_file_that_became_shorter_is_shorter(self) -> None:
        self.write(layout.segment(0), b"o 1 a line\n" * 100)
        self.arrive()
        self.write(layout.segment(0), b"o 2 another\n")
        self.arrive()
        assert self.dir.read(layout.segment(0)) == b"o 2 another\n"

    def test_metrics_and_logs_are_listed_and_read(self) -> None:
        for name in ("1-10-aa.jsonl", "1-11-bb.jsonl", "2-10-cc.jsonl"):
            self.write(f"{layout.METRICS}/{name}", b'{"step":1}\n')
        for number in (0, 1, 12):
            self.write(layout.segment(number), b"o 1 %d\n" % number)
        self.arrive()
        assert self.dir.list(layout.METRICS) == ["1-10-aa.jsonl", "1-11-bb.jsonl", "2-10-cc.jsonl"]
        assert self.dir.list(layout.LOG) == ["000000.log", "000001.log", "000012.log"]
        assert self.dir.read(layout.segment(12), 2, 3) == b"1 1"
        assert self.dir.lines(f"{layout.METRICS}/1-10-aa.jsonl", 0) == ([{"step": 1}], 11)
        assert self.dir.size(layout.segment(1)) == 6

    def test_dropped_segments_are_not_listed(self) -> None:
        for number in range(5):
            self.write(layout.segment(number), b"o 1 %d\n" % number)
        self.arrive()
        for number in (1, 2):
            (self.root / layout.segment(number)).unlink()
        self.arrive()
        assert self.dir.list(layout.LOG) == ["000000.log", "000003.log", "000004.log"]

    def test_a_large_amount_at_once(self) -> None:
        """More than fits into one answer. Every line of the log comes before the journal's entry."""
        line = b"o 1700000000000 " + b"x" * 1000 + b"\n"
        for number in range(4):
            self.write(layout.segment(number), line * 4000)
        self.write(f"{layout.METRICS}/1-1-a.jsonl", b'{"step":1}\n' * 200_000)
        self.write(layout.JOURNAL, b'{"k":"ended"}\n')
        self.arrive()
        assert self.dir.journal()[0] == [{"k": "ended"}]
        assert [self.dir.size(layout.segment(number)) for number in range(4)] == [len(line) * 4000] * 4
        assert self.dir.read(layout.segment(3), len(line) * 3999, 1 << 20) == line
        assert self.dir.size(f"{layout.METRICS}/1-1-a.jsonl") == 11 * 200_000

    def test_missing_files_are_empty(self) -> None:
        self.arrive()
        assert self.dir.read("log/000099.log") == b""
        assert self.dir.size("log/000099.log") == 0
        assert self.dir.list("nothing") == []
        assert self.dir.journal() == ([], 0)

    # -- hostile directories ---------------------------------------------------------------------------------

    def test_links_are_not_followed(self) -> None:
        outside = self.tmp / "outside"
        outside.mkdir()
        (outside / "000000.log").write_bytes(SECRET)
        (outside / "1-1-a.jsonl").write_bytes(b'{"secret":1}\n')
        (outside / "status").write_bytes(b'{"phase":"secret"}')
        (self.root / layout.STATUS).symlink_to(outside / "status")
        (self.root / layout.JOURNAL).symlink_to(outside / "1-1-a.jsonl")
        (self.root / layout.LOG).rmdir()
        (self.root / layout.LOG).symlink_to(outside)
        (self.root / layout.METRICS / "1-1-a.jsonl").symlink_to(outside / "1-1-a.jsonl")
        self.arrive()
        assert self.dir.status() is None
        for path in (layout.JOURNAL, layout.segment(0), f"{layout.METRICS}/1-1-a.jsonl"):
            with suppress(UnsafePath):
                assert self.dir.read(path) == b""
        with suppress(UnsafePath):
            assert self.dir.list(layout.LOG) == []

    def test_pipes_and_directories_do_not_block(self) -> None:
        os.mkfifo(self.root / layout.STATUS)
        (self.root / layout.JOURNAL).mkdir()
        os.mkfifo(self.root / layout.segment(0))
        self.arrive()
        assert self.dir.status() is None
        for path in (layout.JOURNAL, layout.segment(0)):
            with suppress(UnsafePath):
                assert self.dir.read(path) == b""

    def test_paths_do_not_leave(self) -> None:
        self.arrive()
        (self.tmp / "outside").write_bytes(SECRET)
        for path in ("../outside", "log/../../outside", "..", ".", ""):
            with pytest.raises(UnsafePath):
                self.dir.read(path)
        assert self.dir.read(str(self.tmp / "outside")) == b""

    # -- placing trees ---------------------------------------------------------------------------------------

    def test_code_is_brought_once(self) -> None:
        files: dict[str, bytes] = {
            "train.py": b"print()",
            "run.sh": b"#!/bin/sh\n",
            "pkg/__init__.py": b"",
            "pkg/däta.bin": os.urandom(3 << 20),
            "again.py": b"print()",
        }
        digest = tree_of(self.blobs, files, {"link.py": "train.py", "pkg/up": "../run.sh"})
        bring_code(self.blobs, digest, self.dir)
        code = self.root / layout.CODE
        assert contents(code) == {**files, "link.py": "train.py", "pkg/up": "../run.sh"}
        assert stat.S_IMODE((code / "run.sh").stat().st_mode) & 0o700 == 0o700
        assert stat.S_IMODE((code / "train.py").stat().st_mode) & 0o700 == 0o600
        (code / "train.py").write_bytes(b"changed by the task")
        assert (code / "again.py").read_bytes() == b"print()"
        bring_code(self.blobs, digest, self.dir)
        assert (code / "train.py").read_bytes() == b"changed by the task"
        assert all(self.blobs.verify(sha) for sha in self.blobs.tree(digest).blobs())

    def test_many_small_files_are_brought(self) -> None:
        files = {f"d{number % 37}/f{number}": b"%d" % number for number in range(3000)}
        bring_code(self.blobs, tree_of(self.blobs, files), self.dir)
        assert contents(self.root / layout.CODE) == files

    def test_an_empty_tree_is_an_empty_directory(self) -> None:
        self.write(f"{layout.OUTPUT}/old", b"old")
        bring_outputs(self.blobs, self.blobs.put_tree(Tree()), self.dir)
        assert contents(self.root / layout.OUTPUT) == {}
        assert (self.root / layout.OUTPUT).is_dir()

    def test_code_is_not_brought_through_a_link(self) -> None:
        (self.tmp / "outside").mkdir()
        (self.root / layout.CODE).rmdir()
        (self.root / layout.CODE).symlink_to(self.tmp / "outside")
        with pytest.raises(UnsafePath):
            bring_code(self.blobs, tree_of(self.blobs, {"train.py": b"print()"}), self.dir)
        assert list((self.tmp / "outside").iterdir()) == []

    def test_outputs_are_brought_again(self) -> None:
        self.write(f"{layout.OUTPUT}/left/over", b"from before")
        digest = tree_of(self.blobs, {"model.pt": b"weights", "plots/a.png": b"png"})
        for _ in range(2):
            bring_outputs(self.blobs, digest, self.dir)
            assert contents(self.root / layout.OUTPUT) == {"model.pt": b"weights", "plots/a.png": b"png"}

    def test_a_checkpoint_is_restored_exactly(self) -> None:
        self.write(f"{layout.checkpoints(3)}/late/writer", b"dead")
        files = {"last.pt": os.urandom(5 << 20), "step-1/model.bin": b"m" * 100, "step-1/empty": b""}
        restore_checkpoint(self.blobs, tree_of(self.blobs, files), self.dir, 3)
        assert contents(self.root / layout.checkpoints(3)) == files

    def test_another_checkpoint_takes_its_place(self) -> None:
        first, second = (tree_of(self.blobs, {"a": b"same", "b": text}) for text in (b"one", b"two"))
        restore_checkpoint(self.blobs, first, self.dir, 1)
        restore_checkpoint(self.blobs, second, self.dir, 1)
        assert contents(self.root / layout.checkpoints(1)) == {"a": b"same", "b": b"two"}
        restore_checkpoint(self.blobs, first, self.dir, 1)
        assert contents(self.root / layout.checkpoints(1)) == {"a": b"same", "b": b"one"}

    def test_a_damaged_checkpoint_is_not_restored(self) -> None:
        good = tree_of(self.blobs, {"a": b"good"})
        bad = tree_of(self.blobs, {"a": b"good", "b": b"1234567890" * 100_000})
        path = self.blobs.path(hashlib.sha256(b"1234567890" * 100_000).hexdigest())
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(500_000)
            file.write(b"X")
        with pytest.raises(BlobDamaged):
            restore_checkpoint(self.blobs, bad, self.dir, 1)
        assert not (self.root / layout.checkpoints(1)).exists()
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(BlobDamaged):
            restore_checkpoint(self.blobs, bad, self.dir, 1)
        path.unlink()
        with pytest.raises(NotFound):
            restore_checkpoint(self.blobs, bad, self.dir, 1)
        assert not (self.root / layout.checkpoints(1)).exists()
        restore_checkpoint(self.blobs, good, self.dir, 1)
        assert contents(self.root / layout.checkpoints(1)) == {"a": b"good"}

    # -- taking trees ----------------------------------------------------------------------------------------

    def test_a_checkpoint_is_carried(self) -> None:
        files: dict[str, bytes] = {
            "last.pt": os.urandom(9 << 20),
            "d/empty": b"",
            "d/same": b"s",
            "same": b"s",
        }
        digest, size = carry_checkpoint(self.dir, self.stage(files), self.blobs)
        assert self.files(digest) == files
        assert size == sum(map(len, files.values()))
        assert not (self.root / layout.staged(1)).exists()

    def test_a_checkpoint_is_carried_again(self) -> None:
        """The server was killed between transfer and recording."""
        staged = self.stage({"a": b"one", "b": b"two"})
        assert carry_checkpoint(self.dir, staged, self.blobs) == carry_checkpoint(
            self.dir, staged, self.blobs
        )

    def test_a_damaged_checkpoint_is_refused(self) -> None:
        for spoil in (b"tw!", b"tw", b"two and more", b""):
            staged = self.stage({"a": b"one", "b": b"two"})
            self.write(f"{layout.staged(1)}/b", spoil)
            with pytest.raises(BlobDamaged):
                carry_checkpoint(self.dir, staged, self.blobs)

    def test_a_checkpoint_that_is_gone_is_refused(self) -> None:
        staged = self.stage({"a": b"one", "b": b"two"})
        (self.root / layout.staged(1) / "b").unlink()
        with pytest.raises(NotFound):
            carry_checkpoint(self.dir, staged, self.blobs)

    def test_a_checkpoint_behind_a_link_is_refused(self) -> None:
        staged = self.stage({"a": b"one"})
        (self.tmp / "outside").write_bytes(b"one")
        (self.root / layout.staged(1) / "a").unlink()
        (self.root / layout.staged(1) / "a").symlink_to(self.tmp / "outside")
        with pytest.raises(UnsafePath):
            carry_checkpoint(self.dir, staged, self.blobs)

    @pytest.mark.parametrize("path", ["../a", "/a", "a/../b", "", "a\0b", "x" * 5000])
    def test_an_invalid_path_in_the_journal_is_refused(self, path: str) -> None:
        staged = self.stage({"a": b"one"})
        staged.files[0]["path"] = path
        with pytest.raises(SpecError):
            carry_checkpoint(self.dir, staged, self.blobs)

    def test_outputs_are_carried(self) -> None:
        files: dict[str, bytes] = {
            "model.pt": os.urandom(6 << 20),
            "plots/deep/er/a.png": b"png",
            "empty": b"",
            "again": b"png",
            "ümlaut": b"u",
        }
        for path, data in files.items():
            self.write(f"{layout.OUTPUT}/{path}", data)
        (self.root / layout.OUTPUT / "model.pt").chmod(0o755)
        (self.root / layout.OUTPUT / "best").symlink_to("model.pt")
        digest, count, size = carry_outputs(self.dir, self.blobs)
        assert self.files(digest) == {**files, "best": "model.pt"}
        assert (count, size) == (len(files) + 1, sum(map(len, files.values())))
        assert {file.mode for file in self.blobs.tree(digest).files if file.path == "model.pt"} == {0o755}
        assert carry_outputs(self.dir, self.blobs) == (digest, count, size)
        assert contents(self.root / layout.OUTPUT) == {**files, "best": "model.pt"}

    def test_only_what_is_an_output_is_carried(self) -> None:
        output = self.root / layout.OUTPUT
        (self.tmp / "outside").write_bytes(SECRET)
        (output / "good").write_bytes(b"good")
        (output / "absolute").symlink_to(self.tmp / "outside")
        (output / "up").symlink_to("../../outside")
        (output / "directory").symlink_to(self.tmp)
        os.mkfifo(output / "pipe")
        Path(os.fsdecode(os.fsencode(output) + b"/na\xffme")).write_bytes(b"escaped")
        assert self.files(carry_outputs(self.dir, self.blobs)[0]) == {
            "good": b"good",
            "na\\xffme": b"escaped",
        }

    def test_a_link_in_place_of_the_outputs_is_no_outputs(self) -> None:
        (self.tmp / "outside").mkdir()
        (self.tmp / "outside" / "secret").write_bytes(SECRET)
        (self.root / layout.OUTPUT).rmdir()
        assert carry_outputs(self.dir, self.blobs)[1:] == (0, 0)
        (self.root / layout.OUTPUT).symlink_to(self.tmp / "outside")
        assert carry_outputs(self.dir, self.blobs)[1:] == (0, 0)

    def test_what_changed_in_the_working_folder_is_kept(self) -> None:
        code, folder = self._placed({"train.py": b"train", "data/a.csv": b"1,2", "config.yaml": b"lr: 1"})
        (folder / "config.yaml").write_bytes(b"lr: 2")
        self.write(f"{layout.CODE}/checkpoints/last.pt", b"w" * (5 << 20))
        self.write(f"{layout.CODE}/__pycache__/train.pyc", b"junk")
        self.write(f"{layout.CODE}/data/cache/x", b"ignored")
        (folder / "newest").symlink_to("checkpoints/last.pt")
        os.mkfifo(folder / "pipe")
        kept = self._kept(code, ignore=[b"cache/"])
        assert kept is not None
        assert self.files(self.blobs.put_tree(kept.tree)) == {
            "config.yaml": b"lr: 2",
            "checkpoints/last.pt": b"w" * (5 << 20),
            "newest": "checkpoints/last.pt",
        }
        assert (kept.newest, kept.ignored, kept.left) == ("checkpoints/last.pt", ("data/cache",), ())
        assert self._kept(code, ignore=[b"cache/"]) == kept

    def test_a_kept_working_folder_goes_on(self) -> None:
        shipped = {"train.py": b"train", "log.txt": b""}
        before = tree_of(self.blobs, {"log.txt": b"epoch 1", "old.pt": b"old", "same.pt": b"same"})
        code, folder = self._placed(shipped, before)
        assert contents(folder) == {
            "train.py": b"train",
            "log.txt": b"epoch 1",
            "old.pt": b"old",
            "same.pt": b"same",
        }
        (folder / "old.pt").unlink()
        (folder / "log.txt").write_bytes(b"epoch 1, epoch 2")
        kept = self._kept(code, before)
        assert kept is not None
        assert self.files(self.blobs.put_tree(kept.tree)) == {
            "log.txt": b"epoch 1, epoch 2",
            "same.pt": b"same",
        }

    def test_a_file_over_the_budget_is_left_out(self) -> None:
        code, _ = self._placed({"train.py": b"train"})
        self.write(f"{layout.CODE}/large.bin", b"x" * 3000)
        self.write(f"{layout.CODE}/small.bin", b"x" * 300)
        kept = self._kept(code, budget=1000)
        assert kept is not None
        assert [file.path for file in kept.tree.files] == ["small.bin"]
        assert [(file.path, file.size) for file in kept.left] == [("large.bin", 3000)]

    def test_a_link_in_place_of_the_working_folder_is_none(self) -> None:
        code, folder = self._placed({"train.py": b"train"})
        (self.tmp / "outside").mkdir()
        (self.tmp / "outside" / "secret").write_bytes(SECRET)
        folder.rename(self.root / "elsewhere")
        folder.symlink_to(self.tmp / "outside")
        assert self._kept(code) is None

    def _placed(self, code: dict[str, bytes], before: str | None = None) -> tuple[str, Path]:
        """A working folder as an attempt finds it: the digest of the code, and the folder."""
        digest = tree_of(self.blobs, code)
        (self.root / layout.CODE).rmdir()
        bring_code(self.blobs, folder_tree(self.blobs, digest, before), self.dir)
        return digest, self.root / layout.CODE

    def _kept(
        self, code: str, before: str | None = None, *, budget: int = 1 << 30, ignore: Sequence[bytes] = ()
    ) -> KeptFolder | None:
        return carry_folder(
            self.dir,
            self.blobs,
            rules=KeepRules((), ignore),
            budget=budget,
            code=self.blobs.tree(code),
            before=self.blobs.tree(before) if before is not None else Tree(),
            span=Span(0.0, 1e10),
        )

    def test_too_many_outputs_are_refused(self) -> None:
        for number in range(20):
            self.write(f"{layout.OUTPUT}/d{number}/f", b"x" * 10)
        with pytest.raises(TooLarge):
            carry_outputs(self.dir, self.blobs, max_entries=39)
        with pytest.raises(TooLarge):
            carry_outputs(self.dir, self.blobs, max_bytes=199)
        assert carry_outputs(self.dir, self.blobs, max_entries=40, max_bytes=200)[1:] == (20, 200)
        deep = self.root / layout.OUTPUT
        for _ in range(120):
            deep = deep / "d"
        deep.mkdir(parents=True)
        with pytest.raises(TooLarge):
            carry_outputs(self.dir, self.blobs)

    def test_a_file_with_holes_counts_as_it_claims(self) -> None:
        with (self.root / layout.OUTPUT / "sparse").open("wb") as file:
            file.truncate(1 << 20)
        with pytest.raises(TooLarge):
            carry_outputs(self.dir, self.blobs, max_bytes=(1 << 20) - 1)

    # -- the end ---------------------------------------------------------------------------------------------

    def test_the_directory_of_a_dead_launcher_is_settled(self) -> None:
        journal = Journal(str(self.root))
        journal.append({"k": "starting", "seq": 1, "generation": 1, "at": 1.0})
        journal.close()
        self.write(layout.segment(0), b"o 1 a whole line\no 1 half a li")
        for _ in range(2):
            self.dir.settle(1)
            entries, _ = self.dir.journal()
            assert [(entry["k"], entry.get("kind")) for entry in entries] == [
                ("starting", None),
                ("ended", "lost"),
            ]
            assert self.dir.read(layout.segment(0)) == b"o 1 a whole line\no 1 half a li"


def _json(path: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads(path.read_bytes())
    return value
