"""The user's own server: found, started once by concurrent commands, with clear errors at a failed start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.client import local
from stoker.errors import ServerUnreachable, SpecError, StokerError
from stoker.settings import Home
from support.waiting import wait

CONNECT = (
    "import sys; from pathlib import Path; from stoker.client.local import connect; from stoker.settings import Home\n"
    "print(connect(Home(Path(sys.argv[1]))).server()['pid'])"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home with a name that breaks careless code; its server ends with the test."""
    monkeypatch.delenv("STOKER_URL", raising=False)
    home = Home(tmp_path / "höme of 'mine'")
    yield home
    record = local.running(home)
    if record is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["pid"], signal.SIGTERM)
        wait(lambda: local.running(home) is None, what="the server did not end")
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(home: Home, *arguments: str, limit: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a server that should refuse to start."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "stoker.server", "--home", str(home.root), *arguments],
        capture_output=True, text=True, timeout=limit,
    )  # fmt: skip


def test_eight_commands_at_once_start_one_server(home: Home) -> None:
    commands = [
        subprocess.Popen([sys.executable, "-c", CONNECT, str(home.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    pids = {command.communicate(timeout=120)[0].strip() for command in commands}
    assert [command.returncode for command in commands] == [0] * 8
    assert len(pids) == 1 and pids != {""}
    record = local.running(home)
    assert record is not None and {str(record["pid"])} == pids


def test_its_life(home: Home) -> None:
    client = local.connect(home)
    with client:
        described = client.server()
        record = json.loads(home.server_record.read_text())
        assert record["pid"] == described["pid"] and record["url"] == described["url"] == client.url
        assert set(record) == {"pid", "start_time", "boot_id", "url", "version", "started_at"}
        for path in (home.token, home.server_record, home.server_log, home.server_lock):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
        assert os.getsid(record["pid"]) == record["pid"], "it must outlive the terminal that started it"
        again = local.connect(home)
        assert again.server()["pid"] == record["pid"]
        again.close()
        other = serve(home)
        assert other.returncode == local.ALREADY_RUNNING and "another server" in other.stderr
        assert client.shutdown() == {"stopping": True}
    wait(lambda: local.running(home) is None, what="it did not end")
    assert home.token.read_text().strip() not in home.server_log.read_text()
    with pytest.raises(ServerUnreachable, match="does not run"):
        local.connect(home, autostart=False)
    with local.connect(home) as client:
        assert client.server()["pid"] != record["pid"]


def test_a_command_during_the_end_gets_the_next_server(home: Home) -> None:
    with local.connect(home) as client:
        first = client.server()["pid"]
        client.shutdown()
    with local.connect(home) as client:
        assert client.server()["pid"] != first


def test_killed_and_found_again(home: Home) -> None:
    with local.connect(home) as client:
        first = client.server()["pid"]
        run = client.submit(
            key="k", job={"name": "kept", "run": "true"}, record={"environment": {"PATH": os.environ["PATH"]}}
        )
    os.kill(first, signal.SIGKILL)
    wait(lambda: local.running(home) is None, what="the end of the server")
    assert home.server_record.exists(), "a killed server leaves its record, which must not be trusted"
    with local.connect(home) as client:
        wait(lambda: client.run(run["id"])["state"] == "succeeded", what="the run did not end")
        records = list(client.logs(run["id"], follow=True))
        assert records[-1]["end"]["exit_code"] == 0


def test_a_record_of_another_process_is_not_believed(home: Home) -> None:
    home.root.mkdir()
    record = {
        "pid": os.getpid(),
        "start_time": 1,
        "boot_id": "x",
        "url": "http://127.0.0.1:1",
        "version": "0",
        "started_at": 0,
    }
    for content in (json.dumps(record), "", "junk", "[]", json.dumps({**record, "pid": "x"})):
        home.server_record.write_text(content)
        assert local.running(home) is None


def test_another_server_by_url(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with local.connect(home) as client:
        monkeypatch.setenv("STOKER_URL", client.url)
        with pytest.raises(SpecError, match="STOKER_TOKEN"):
            local.connect(Home(Path("/nonexistent")))
        monkeypatch.setenv("STOKER_TOKEN", home.token.read_text())
        with local.connect(Home(Path("/nonexistent"))) as remote:
            assert remote.server()["pid"] == client.server()["pid"]
        monkeypatch.delenv("STOKER_URL")


# -- errors --------------------------------------------------------------------------------------------------


def test_a_home_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (Home(tmp_path / "file"), Home(tmp_path / "file" / "below"), Home(Path("/proc/stoker"))):
        with pytest.raises(StokerError, match="cannot use the home") as caught:
            local.connect(home)
        assert "STOKER_HOME" in (caught.value.hint or "")
        done = serve(home)
        assert done.returncode == 1
        assert done.stderr.startswith("stoker: cannot use the home") and len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve(home, "--port", str(taken.getsockname()[1]))
        assert done.returncode == 1 and "is taken hint: Choose another" in done.stderr
        assert "is taken" in home.server_log.read_text()
        home.config.write_text(f"[server]\nport = {taken.getsockname()[1]}\n")
        with pytest.raises(StokerError, match=r"did not start: port \d+ on 127.0.0.1 is taken"):
            local.connect(home)


@pytest.mark.parametrize("config", ["[server\n", "[servers]\n", "[server]\nprot = 1\n"])
def test_a_bad_config(home: Home, config: str) -> None:
    home.root.mkdir()
    home.config.write_text(config)
    with pytest.raises(StokerError, match=r"did not start: .*config\.toml"):
        local.connect(home)
    assert serve(home).returncode == 2


def test_no_weak_token_beyond_loopback(home: Home) -> None:
    home.root.mkdir()
    home.token.write_text("changeme")
    done = serve(home, "--host", "0.0.0.0")
    assert done.returncode == 2 and "weak token" in done.stderr


def test_the_shell_it_was_started_from_does_not_stick(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("queue", "json", "socket"):
        (tmp_path / "scripts" / f"{name}.py").write_text("raise SystemExit('not the real one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "scripts"))
    monkeypatch.setenv("MY_API_TOKEN", "hunter2-hunter2")
    monkeypatch.chdir(tmp_path / "scripts")
    with local.connect(home) as client:
        pid = client.server()["pid"]
    assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/cwd") == str(home.root)


def test_a_damaged_database_is_said_and_not_touched(home: Home) -> None:
    with local.connect(home) as client:
        pid = client.server()["pid"]
        client.shutdown()
    wait(lambda: local.running(home) is None, what=f"{pid} did not end")
    for extra in home.root.glob("stoker.db-*"):
        extra.unlink()
    content = home.database.read_bytes()
    home.database.write_bytes(b"SQLite format 3\0" + os.urandom(len(content) - 16))
    damaged = home.database.read_bytes()
    with local.connect(home) as client:
        assert client.health()["status"] == "damaged"
        with pytest.raises(StokerError) as caught:
            client.runs()
        assert caught.value.code == "store-damaged" and "stoker backup restore" in (caught.value.hint or "")
        client.shutdown()
    wait(lambda: local.running(home) is None, what="it did not end")
    assert home.database.read_bytes() == damaged


def test_half_of_the_home_deleted(home: Home) -> None:
    with local.connect(home) as client:
        client.shutdown()
    wait(lambda: local.running(home) is None, what="it did not end")
    home.token.unlink()
    home.server_lock.unlink()
    for directory in home.root.iterdir():
        if directory.is_dir():
            subprocess.run(["rm", "-rf", str(directory)], check=True)
    with local.connect(home) as client:
        assert client.health()["status"] == "ok"
        assert client.runs()["runs"] == []


def test_files_deleted_under_a_running_server(home: Home) -> None:
    with local.connect(home) as client:
        first = client.server()["pid"]
    home.server_record.unlink()
    with local.connect(home) as client:
        assert client.server()["pid"] == first, "the record is written again"
    home.server_lock.unlink()
    wait(lambda: local.serving(home) is None, what="a server without its lock must end")
    with local.connect(home) as client:
        assert client.server()["pid"] != first


def test_a_log_that_grew_is_put_aside(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.root.mkdir()
    home.server_log.write_text("old\n" * 1000)
    monkeypatch.setattr(local, "LOG_LIMIT", 1000)
    local.connect(home).close()
    assert home.server_log.with_name("server.log.1").read_text().startswith("old\n")
    assert "old" not in home.server_log.read_text()
