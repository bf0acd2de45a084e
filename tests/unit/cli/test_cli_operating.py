"""Maintenance of the home: doctor, backups, state of the own server. No server runs in these tests."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.settings import Home
from stoker.store import Store
from stoker.store.rows import NewRun


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Home:
    monkeypatch.delenv("STOKER_URL", raising=False)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "my hôme"))
    found = Home.from_environment()
    found.root.mkdir(mode=0o700)
    return found


def submit(home: Home, name: str) -> str:
    """A run as the server acknowledges it: in the database and in the ledger."""
    with Store.open(home.database) as store:
        row, _ = store.submit(NewRun(key=name, name=name, job={}, command=["true"]), now=1_700_000_000.0)
    with home.ledger.open("a") as ledger:
        ledger.write(json.dumps({"id": row.id, "name": name, "t": 1_700_000_000.0}) + "\n")
    return row.id


def make_copy(home: Home, target: Path) -> None:
    target.mkdir(parents=True)
    with Store.open(home.database) as store:
        store.backup(target / "stoker.db")
    (target / "blobs/objects").mkdir(parents=True)
    (target / "blobs/objects/ab").write_bytes(b"blob")
    (target / "runs/old/logs").mkdir(parents=True)
    (target / "runs/old/logs/000000.log").write_bytes(b"copied")


def test_restore_brings_back_the_backup_and_lists_what_is_missing(
    home: Home, invoke: Any, tmp_path: Path
) -> None:
    old = submit(home, "old")
    make_copy(home, tmp_path / "copy")
    new = submit(home, "new")
    home.database.write_bytes(b"this is no database at all")
    (home.root / "runs/old/logs").mkdir(parents=True)
    (home.root / "runs/old/logs/000000.log").write_bytes(b"newer than the copy")
    result = invoke("backup", "restore", "copy", "--color", "never")
    assert result.code == 0, result
    assert result.out.split()[0] == new
    assert "1 run acknowledged after the copy was made is missing:" in result.err
    aside = next(home.root.glob("stoker.db.replaced-*"))
    assert (aside / "stoker.db").read_bytes() == b"this is no database at all"
    with Store.open(home.database, create=False) as store:
        assert [run.id for run in store.runs()] == [old]
    assert (home.root / "blobs/objects/ab").read_bytes() == b"blob"
    assert (home.root / "runs/old/logs/000000.log").read_bytes() == b"newer than the copy"


def test_restore_of_a_lost_home(home: Home, invoke: Any, tmp_path: Path, monkeypatch: Any) -> None:
    submit(home, "old")
    make_copy(home, tmp_path / "copy")
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "another"))
    report = json.loads(invoke("backup", "restore", "copy", "--json").out)
    made_at = report.pop("made_at")
    assert made_at == (tmp_path / "copy/stoker.db").stat().st_mtime
    assert report == {
        "from": str(tmp_path / "copy"), "runs": 1, "aside": None, "added": 2, "missing": [], "damaged": []
    }  # fmt: skip


def test_a_damaged_copy_changes_nothing(home: Home, invoke: Any, tmp_path: Path) -> None:
    submit(home, "old")
    before = home.database.read_bytes()
    (tmp_path / "copy.db").write_bytes(b"SQLite format 3\0" + b"junk" * 1000)
    result = invoke("backup", "restore", "copy.db")
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert home.database.read_bytes() == before


def test_restore_while_a_server_holds_the_home(home: Home, invoke: Any, tmp_path: Path) -> None:
    submit(home, "old")
    make_copy(home, tmp_path / "copy")
    fd = os.open(home.server_lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        result = invoke("backup", "restore", "copy")
    finally:
        os.close(fd)
    assert result.err == "error: a server runs in this home\n\nhint: Stop it first: stoker server stop\n"


def test_restore_without_a_path_takes_the_newest_of_those_with_the_most_runs(home: Home, invoke: Any) -> None:
    submit(home, "old")
    make_copy(home, home.backups / "few")
    submit(home, "new")
    for name, age in (("one", 200), ("two", 300), ("damaged", 100)):
        make_copy(home, home.backups / name)
        os.utime(home.backups / name, (time.time(), time.time() - age))
    with (home.backups / "damaged/stoker.db").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(os.urandom(4096))
    home.database.unlink()
    with Store.open(home.database) as store:
        store.backup(home.backups / "auto/stoker-20260101-000000.db")
    listed = json.loads(invoke("backup", "list", "--json").out)
    assert {Path(entry["path"]).name: entry["runs"] for entry in listed} == {
        "stoker-20260101-000000.db": 0, "few": 1, "damaged": 2, "one": 2, "two": 2
    }  # fmt: skip
    report = json.loads(invoke("backup", "restore", "--json").out)
    assert (report["from"], report["runs"]) == (str(home.backups / "one"), 2)
    assert report["damaged"] == [str(home.backups / "damaged")]
    result = invoke("backup", "restore", str(home.backups / "few"), "--color", "never")
    assert f"restored from {home.backups / 'few'}: 1 run, made " in result.err
    assert "1 run acknowledged after" in result.err and "stoker backup forget" in result.err


def test_a_fresh_start_is_only_for_homes_without_their_database(home: Home, invoke: Any) -> None:
    submit(home, "old")
    result = invoke("server", "start", "--anew")
    assert result.code == 1 and "is intact and has 1 run(s)" in result.err
    assert home.database.exists()


def test_no_backups(home: Home, invoke: Any) -> None:
    assert invoke("backup", "list").err == "no backups yet; make one: stoker backup create\n"
    assert invoke("backup", "list", "--json").out == "[]\n"


def test_server_status_starts_nothing(home: Home, invoke: Any) -> None:
    result = invoke("server", "status")
    assert (result.code, result.out) == (4, f"the server of {home.root} does not run\n")
    found = json.loads(invoke("server", "status", "--json").out)
    assert (found["running"], found["pid"], found["url"]) == (False, None, None)
    assert invoke("server", "stop").err == "the server does not run\n"
    assert list(home.root.iterdir()) == []


def test_server_logs(home: Home, invoke: Any) -> None:
    assert invoke("server", "logs").code == 1
    home.server_log.write_bytes(b"one\n\x1b]0;owned\x07two\nthree\n")
    assert invoke("server", "logs", "-n", "2").out == "\\x1b]0;owned\\x07two\nthree\n"


def test_doctor(home: Home, invoke: Any) -> None:
    result = invoke("doctor")
    assert result.out.splitlines()[0].split() == ["ok", "stoker", "0.1.0"]
    assert "isolation: memory" in result.out
    assert "does not run; the first command that needs it starts it" in result.out
    assert not (home.root / "server.json").exists()
    found = json.loads(invoke("doctor", "--json").out)
    assert all(set(fact) == {"name", "status", "text", "fix"} for fact in found["facts"])
    assert found["ok"] == (not any(fact["status"] == "fail" for fact in found["facts"]))


def test_doctor_finds_files_that_others_may_read(home: Home, invoke: Any) -> None:
    home.token.write_text("secret")
    home.token.chmod(0o644)
    home.root.chmod(0o755)
    result = invoke("doctor")
    assert result.code == 1
    assert f"fix: chmod 600 {home.token}" in result.out
    assert f"fix: chmod 700 {home.root}" in result.out
    assert "secret" not in result.out


def test_doctor_with_a_broken_configuration(home: Home, invoke: Any) -> None:
    home.config.write_text("[serve]\nport = 1\n")
    result = invoke("doctor")
    assert result.code == 1
    assert "unknown section 'serve'" in result.out


def test_doctor_finds_a_taken_port(home: Home, invoke: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        home.config.write_text(f"[server]\nport = {port}\n")
        result = invoke("doctor")
    assert result.code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.out


def test_a_home_that_is_a_file(home: Home, invoke: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "file"))
    result = invoke("ps")
    assert result.code == 1
    assert result.err.startswith("error: cannot use the home")
