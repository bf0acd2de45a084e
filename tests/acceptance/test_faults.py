"""Faults of the machine: full disks, jumping clocks, forbidden or half-deleted homes, damaged databases."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from support import disks
from support.box import STOKER, Box
from support.waiting import wait

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to mount a small file system or change users"
)

PACED = """
import json, os, time
directory = os.environ["STOKER_CHECKPOINT_DIR"]
for step in range(100000):
    path = os.path.join(directory, "state.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step}, file)
    os.replace(path + ".tmp", path)
    print("step", step, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "small", "24m") as mount:
        yield mount


@root_only
def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    box = Box(tmp_path, env={"STOKER_HOME": str(small_disk / "home")})
    box.home = type(box.home)(small_disk / "home")
    try:
        box.write("train.py", PACED)
        run = box.submit("train.py")
        wait(lambda: [c for c in box.show(run)["checkpoints"] if c["kept"]])
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)
        refused = box("run", "-d", "--", "true", code=None)
        assert refused.returncode != 0
        assert "disk" in refused.stderr.lower() or "space" in refused.stderr.lower()
        assert str(small_disk) in refused.stderr
        filler.unlink()
        other = wait(
            lambda: box("run", "-d", "--json", "--", "true", code=None), lambda done: done.returncode == 0
        )
        box("wait", json.loads(other.stdout)["id"])
        box.until(run, "running")
        box("drill", run, "--how", "launcher")
        box.until(run, "running")
        assert box.show(run)["attempts"][-1]["resumed_from"]
    finally:
        box.close()


ONCE = """
import os, sys
print("from", os.path.basename(os.environ.get("STOKER_RESUME_FROM", "the start")))
if os.environ["STOKER_ATTEMPT"] == "1":
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "step-1.bin")
    with open(path + ".tmp", "wb") as file:
        file.write(os.urandom(2 << 20))
    os.rename(path + ".tmp", path)
    sys.exit(1)
"""


@root_only
def test_a_checkpoint_for_which_there_is_no_room_is_not_called_damaged(
    small_disk: Path, tmp_path: Path
) -> None:
    """The checkpoint stays, and the run waits until it can be restored."""
    box = Box(tmp_path, env={"STOKER_HOME": str(small_disk / "home")})
    box.home = type(box.home)(small_disk / "home")
    try:
        box.write("train.py", ONCE)
        run = box.submit("train.py")
        (kept,) = box.ended(run)["checkpoints"]
        wait(lambda: (box.home.tasks / run).exists(), lambda there: not there)
        space = os.statvfs(small_disk)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(space.f_bavail * space.f_frsize - (1 << 20)))
        box("resume", run)
        wait(lambda: box("why", run).stdout, lambda text: f"no space left on {small_disk}" in text)
        filler.unlink()
        shown = box.until(run, "succeeded")
        assert ([one["kept"] for one in shown["checkpoints"]], shown["warnings"]) == ([True], [])
        assert shown["attempts"][-1]["resumed_from"] == kept["id"]
        assert "from step-1.bin" in box("logs", run, "--attempt", "2").stdout
    finally:
        box.close()


@root_only
def test_a_server_that_cannot_start_on_a_full_disk_says_why(small_disk: Path, tmp_path: Path) -> None:
    """The log is on the same disk and cannot be written."""
    box = Box(tmp_path, env={"STOKER_HOME": str(small_disk / "home")})
    box.home = type(box.home)(small_disk / "home")
    box.home.root.mkdir()
    filler = small_disk / "filler"
    try:
        for first in (box.home.token, box.home.database):
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            refused = box("ps", code=1)
            assert f"no space left on {small_disk} for {first}: 0 bytes free" in refused.stderr
            filler.unlink()
            box.home.token.write_text("a token of this home, long enough")
        assert not list(box.home.root.glob(".token*"))
        box("ps")
    finally:
        box.close()


