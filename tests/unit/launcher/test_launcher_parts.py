"""Single parts of the launcher: segments, journal, endings, environment, samples, bundle."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher import bundle, task_files
from stoker.launcher.journal import Journal
from stoker.launcher.process import exit_reason, spawn
from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.process.spawn import CannotStart
from stoker.launcher.telemetry import sampler
from stoker.launcher.telemetry.cgroup_usage import Cgroup
from stoker.launcher.telemetry.framing import Stream
from stoker.launcher.telemetry.output_log import OutputLog, Segments, clean
from stoker.task.formats import LogLine, Order, TaskInfo


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "log").mkdir()
    return str(tmp_path)


def order(**more: Any) -> Order:
    return Order(**{"seq": 4, "generation": 2, "verb": "run", "argv": ["x"], **more})


def info(**more: Any) -> TaskInfo:
    return TaskInfo(**{"run": "r", "attempt": 1, "task": "worker-0", **more})


class TestSegments:
    def test_budget_first_and_newest(self, directory: str) -> None:
        seed = 7
        print(f"seed {seed}")
        chance = random.Random(seed)
        segments = Segments(directory, budget=64 << 10, segment=8 << 10)
        count = 0
        for _ in range(400):
            batch = b""
            for _ in range(chance.randrange(60)):
                batch += LogLine("o", 1, b"%d %s" % (count, b"x" * chance.randrange(80))).encode()
                count += 1
            segments.write(batch)
            files = sorted(Path(directory, "log").iterdir())
            assert sum(path.stat().st_size for path in files) <= 64 << 10
            assert [path.stat().st_size for path in files] == [
                segments.sizes[n] for n in sorted(segments.sizes)
            ]
        numbers = [int(path.stem) for path in files]
        assert numbers[0] == 1 and numbers[1:] == list(range(numbers[1], numbers[-1] + 1))
        kept = b"".join(path.read_bytes() for path in files)
        assert segments.written == len(kept) + segments.dropped
        texts = [LogLine.decode(line).text for line in kept.split(b"\n")[:-1]]
        assert texts[0].startswith(b"0 ") and texts[-1].startswith(b"%d " % (count - 1))

    def test_continues_after_a_restart(self, directory: str) -> None:
        first = Segments(directory, 1 << 20, 1 << 18)
        first.write(LogLine("o", 1, b"one").encode())
        second = Segments(directory, 1 << 20, 1 << 18)
        second.write(LogLine("o", 1, b"two").encode())
        assert second.number == 2 and second.written == 16
        assert Path(directory, "log", "000001.log").read_bytes() == b"o 1 one\n"

    def test_without_its_directory_only_output_is_lost(self, directory: str) -> None:
        segments = Segments(directory, 1 << 20, 1 << 18)
        Path(directory, "log").rmdir()
        segments.write(b"o 1 x\n")
        assert segments.dropped == 6


def test_last_lines_are_whole_clean_and_few(directory: str) -> None:
    log = OutputLog(directory, 1 << 20, 1 << 18)
    reader, writer = os.pipe()
    log.attach(reader, Stream("o", body_redactor()))
    for number in range(30):
        os.write(writer, b"line %d \x1b[1mbold\x1b[0m\x07\n" % number)
    os.write(writer, b"y" * 40_000)
    os.close(writer)
    while log.streams:
        log.drain(reader)
    log.say("of no interest")
    lines = log.last_lines()
    assert len(lines) == 20
    assert lines[-2] == "line 29 bold" and lines[-1] == "y" * 2000


def body_redactor() -> Any:
    from stoker.launcher.telemetry.log_redaction import Redactor

    return Redactor()


def test_clean() -> None:
    assert clean(b"a\tb\x00\x1b]8;;http://x\x1b\\link\x1b[2K\xe2\x80\xae\x9b") == "a\tblink\ufffd"


class TestJournal:
    def test_finds_the_used_numbers_again(self, directory: str) -> None:
        journal = Journal(directory)
        assert (journal.used, journal.unfinished) == (0, None)
        journal.append({"k": "starting", "seq": 3, "generation": 1})
        journal.append({"k": "checkpoint", "number": 9})
        again = Journal(directory)
        assert again.used == 3 and again.unfinished is not None and again.unfinished["seq"] == 3
        again.append({"k": "ended", "seq": 3, "generation": 1, "kind": "exit"})
        assert Journal(directory).unfinished is None

    def test_a_failed_append_leaves_no_bytes(self, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        journal = Journal(directory)
        journal.append({"k": "starting", "seq": 1})
        before = Path(journal.path).read_bytes()
        real = os.write

        def full(fd: int, data: Any) -> int:
            if len(data) > 10:
                return real(fd, data[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="space"):
            journal.append({"k": "starting", "seq": 2, "generation": 1})
        assert Path(journal.path).read_bytes() == before and journal.used == 1


def exited(code: int) -> int:
    return code << 8


class TestEndings:
    @pytest.mark.parametrize(
        ("facts", "kind", "code", "number", "words"),
        [
            ({"status": exited(0)}, "exit", 0, None, ""),
            ({"status": exited(3)}, "exit", 3, None, ""),
            ({"status": signal.SIGSEGV}, "signal", None, 11, "SIGSEGV"),
            ({"status": signal.SIGKILL, "why": "stop"}, "stopped", None, 9, ""),
            ({"status": exited(0), "why": "stop"}, "stopped", 0, None, ""),
            ({"status": exited(1), "why": "timeout", "timeout": 60.0}, "timeout", 1, None, "60 s"),
            ({"status": signal.SIGKILL, "oom_kills": 1, "limit": 3 << 30}, "oom", None, 9, "3 GiB"),
            ({"status": exited(1), "oom_kills": 1, "limit": 1 << 20}, "oom", 1, None, "1 MiB"),
            ({"status": exited(0), "oom_kills": 1, "limit": 1 << 20}, "exit", 0, None, "ran on"),
            ({"status": signal.SIGKILL, "why": "memory", "limit": 1024}, "oom", None, 9, "1 KiB"),
            (
                {"status": signal.SIGKILL, "why": "pids", "pids": 5},
                "signal",
                None,
                9,
                "more than 5 processes",
            ),
            ({"status": exited(2), "setup": True}, "setup", 2, None, "code 2"),
            ({"status": signal.SIGKILL, "setup": True, "oom_kills": 1}, "oom", None, 9, "the setup"),
            ({"status": exited(1), "full": ["/data"]}, "disk", 1, None, "/data"),
            ({"failure": CannotStart(2, "no such command", 127)}, "start-failed", 127, None, "no such"),
            ({"failure": CannotStart(28, "no room", 126)}, "disk", 126, None, "no room"),
        ],
    )
    def test_kinds(
        self, facts: dict[str, Any], kind: str, code: int | None, number: int | None, words: str
    ) -> None:
        found = exit_reason.ending(order(), exit_reason.ExitFacts(**facts))
        assert (found.kind, found.code, found.signal) == (kind, code, number)
        assert words in found.message and (words or not found.message)
        assert (found.seq, found.generation) == (4, 2)


class TestEnvironment:
    def test_variables_of_the_launcher_win(self) -> None:
        asked = order(env={"STOKER_RUN": "forged", "STOKER_RESUME_FROM": "/old", "PYTHONUNBUFFERED": "0"})
        env = spawn.environment("/d", info(), asked, {"S": "x"}, "/bundle")
        assert env["STOKER_RUN"] == "r" and "STOKER_RESUME_FROM" not in env
        assert env["PYTHONUNBUFFERED"] == "0" and env["S"] == "x"
        assert env["PYTHONPATH"] == "/bundle" and env["CUDA_VISIBLE_DEVICES"] == ""

    @pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
    def test_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        assert spawn.affinity(info()) is None
        assert spawn.affinity(info(cpu=0.5)) is None and spawn.affinity(info(cpu=1.5)) is None
        assert spawn.affinity(info(cpu=8)) is None and spawn.affinity(info(cpu=99)) is None
        assert spawn.affinity(info(cpu=2, cgroup={"cpu": "/c"})) is None
        chosen = [spawn.affinity(info(cpu=2.0, task=f"worker-{n}")) for n in range(20)]
        assert all(cores is not None and len(cores) == 2 for cores in chosen)
        assert len({tuple(sorted(cores or ())) for cores in chosen}) > 3


class TestCgroup:
    def test_version_1(self, tmp_path: Path) -> None:
        (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
        (tmp_path / "memory.usage_in_bytes").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("cache 5\ntotal_inactive_file 300\n")
        (tmp_path / "memory.max_usage_in_bytes").write_text("2000\n")
        (tmp_path / "cpuacct.usage").write_text("1500000000\n")
        found = Cgroup({"version": 1, "memory": str(tmp_path), "cpuacct": str(tmp_path), "pids": "/no"})
        assert (found.oom_kills(), found.memory(), found.memory_peak()) == (2, 700, 2000)
        assert found.cpu_seconds() == 1.5 and found.pids() is None

    def test_version_2(self, tmp_path: Path) -> None:
        (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
        (tmp_path / "memory.current").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("inactive_file 1\n")
        (tmp_path / "memory.peak").write_text("1200\n")
        (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
        (tmp_path / "pids.current").write_text("7\n")
        where = dict.fromkeys(("memory", "cpu", "pids"), str(tmp_path))
        found = Cgroup({"version": 2, **where})
        assert (found.oom_kills(), found.memory(), found.memory_peak(), found.pids()) == (3, 999, 1200, 7)
        assert found.cpu_seconds() == 2.5


def test_samples_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "FULL_RATE", 1000)
    monkeypatch.setattr(sampler, "MEBIBYTE", 1000)
    taken = sampler.Sampler(str(tmp_path), info(), ProcessTree())
    for number in range(5000):
        taken._append({"n": number})
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert (tmp_path / "samples.jsonl").stat().st_size < 12_000
    assert lines[0] == '{"n":0}' and int(lines[-1][5:-1]) > 2000


def test_usage_has_current_and_peak_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = sampler.Sampler(str(tmp_path), info(), ProcessTree())
    begun = taken._next_sample
    spent = iter((1.5, 2.0))
    monkeypatch.setattr(taken, "_cpu_seconds", lambda: next(spent, 2.0))
    taken._last_cpu = (begun, 0.0)
    taken.gpus.latest = [{"id": "a", "use": 90, "memory": 5}, {"id": "b", "use": 70, "memory": 9}]
    taken.poll(begun + 1.0)
    taken.poll(begun + 100.0)
    assert (taken.usage["cpu"], taken.usage["cpu_peak"]) == (0.01, 1.5)
    assert (taken.usage["gpu"], taken.usage["gpu_peak"]) == (80.0, 90)
    taken.finish(100.0, None)
    assert not {"cpu", "gpu"} & set(taken.usage) and taken.usage["cpu_peak"] == 1.5


def test_bundle_is_complete_and_finds_an_installed_stoker(tmp_path: Path) -> None:
    """Modules of the bundle import without the rest of Stoker; where the rest is installed, it is found
    too."""
    path = bundle.write(str(tmp_path))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import stoker, stoker.launcher.forkserver.server, stoker.task.local_directory\n"
        "print(stoker.__file__)\ntry:\n    import stoker.errors; print('more')\nexcept ImportError: print('alone')"
    )
    source = str(Path(__file__).parents[3] / "src")
    for more, words in ((["-S", "-E"], "alone"), ([], "more")):
        done = subprocess.run(
            [sys.executable, *more, "-c", script, path],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env={"PYTHONPATH": source},
        )
        assert done.stdout == f"{path}/stoker/__init__.py\n{words}\n"


@pytest.mark.parametrize("what", ["pipe", "terabyte", "directory", "link", "nested", "nothing"])
def test_json_that_user_code_replaced_is_none_and_is_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "order.json"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    elif what == "directory":
        path.mkdir()
    elif what == "link":
        (tmp_path / "other").write_text("{}")
        path.symlink_to(tmp_path / "other")
    elif what == "nested":
        path.write_text("[" * 100_000)
    assert task_files.read_json(str(path)) is None


def test_a_directory_in_the_place_of_the_status_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    (path / "x").mkdir(parents=True)
    task_files.write_json(str(path), {"phase": "ended"})
    assert task_files.read_json(str(path)) == {"phase": "ended"}
