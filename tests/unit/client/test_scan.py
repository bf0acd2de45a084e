"""The working directory as a tree: what is shipped, what is left out, and what is not read twice."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.client import tree as tree_module
from stoker.client.tree import Changed, scan
from stoker.errors import Refused, SpecError, TooLarge


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


def write(root: Path, *paths: str, text: str = "x") -> None:
    for path in paths:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}{path}")


def paths(work: Path, cache: Path) -> list[str]:
    return [file.path for file in scan(work, cache).tree.files]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the scanner runs an hour ahead, so that every file is old enough to be cached."""
    real = time.time_ns
    monkeypatch.setattr(tree_module.time, "time_ns", lambda: real() + 3600 * 10**9)


def test_files_modes_and_links(work: Path, cache: Path) -> None:
    write(work, "train.py", "pkg/a.py", "pkg/sub/b.py", "run.sh", "ünï cödé")
    (work / "run.sh").chmod(0o750)
    (work / "link").symlink_to("pkg/a.py")
    (work / "pkg" / "up").symlink_to("../train.py")
    (work / "pkg" / "directory").symlink_to("sub")
    (work / "absolute").symlink_to(work / "pkg" / "a.py")
    (work / "roundabout").symlink_to("pkg/sub/../a.py")
    found = scan(work, cache).tree
    assert [file.path for file in found.files if file.link is None] == [
        "pkg/a.py", "pkg/sub/b.py", "run.sh", "train.py", "ünï cödé",
    ]  # fmt: skip
    assert {file.path: file.link for file in found.files if file.link} == {
        "absolute": "pkg/a.py",
        "link": "pkg/a.py",
        "pkg/directory": "sub",
        "pkg/up": "../train.py",
        "roundabout": "pkg/a.py",
    }
    assert {file.path: file.mode for file in found.files if file.mode != 0o644} == {"run.sh": 0o755}


def test_links_that_lead_outside_are_recorded_beside_the_tree(work: Path, cache: Path) -> None:
    write(work, "pkg/a.py")
    (work / "pkg" / "data").symlink_to("/mnt/sets/current")
    (work / "up").symlink_to("../beside/x")
    (work / "around").symlink_to("pkg/../../beside")
    found = scan(work, cache)
    assert [file.path for file in found.tree.files] == ["pkg/a.py"]
    beside = work.resolve().parent / "beside"
    assert found.extras.links == {
        "pkg/data": "/mnt/sets/current",
        "up": str(beside / "x"),
        "around": str(beside),
    }
    write(work, ".stokerignore", text="pkg/data\n/up\n/around\n")
    assert scan(work, cache).extras.links == {}


def test_empty_folders_are_recorded_beside_the_tree(work: Path, cache: Path) -> None:
    write(work, "a.py", "logs/old.log", "full/x", "venv/pyvenv.cfg", "build/x")
    for path in ("out/deep/est", "full/empty", "ünï", "__pycache__", "build/empty"):
        (work / path).mkdir(parents=True)
    os.mkfifo(work / "ünï" / "pipe")
    (work / os.fsdecode(b"not utf-8 \xff")).mkdir()
    (work / ".gitignore").write_text("*.log\n/build/\n")
    for _ in range(2):
        found = scan(work, cache)
        assert [file.path for file in found.tree.files] == [".gitignore", "a.py", "full/x"]
        assert found.extras.folders == ("full/empty", "logs", "out/deep/est", "ünï")


def test_what_is_never_shipped(work: Path, cache: Path) -> None:
    write(
        work,
        "a.py",
        ".git/config",
        ".venv/x",
        "sub/__pycache__/a.pyc",
        "node_modules/x",
        "myenv/pyvenv.cfg",
        "myenv/lib/x",
        "other home/token",
        "other home/stoker.db",
        "other home/server.lock",
    )
    inside = work / "stoker home"
    assert paths(work, inside / "cache") == ["a.py"]
    assert paths(work, inside / "cache") == ["a.py"], "the cache inside must not ship itself"


def test_ignore_files_nested_and_negated(work: Path, cache: Path) -> None:
    write(
        work,
        "a.log",
        "keep.log",
        "data/big.bin",
        "data/small.csv",
        "sub/x.tmp",
        "sub/deep/y.tmp",
        "sub/deep/z.tmp",
        "build/out",
        "src/build/out",
    )
    (work / ".gitignore").write_text("# comment\n*.log\n!keep.log\n/build/\ndata/*\n")
    (work / "sub" / ".gitignore").write_text("*.tmp\n!/deep/z.tmp\n")
    (work / ".stokerignore").write_text("!data/small.csv\n.gitignore\n")
    expected = [".stokerignore", "data/small.csv", "keep.log", "src/build/out", "sub/deep/z.tmp"]
    assert paths(work, cache) == expected
    assert paths(work, cache) == expected, "from the cache"
    write(work, "new.log", "sub/new.tmp", "new.py")
    assert paths(work, cache) == sorted([*expected, "new.py"])
    (work / ".gitignore").write_text("keep.log\n")
    assert "a.log" in paths(work, cache) and "keep.log" not in paths(work, cache)