def test_a_clock_that_jumps_changes_nothing(box: Box) -> None:
    """Recorded times are moved a year ahead, then a year back. This equals a jump of the clock, since
    only rows have wall clock times."""
    box.write("train.py", PACED)
    run = box.submit("train.py")
    box.until(run, "running")
    box("server", "stop")
    for jump in (365 * 86400, -2 * 365 * 86400):
        _shift(box, jump)
        box("server", "start")
        box.until(run, "running")
        done = box.submit("--", "true")
        assert box.ended(done)["state"] == "succeeded"
        box("drill", run, "--how", "launcher")
        box.until(run, "running")
        assert box.show(run)["attempts"][-1]["resumed_from"]
        box("server", "stop")


def _shift(box: Box, seconds: float) -> None:
    """Move every recorded time, as if the clock had jumped the other way."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(box.home.database)) as database:
        for table, columns in (
            ("runs", ("created_at", "started_at", "not_before")),
            ("attempts", ("created_at", "started_at")),
            ("checkpoints", ("created_at", "written_at")),
        ):
            for column in columns:
                database.execute(f"UPDATE {table} SET {column} = {column} + ?", (seconds,))
        database.commit()


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.home.root.parent.joinpath("plain").write_text("a file")
    box.env["STOKER_HOME"] = str(tmp_path / "plain")
    done = box("ps", code=None)
    assert done.returncode == 1
    assert str(tmp_path / "plain") in done.stderr and "Traceback" not in done.stderr


@root_only
@pytest.mark.parametrize("how", ["read-only", "forbidden"])
def test_read_only_and_forbidden_homes_are_named(tmp_path: Path, how: str) -> None:
    """As an ordinary user, since root ignores permissions."""
    box = Box(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    if how == "forbidden":
        home.chmod(0o700)
    else:
        subprocess.run(["mount", "--bind", str(home), str(home)], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(home)], check=True)
    try:
        done = subprocess.run(
            [*(["setpriv", "--reuid=65534", "--clear-groups"] if how == "forbidden" else []), *STOKER, "run", "--", "true"],
            env=box.env, cwd="/", capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        if how == "read-only":
            subprocess.run(["umount", "-l", str(home)], check=True)
    assert done.returncode == 1
    assert str(home) in done.stderr and "Traceback" not in done.stderr
    assert "hint:" in done.stderr


def test_a_taken_port_is_named(box: Box) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        box.home.root.mkdir(parents=True)
        box.home.config.write_text(f"[server]\nport = {port}\n")
        done = box("ps", code=1)
        assert str(port) in done.stderr and "Traceback" not in done.stderr
    box.home.config.write_text("")
    box("ps")


def test_a_damaged_database_is_noticed_and_restored(box: Box) -> None:
    kept = box.submit("--name", "kept", "--", "echo", "hello")
    box("wait", kept)
    backup = box.work.parent / "backup"
    box("backup", "create", str(backup))
    missing = box.submit("--name", "missing", "--", "true")
    box("wait", missing)
    box("server", "stop")
    for path in (box.home.database, Path(f"{box.home.database}-wal")):
        if path.exists():
            size = path.stat().st_size
            with open(path, "r+b") as file:
                file.seek(min(4096, size // 2))
                file.write(os.urandom(max(4096, size // 2)))
    refused = box("run", "-d", "--", "true", code=None)
    assert refused.returncode != 0
    assert "damaged" in refused.stderr and "stoker backup restore" in refused.stderr
    assert "Traceback" not in refused.stderr
    restored = box("backup", "restore", str(backup), "--stop-server")
    assert missing in restored.stdout + restored.stderr
    assert box("logs", kept).stdout == "hello\n"
    assert [run["id"] for run in box.json("ps", "-a")] == [kept]
    box("run", "--", "true")


@pytest.mark.parametrize("lost", ["blobs", "tasks", "runs", "token", "stoker.db", "engine", "server.json"])
def test_a_half_deleted_home_is_survived_or_named(box: Box, lost: str) -> None:
    box.write("train.py", "print('hello')\n")
    box("run", "train.py")
    box("server", "stop")
    path = box.home.root / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
        Path(f"{path}-wal").unlink(missing_ok=True)
        Path(f"{path}-shm").unlink(missing_ok=True)
    done = box("run", "train.py", code=None)
    assert "Traceback" not in done.stderr
    if done.returncode != 0:
        assert "hint:" in done.stderr, done.stderr
    else:
        assert done.stdout == "hello\n"


def test_the_task_directory_is_deleted_under_a_running_run(box: Box) -> None:
    run = box.submit("--", "sleep", "600")
    box.until(run, "running")
    wait(
        lambda: (
            not (shutil.rmtree(box.home.tasks / run, ignore_errors=True) or (box.home.tasks / run).exists())
        )
    )
    shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) > 1 or seen["state"] == "failed")
    assert shown["attempts"][0]["cause"] == "lost"
    box("stop", run, "--kill")


def test_a_home_with_spaces_and_unicode(tmp_path: Path) -> None:
    box = Box(tmp_path / "größe und 空 白")
    try:
        box.write(
            "train.py",
            "import os\nopen(os.environ['STOKER_OUTPUT_DIR'] + '/ö.txt', 'w').write('ü')\nprint('ä')\n",
        )
        assert box("run", "train.py").stdout == "ä\n"
        box("pull", "@last", "-o", str(tmp_path / "out"))
        assert (tmp_path / "out/ö.txt").read_text() == "ü"
    finally:
        box.close()


def test_a_very_long_home_path(tmp_path: Path) -> None:
    box = Box(tmp_path / ("long" * 40) / ("path" * 20))
    try:
        assert box("run", "--", "echo", "hi").stdout == "hi\n"
    finally:
        box.close()


@root_only
def test_an_ordinary_user_runs_with_what_isolation_there_is(tmp_path: Path) -> None:
    base = Path(f"/var/tmp/stoker-test-{os.getpid()}-{time.monotonic_ns()}")
    base.mkdir(mode=0o755)
    try:
        os.chown(base, 65534, 65534)
        env = {
            "PATH": os.environ["PATH"], "HOME": str(base), "STOKER_HOME": str(base / "home"), "NO_COLOR": "1",
            "LANG": "C.UTF-8",
        }  # fmt: skip
        prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
        python = _interpreter_for_others(base, prefix, env)
        command = [*prefix, python, "-m", "stoker.cli.main"]

        def call(*args: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *args], env=env, cwd=base, capture_output=True, text=True, timeout=120
            )

        done = call("run", "--no-code", "--", "sh", "-c", "id -u; exit 5")
        assert (done.returncode, done.stdout) == (5, "65534\n"), done.stderr
        hog = call(
            "run",
            "--no-code",
            "--memory",
            "100Mi",
            "--",
            python,
            "-c",
            "x = []\nwhile True: x.append(bytearray(5_000_000))",
        )
        assert hog.returncode != 0
        last = json.loads(call("show", "@last", "--json").stdout)
        assert last["cause"] == "oom", last["reason"]
        facts = call("doctor").stdout
        assert "memory" in facts
        call("server", "stop")
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _interpreter_for_others(base: Path, prefix: list[str], env: dict[str, str]) -> str:
    """Root's own interpreter is often closed to others: a new environment that sees our packages."""
    site = [path for path in sys.path if path.endswith("site-packages")]
    probe = "import subprocess, sys, uvicorn, sqlalchemy, stoker; subprocess.run([sys.executable, '-c', ''], check=True)"
    for source in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        target = base / f"env-{abs(hash(source))}"
        if not Path(source).exists():
            continue
        subprocess.run([source, "-m", "venv", "--without-pip", str(target)], capture_output=True)
        for packages in target.glob("lib/python3*/site-packages"):
            (packages / "ours.pth").write_text("\n".join([*site, str(Path(stoker.__file__).parent.parent)]))
        python = str(target / "bin/python")
        if (
            subprocess.run([*prefix, python, "-c", probe], env=env, cwd="/", capture_output=True).returncode
            == 0
        ):
            return python
    pytest.skip("no interpreter with Stoker's packages that an ordinary user may run")
