"""The smaller parts of the courier: listing, removing, jobs, buffers, contact."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from stoker.courier import __main__ as main
from stoker.courier import listing, manifest
from stoker.courier.buffers import SMALL, Buffers, Busy
from stoker.courier.jobs import KEPT, RUNNING, Jobs
from stoker.courier.trash import Trash
from stoker.errors import SpecError
from stoker.spec.tree import check_link, check_path
from stoker.task import formats, layout
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import TooMany

ODD = [
    "a",
    "a/b",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "/a",
    "a/",
    "",
    ".",
    "./a",
    "a//b",
    "a\0b",
    "../../x",
    "ä/ö",
]


@pytest.mark.parametrize("path", ODD)
def test_paths_are_judged_as_by_the_server(path: str) -> None:
    try:
        check_path(path)
    except SpecError:
        assert not manifest.plain(path)
    else:
        assert manifest.plain(path)


@pytest.mark.parametrize("target", [*ODD, "../b/c", "../../b", "../../../b", "b/../../c"])
@pytest.mark.parametrize("path", ["l", "d/l", "d/e/l"])
def test_links_are_judged_as_by_the_server(path: str, target: str) -> None:
    try:
        check_link(path, target)
    except SpecError:
        assert not manifest.inside(path, target)
    else:
        assert manifest.inside(path, target)


# -- listing -------------------------------------------------------------------------------------------------


def walked(root: Path, path: str = "output", most: int = 10_000) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    after: str | None = ""
    while after is not None:
        page = listing.page(str(root), path, after, most)
        found += page["entries"]
        after = page["after"]
    return found


def test_all_pages_are_the_whole_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {}
    for number in range(40):
        path = tmp_path / "output" / f"d{number % 4}" / ("x" * (number % 3)) / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
        name = str(path.relative_to(tmp_path / "output"))
        wanted[name] = hashlib.sha256(b"%d" % number).hexdigest()
    (tmp_path / "output" / "d1.txt").write_bytes(b"")
    wanted["d1.txt"] = hashlib.sha256(b"").hexdigest()
    whole = walked(tmp_path)
    assert {entry["path"]: entry["sha256"] for entry in whole} == wanted
    monkeypatch.setattr(listing, "PAGE", 1)
    assert walked(tmp_path) == whole
    monkeypatch.setattr(listing, "PAGE", 700)
    assert walked(tmp_path) == whole


def test_a_page_ends_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "output").mkdir()
    for name in "abc":
        (tmp_path / "output" / name).write_bytes(b"")
    monkeypatch.setattr(listing, "PAUSE", 0.0)
    assert listing.page(str(tmp_path), "output", "", 10)["after"] == "a"
    assert [entry["path"] for entry in walked(tmp_path)] == ["a", "b", "c"]


def test_a_directory_that_changes_between_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1", "b/1", "c/1"):
        (tmp_path / "output" / name).parent.mkdir(parents=True)
        (tmp_path / "output" / name).write_bytes(b"")
    monkeypatch.setattr(listing, "PAGE", 1)
    page = listing.page(str(tmp_path), "output", "a/1", 10)
    assert page["after"] == "b/1"
    (tmp_path / "output/b/1").unlink()
    (tmp_path / "output/b").rmdir()
    (tmp_path / "output/b").symlink_to(tmp_path)
    assert [entry["path"] for entry in listing.page(str(tmp_path), "output", "b/1", 10)["entries"]] == ["c/1"]


def test_too_many_entries_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    for number in range(20):
        (tmp_path / "output" / str(number)).write_bytes(b"")
    with pytest.raises(TooMany):
        listing.page(str(tmp_path), "output", "", 19)
    assert len(walked(tmp_path, most=20)) == 20


def test_no_directory_and_a_link_in_its_place(tmp_path: Path) -> None:
    assert walked(tmp_path) == []
    (tmp_path / "output").symlink_to(tmp_path)
    with pytest.raises(UnsafePath):
        walked(tmp_path)


# -- removing ------------------------------------------------------------------------------------------------


def throw(root: Path, name: str) -> None:
    trash = Trash(str(root), "trash")
    fd = os.open(root, os.O_RDONLY)
    try:
        trash.throw(fd, name)
        trash.empty()
    finally:
        os.close(fd)
    assert list((root / "trash").iterdir()) == []


def test_deeper_than_any_path(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=fd)
        child = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)
    throw(tmp_path, "d")
    assert not (tmp_path / "d").exists()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_bytes(b"")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to(tmp_path / "keep")
    os.mkfifo(tmp_path / "d" / "pipe")
    throw(tmp_path, "d")
    (tmp_path / "link").symlink_to(tmp_path / "keep")
    throw(tmp_path, "link")
    throw(tmp_path, "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep", "trash"]
    assert (tmp_path / "keep" / "file").exists()


def test_directories_that_cannot_be_written_are_removed(tmp_path: Path) -> None:
    (tmp_path / "d" / "e" / "f").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f" / "file").write_bytes(b"")
    for path in (tmp_path / "d/e/f", tmp_path / "d/e", tmp_path / "d"):
        path.chmod(0o000)
    throw(tmp_path, "d")
    assert not (tmp_path / "d").exists()


# -- jobs and buffers ----------------------------------------------------------------------------------------


def test_a_job_runs_once_for_repeated_requests() -> None:
    jobs, go, count = Jobs(wait=0.01), threading.Event(), []

    def work() -> dict[str, object]:
        count.append(1)
        go.wait(30)
        return {"done": True}

    assert jobs.result("a", work) is None
    assert jobs.result("a", work) is None
    go.set()
    jobs = jobs_with_patience(jobs)
    assert jobs.result("a", work) == {"done": True}
    assert jobs.result("a", work) == {"done": True}
    assert len(count) == 1


def jobs_with_patience(jobs: Jobs) -> Jobs:
    jobs._wait = 30.0
    return jobs


def test_a_failed_job_is_reported_to_every_request() -> None:
    jobs = Jobs()

    def work() -> dict[str, object]:
        raise FileNotFoundError(2, "gone")

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            jobs.result("a", work)


def test_jobs_and_results_are_bounded() -> None:
    jobs, go = Jobs(wait=0.0), threading.Event()
    for number in range(RUNNING):
        assert jobs.result(f"{number}", lambda: {"went": go.wait(30)}) is None
    with pytest.raises(Busy):
        jobs.result("more", dict)
    go.set()
    jobs_with_patience(jobs)
    assert all(jobs.result(f"{number}", dict) for number in range(RUNNING))
    for number in range(20):
        jobs.result(f"later {number}", dict)
    assert len(jobs._jobs) <= RUNNING + KEPT


def test_buffers_are_lent_and_returned() -> None:
    buffers = Buffers(count=2, size=1 << 20, wait=0.01)
    with buffers.lend(SMALL + 1) as one, buffers.lend(1 << 20) as two:
        one[:1], two[-1:] = b"1", b"2"
        assert len(one) == SMALL + 1 and len(two) == 1 << 20
        with pytest.raises(Busy), buffers.lend(SMALL + 1):
            pass
        with buffers.lend(SMALL) as small:
            assert len(small) == SMALL
    with buffers.lend(1 << 20):
        pass
    with pytest.raises(ValueError), buffers.lend((1 << 20) + 1):
        pass


# -- the end and the lease -----------------------------------------------------------------------------------


def test_contact_is_another_file_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contact = main.Contact(str(tmp_path))
    contact.touch()
    path = tmp_path / layout.CONTACT
    first = path.read_bytes()
    contact.touch()
    assert path.read_bytes() == first, "at most every ten seconds"
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + main.TOUCH)
    contact.touch()
    assert path.read_bytes() != first
    (tmp_path / "outside").write_bytes(b"safe")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    monkeypatch.setattr(time, "monotonic", lambda: real() + 2 * main.TOUCH)
    contact.touch()
    assert (tmp_path / "outside").read_bytes() == b"safe" and not path.is_symlink()


def test_contact_that_cannot_be_written_delays_no_request(tmp_path: Path) -> None:
    (tmp_path / f"{layout.CONTACT}.tmp").mkdir()
    main.Contact(str(tmp_path)).touch()
    assert not (tmp_path / layout.CONTACT).exists()


def test_when_a_courier_is_no_longer_needed(tmp_path: Path) -> None:
    near = LocalTaskDir(str(tmp_path))
    assert main.released(near)
    for seq, verb, over in ((1, "run", False), (2, "stop", False), (3, "release", True)):
        near.write_order(formats.Order(seq=seq, generation=1, verb=verb))
        assert main.released(near) is over