def test_a_subdirectory_of_a_repository_obeys_the_rules_above(tmp_path: Path, cache: Path) -> None:
    repository = tmp_path / "repo"
    write(
        repository,
        "project/a.py",
        "project/a.secret",
        "project/local.txt",
        "project/out/x",
        "other/out/x",
        ".git/HEAD",
    )
    (repository / ".gitignore").write_text("*.secret\n/project/out/\n")
    (repository / ".git" / "info").mkdir()
    (repository / ".git" / "info" / "exclude").write_text("local.txt\n")
    assert paths(repository / "project", cache) == ["a.py"]


@pytest.mark.parametrize("rule", ["[", "\\", "!", "**", "/", "  ", "a\\", "*.log # not a comment", "\x00"])
def test_strange_patterns_do_not_break_a_scan(work: Path, cache: Path, rule: str) -> None:
    write(work, "train.py")
    (work / ".stokerignore").write_text(f"{rule}\nskipped\n")
    write(work, "skipped")
    assert "skipped" not in paths(work, cache)


def test_git_agrees(work: Path, cache: Path) -> None:
    write(
        work,
        "a/b/c.txt",
        "a/b/d.log",
        "a/x.log",
        "foo/bar/baz",
        "foo/keep/baz",
        "doc/a.md",
        "doc/sub/b.md",
        "t/e mp",
        "z.TXT",
    )
    (work / ".gitignore").write_text(
        "*.log\n!a/x.log\nfoo/*\n!foo/keep/\n/doc/*.md\n**/sub\ne\\ mp\n*.txt\n!c.txt\n"
    )
    (work / "a" / ".gitignore").write_text("b/*\n!b/c.txt\n")
    subprocess.run(
        ["git", "init", "-q", str(work)], check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    )
    listed = subprocess.run(
        ["git", "-C", str(work), "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"},
    ).stdout.decode()  # fmt: skip
    assert paths(work, cache) == sorted(listed.rstrip("\0").split("\0"))


def test_unchanged_files_are_not_read_again(work: Path, cache: Path, later: None) -> None:
    write(work, *[f"d{n % 7}/f{n}" for n in range(50)])
    first = scan(work, cache)
    second = scan(work, cache)
    assert (first.hashed, second.hashed) == (50, 0) and first.tree == second.tree
    write(work, "d0/f0", text="changed")
    (work / "d1" / "f1").unlink()
    third = scan(work, cache)
    assert third.hashed == 1 and third.tree != first.tree and len(third.tree.files) == 49


