"""Mistakes and surprises of a user's first day, beyond the planned journeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.settings import Home, Settings
from support.box import Box

LOUD = """
for line in range(60000):
    print(f"line {line:05d} of a log that is longer than the pieces it is kept in")
"""


def test_a_log_of_several_segments_is_shown_whole(box: Box) -> None:
    box.home.root.mkdir(parents=True)
    (box.home.root / "config.toml").write_text("[logs]\nsegment = 1000000\n")
    box.write("loud.py", LOUD)
    printed = [
        f"line {line:05d} of a log that is longer than the pieces it is kept in" for line in range(60000)
    ]
    assert box("run", "-q", "loud.py").stdout.splitlines() == printed
    assert len(list((box.home.runs).glob("*/logs/1/worker-0/*.log"))) > 1
    assert box("logs", "@last").stdout.splitlines() == printed
    assert box("logs", "@last", "--tail", "50000").stdout.splitlines() == printed[-50000:]


def test_the_dropped_size_of_a_log_counts_printed_bytes(box: Box) -> None:
    box.home.root.mkdir(parents=True)
    (box.home.root / "config.toml").write_text("[logs]\nbudget = 1000000\n")
    box.write("loud.py", LOUD)
    run = box.submit("loud.py")
    box.ended(run)
    records = [json.loads(line) for line in box("logs", run, "--json").stdout.splitlines()]
    dropped = [record["dropped"] for record in records if "dropped" in record]
    shown = sum(len(record["text"]) + 1 for record in records if "text" in record)
    assert len(dropped) == 1 and shown > 500_000
    assert dropped[0] + shown == 60000 * len(
        "line 00000 of a log that is longer than the pieces it is kept in\n"
    )


@pytest.mark.shared_server
def test_the_shortest_run_shows_what_it_used(box: Box) -> None:
    for run in [box.submit("--", "true") for _ in range(8)]:
        box.ended(run)
        usage = box.show(run)["attempts"][0]["usage"]
        assert usage["memory_peak"] > 0 and usage["cpu_seconds"] >= 0


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (
            "python train.py --epochs 5",
            "hint: Leave the quotes out: stoker run -- python train.py --epochs 5",
        ),
        ("python train.py | tee log.py", "hint: Have the shell read it: stoker run -- sh -c '...'"),
        ("python train.py", "hint: Leave the quotes out: stoker run -- python train.py"),
    ],
)
def test_a_command_line_in_quotes_is_refused_before_anything_starts(box: Box, line: str, hint: str) -> None:
    box.write("train.py", "")
    refused = box("run", line, code=2)
    assert f"there is no command named {line!r}" in refused.stderr and hint in refused.stderr
    assert box.server_pid() is None


@pytest.mark.shared_server
def test_stop_suspend_and_wait_say_what_they_did(box: Box) -> None:
    run = box.submit("--grace", "1s", "--", "sleep", "100")
    box.until(run, "running")
    assert box("wait", run, "--timeout", "1", code=124).stderr == f"{run} has not ended after 1s\n"
    assert "suspension requested; later: stoker resume" in box("suspend", run).stderr
    box.until(run, "suspended")
    box("resume", run)
    box.until(run, "running")
    assert box("stop", run).stderr == f"{run} running, stop requested\n"
    box.ended(run)
    assert box("stop", run).stderr == f"{run} stopped\n"


@pytest.mark.shared_server
def test_logs_of_an_unknown_task_or_attempt_are_an_error(box: Box) -> None:
    box("run", "-q", "--", "echo", "hello")
    assert box("logs", "@last", "--attempt", "1", "--task", "worker-0").stdout == "hello\n"
    assert "has no attempt 9" in box("logs", "@last", "--attempt", "9", code=3).stderr
    assert "hint: Tasks: worker-0." in box("logs", "@last", "--task", "worker-1", code=3).stderr


@pytest.mark.shared_server
def test_a_backup_that_cannot_be_written_says_where(box: Box) -> None:
    box("run", "-q", "--", "true")
    for target in ("/proc/nowhere/backup", str(box.write("file", "") / "backup")):
        refused = box("backup", "create", target, code=None)
        assert refused.returncode in (1, 2)
        assert f"cannot write a backup to '{target}'" in refused.stderr and "hint: " in refused.stderr


@pytest.mark.shared_server
def test_why_reads_braces_as_text_and_promises_no_checkpoint_that_is_not_there(box: Box) -> None:
    box("run", "-q", "--", "sh", "-c", "echo \"ModuleNotFoundError: No module named '{x}'\"; exit 1", code=1)
    assert "`setup: pip install {x}`" in box("why", "@last").stdout
    box("run", "-q", "--", "sh", "-c", "exit 4", code=4)
    assert "from the beginning: it has no checkpoint" in box("why", "@last").stdout
    box(
        "run",
        "-q",
        "--",
        "sh",
        "-c",
        "echo 1 > $STOKER_CHECKPOINT_DIR/s.tmp; mv $STOKER_CHECKPOINT_DIR/s.tmp $STOKER_CHECKPOINT_DIR/s.json; exit 4",
        code=4,
    )
    assert "goes on from its newest checkpoint" in box("why", "@last").stdout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[logs]\nbudget = '5Gi'", "logs.budget = '5Gi': must be a whole number, without quotes or unit"),
        ("[local]\ncpu = -3", "local.cpu = -3: must be more than 0"),
        ("[local]\nmemory_reserve = 3", "local.memory_reserve = 3: must be from 0 to 0.99"),
        ("[local]\nisolation = 'full'", "local.isolation = 'full': must be auto or none"),
        ("[local]\nenabled = 'no'", "local.enabled = 'no': must be true or false, without quotes"),
        ("[control]\npoll = nan", "control.poll = nan: must be more than 0"),
        ("[server]\nallowed_hosts = 'me'", "server.allowed_hosts = 'me': must be a list of texts"),
    ],
)
def test_an_invalid_setting_is_named(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "config.toml").write_text(line)
    with pytest.raises(SpecError) as caught:
        Settings.load(Home(tmp_path))
    assert caught.value.message == f"{tmp_path / 'config.toml'}: {problem}"


def test_all_settings_that_the_documentation_names_are_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    (tmp_path / "config.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    assert Settings.load(Home(tmp_path)).local.cpu == 6