def test_a_change_that_keeps_size_and_time_is_seen(work: Path, cache: Path, later: None) -> None:
    write(work, "f", text="old")
    before = (work / "f").stat()
    first = scan(work, cache).tree
    (work / "f").write_text((work / "f").read_text().replace("old", "new"))
    os.utime(work / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scan(work, cache).tree != first


def test_a_file_changed_just_now_is_read_again(work: Path, cache: Path) -> None:
    write(work, "f")
    assert scan(work, cache).hashed == 1
    assert scan(work, cache).hashed == 1, "too young to trust its times"


def test_the_digest_of_an_unchanged_folder_is_known_without_its_tree(
    work: Path, cache: Path, later: None
) -> None:
    write(work, "a.py", "b.py", "sub/c.py")
    (work / "link").symlink_to("a.py")

    def change_mode() -> None:
        (work / "a.py").chmod(0o755)

    def turn_link() -> None:
        (work / "link").unlink()
        (work / "link").symlink_to("b.py")

    def remove() -> None:
        (work / "b.py").unlink()

    def ignore() -> None:
        (work / ".gitignore").write_text("sub/\n")

    def rewrite() -> None:
        write(work, "a.py", text="y")

    seen = {scan(work, cache).digest}
    for change in (change_mode, turn_link, remove, ignore, rewrite):
        again = scan(work, cache)
        assert again.known == again.digest == again.tree.digest() and again.digest in seen
        change()
        changed = scan(work, cache)
        assert changed.known is None and changed.digest == changed.tree.digest()
        assert changed.digest not in seen, change
        seen.add(changed.digest)


@pytest.mark.parametrize("damage", [b"", b"junk", b"stoker tree cache 1 00000000\n{}", None])
def test_a_damaged_cache_costs_time_only(work: Path, cache: Path, later: None, damage: bytes | None) -> None:
    write(work, "a", "b")
    expected = scan(work, cache).tree
    (path,) = (cache / "trees").iterdir()
    content = path.read_bytes()
    path.write_bytes(damage if damage is not None else content[:-10] + b"0123456789")
    again = scan(work, cache)
    assert again.tree == expected and again.hashed == 2


def test_a_cache_that_cannot_be_written(work: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write(work, "a")
    assert paths(work, tmp_path / "file" / "cache") == ["a"]


def test_unreadable_files_are_named(work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "ok", "pkg/locked")

    def denied(path: str, flags: int) -> int:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return os.open(path, flags)

    monkeypatch.setattr(tree_module, "_opener", denied)
    with pytest.raises(Refused, match=r"cannot read 'pkg/locked'.*permission denied"):
        scan(work, cache)


def test_names_that_are_not_utf8_are_named(work: Path, cache: Path) -> None:
    with open(os.fsencode(work) + b"/caf\xe9", "wb"):
        pass
    with pytest.raises(SpecError, match="not UTF-8"):
        scan(work, cache)


def test_sockets_and_pipes_are_left_out_with_a_warning(
    work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "a")
    os.mkfifo(work / "pipe")
    monkeypatch.chdir(work)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("sock")
        found = scan(work, cache)
    assert [file.path for file in found.tree.files] == ["a"]
    assert len(found.warnings) == 2


def test_limits(work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "train.py")
    (work / "data").mkdir()
    with (work / "data" / "images.bin").open("wb") as handle:
        handle.truncate(6 << 30)
    with pytest.raises(TooLarge, match=r"6 GiB.*data/") as caught:
        scan(work, cache)
    assert ".stokerignore" in (caught.value.hint or "")
    (work / "data" / "images.bin").unlink()
    write(work, *[f"many/{n}" for n in range(12)])
    monkeypatch.setattr(tree_module, "CODE_FILES", 10)
    with pytest.raises(TooLarge, match="more than 10 files"):
        scan(work, cache)
    monkeypatch.undo()
    monkeypatch.setattr(tree_module, "WARN_BYTES", 10)
    assert any("many/" in text and ".stokerignore" in text for text in scan(work, cache).warnings)


def test_a_file_that_keeps_changing(work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "busy")
    counter = iter(range(100))

    def busy(path: str, flags: int) -> int:
        return os.open(path, flags)

    real = tree_module.hashlib.file_digest

    def touching(handle: object, name: str) -> object:
        result = real(handle, name)  # type: ignore[arg-type]
        (work / "busy").write_text("x" * next(counter))
        return result

    monkeypatch.setattr(tree_module, "_opener", busy)
    monkeypatch.setattr(tree_module.hashlib, "file_digest", touching)
    with pytest.raises(Refused, match=r"'busy' keeps changing"):
        scan(work, cache)


def test_opening_a_changed_file(work: Path, cache: Path) -> None:
    write(work, "a")
    found = scan(work, cache)
    digest = found.tree.files[0].sha256
    os.close(found.open(digest))
    (work / "a").write_text("something longer")
    with pytest.raises(Changed):
        found.open(digest)
    (work / "a").unlink()
    with pytest.raises(Changed):
        found.open(digest)


def test_an_empty_and_a_missing_directory(work: Path, cache: Path) -> None:
    assert paths(work, cache) == []
    with pytest.raises(Refused, match="not a directory"):
        scan(work / "nothing", cache)


def test_patterns_are_only_read_for_new_names(work: Path, cache: Path) -> None:
    write(work, "a.py", "a.log")
    (work / ".gitignore").write_text("*.log\n")
    program = (
        "import sys; from pathlib import Path; from stoker.client.tree import scan\n"
        f"scan(Path({str(work)!r}), Path({str(cache)!r})); print('stoker.spec.globs' in sys.modules)"
    )
    said = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert said == ["True\n", "False\n"]


@pytest.mark.parametrize("name", [".gitignore", ".stokerignore"])
def test_ignore_files_are_bounded_before_they_are_read(work: Path, cache: Path, name: str) -> None:
    """A truncated ignore file would ship files that must stay here."""
    write(work, "train.py", "sub/model.py")
    (work / name).write_text("x\n" * 1_000_000)
    with pytest.raises(TooLarge, match=rf"{name}.* more than 1024 KiB"):
        scan(work, cache)
    (work / name).write_text("x.bin\n" * 100_000)
    (work / "sub" / name).write_text("y.bin\n" * 100_000)
    with pytest.raises(TooLarge, match=r"for 'sub' have more than 1024 KiB"):
        scan(work, cache)
    (work / "sub" / name).write_text("*" * 5000)
    with pytest.raises(TooLarge, match=f"sub/{name}: a pattern has 5000 bytes"):
        scan(work, cache)


def test_a_pipe_instead_of_an_ignore_file_is_not_waited_for(work: Path, cache: Path) -> None:
    write(work, "train.py")
    os.mkfifo(work / ".gitignore")
    assert paths(work, cache) == ["train.py"]


def test_stars_without_end_do_not_hold_up_a_scan(work: Path, cache: Path) -> None:
    write(work, "a" * 250 + ".py")
    (work / ".gitignore").write_text("************b\n" + "*a" * 50 + "b\n")
    assert paths(work, cache) == [".gitignore", "a" * 250 + ".py"]


def test_nothing_below_an_ignored_directory_is_shipped(tmp_path: Path, cache: Path) -> None:
    """As in git, also when a later rule of the same file includes a path inside."""
    repository = tmp_path / "repo"
    write(repository, "out/work/a.py", "out/work/sub/b.py", ".git/HEAD")
    (repository / ".gitignore").write_text("out/\n!*.py\n")
    assert paths(repository / "out" / "work", cache) == []
