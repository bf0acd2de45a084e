"""Commands that start, follow and control runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

NOW = 1_700_000_000.0


def line(
    text: str, *, t: float = NOW, stream: str = "stdout", task: str = "worker-0", **more: Any
) -> dict[str, Any]:
    return {"task": task, "attempt": 1, "stream": stream, "t": t, "text": text, "partial": False, **more}


def end(state: str = "succeeded", code: int | None = 0) -> dict[str, Any]:
    return {"end": {"state": state, "exit_code": code, "cause": "completed"}}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


# -- logs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(fake: Any, make_run: Any) -> Any:
    fake.runs = [make_run("digits-7f3k", "running")]
    return fake


def test_logs_of_both_streams_go_to_stdout(digits: Any, invoke: Any) -> None:
    digits.logs = [[line("one"), line("two", stream="stderr"), line("setup done", stream="stoker")]]
    result = invoke("logs", "digits-7f3k")
    assert (result.out, result.err) == ("one\ntwo\n", "setup done\n")


def test_logs_query(digits: Any, invoke: Any, clock: float) -> None:
    digits.logs = [[]]
    invoke(
        "logs",
        "digits-7f3k",
        "--since",
        "10m",
        "--tail",
        "5",
        "--task",
        "worker-1",
        "--attempt",
        "2",
        "--stderr",
    )
    query = digits.requests[-1][2]
    assert query == {
        "since": str(NOW - 600),
        "tail": "5",
        "task": "worker-1",
        "attempt": "2",
        "stream": "stderr",
        "follow": "0",
    }


def test_lines_of_several_tasks_have_the_name_of_their_task(digits: Any, invoke: Any) -> None:
    digits.runs[0]["job"]["workers"] = 2
    digits.logs = [[line("a"), line("b", task="worker-1")]]
    assert invoke("logs", "digits-7f3k").out == "[worker-0] a\n[worker-1] b\n"
    assert invoke("logs", "digits-7f3k", "--task", "worker-1").out == "a\nb\n"
    coloured = invoke("logs", "digits-7f3k", "--color", "always").out
    assert coloured == "\x1b[36m[worker-0]\x1b[0m a\n\x1b[35m[worker-1]\x1b[0m b\n"


def test_tasks_that_a_framework_added_count(digits: Any, invoke: Any) -> None:
    tasks = [{"name": "launcher-0"}, {"name": "worker-0"}]
    digits.runs[0]["attempts"] = [{"number": 1, "tasks": tasks}]
    digits.logs = [[line("a", task="launcher-0")]]
    assert invoke("logs", "digits-7f3k").out == "[launcher-0] a\n"


def test_unfinished_lines_are_joined_and_never_mixed(digits: Any, invoke: Any) -> None:
    digits.logs = [
        [
            line("10%", partial=True),
            line(" 20%", partial=True),
            line("warning", stream="stderr"),
            line(" 30%"),
            {"dropped": 3 << 20, "task": "worker-0"},
            line("prompt> ", partial=True),
        ]
    ]
    result = invoke("logs", "digits-7f3k")
    assert result.out == "10% 20%\nwarning\n 30%\nprompt> \n"
    assert result.err == "... 3 MiB of worker-0 log dropped ...\n"


def test_timestamps(digits: Any, invoke: Any, clock: float) -> None:
    digits.logs = [[line("a", t=NOW + 0.25)]]
    assert invoke("logs", "digits-7f3k", "-t").out == "2023-11-14T22:13:20.250 a\n"


def test_following_survives_the_servers_death_without_losing_or_repeating_a_line(
    digits: Any, invoke: Any
) -> None:
    first = [line(f"line {n}", t=NOW + n // 3) for n in range(10)]
    digits.logs = [
        first[:8],
        # Sent again from the time of the last line: two lines of that moment are known, the others are new.
        [record for record in first if record["t"] >= NOW + 2] + [line("line 10", t=NOW + 4)],
        [],
        [line("line 10", t=NOW + 4), line("line 11", t=NOW + 4), end()],
    ]
    result = invoke("logs", "-f", "digits-7f3k")
    assert result.out.splitlines() == [f"line {n}" for n in range(12)]
    asked = [query.get("since") for _, path, query, _ in digits.requests if path.endswith("/logs")]
    assert asked == [None, str(NOW + 2), str(NOW + 4), str(NOW + 4)]


def test_following_survives_a_clock_that_was_set_back(digits: Any, invoke: Any) -> None:
    times = [NOW, NOW + 1, NOW - 50, NOW - 50, NOW - 49]
    lines = [line(f"line {n}", t=t) for n, t in enumerate(times)]
    digits.logs = [lines[:4], [*lines, end()]]
    assert invoke("logs", "-f", "digits-7f3k").out.splitlines() == [f"line {n}" for n in range(5)]


def test_resume_follows_only_what_comes_after(digits: Any, invoke: Any) -> None:
    digits.runs[0] |= {"state": "failed", "attempts": [{"number": 1, "ended_at": NOW}]}
    digits.logs = [
        [
            line("old"),
            line("new", attempt=2, t=NOW + 9),
            line("retried", attempt=3, t=NOW + 20),
            end("failed", 4),
        ]
    ]
    result = invoke("resume", "digits-7f3k", "-f")
    assert (result.code, result.out) == (4, "new\nretried\n")
    query = next(query for _, path, query, _ in digits.requests if path.endswith("/logs"))
    assert query["since"] == str(NOW - 1.0)


def test_logs_json_gives_the_records(digits: Any, invoke: Any) -> None:
    digits.logs = [[line("a\x1b[2J"), end()]]
    result = invoke("logs", "digits-7f3k", "-f", "--json")
    assert [json.loads(text) for text in result.out.splitlines()] == [line("a\x1b[2J"), end()]
    assert "\x1b" not in result.out


# -- run -------------------------------------------------------------------------------------------------------


def test_an_attached_run_has_the_output_and_exit_code_of_the_training(
    fake: Any, invoke: Any, script: Path
) -> None:
    fake.logs = [[line("epoch 1"), line("warn", stream="stderr"), end("failed", 7)]]
    result = invoke("run", "train.py", "--epochs", "5")
    assert result.code == 7
    assert result.out == "epoch 1\n"
    assert result.err.splitlines()[:2] == ["digits-7f3k submitted", "warn"]
    [body] = fake.submitted
    assert body["job"] == {"run": ["python", "train.py", "--epochs", "5"]}
    assert len(body["code"]) == 64
    assert len(body["key"]) == 32
    assert body["record"]["host"]


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("succeeded", 0, 0), ("failed", 3, 3), ("failed", -9, 137), ("failed", 137, 137), ("failed", None, 1),
     ("stopped", None, 143), ("stopped", 0, 0), ("suspended", None, 75)],
)  # fmt: skip
def test_exit_codes(
    fake: Any, invoke: Any, script: Path, state: str, code: int | None, expected: int
) -> None:
    fake.logs = [[end(state, code)]]
    assert invoke("run", "-q", "train.py").code == expected


def test_flags_become_the_job_as_it_was_written(
    fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    (script.parent / "key.txt").write_text("from a file\n")
    result = invoke(
        "run", "-d", "--name", "digits", "--cpu", "0.5", "--memory", "500Mi", "--gpu", "1", "-e", "A=1", "--env", "B=x=y",
        "--secret", "HF_TOKEN", "--secret", "KEY=@key.txt", "--tag", "baseline", "--tag", "1.10", "--retries", "2",
        "--timeout", "12h", "--priority", "high", "--grace", "30s", "--checkpoint-keep", "3", "--setup", "pip list",
        "--setup-input", "a.txt", "--key", "k1", "--", "python", "train.py", "--gpu", "7",
    )  # fmt: skip
    assert (result.code, result.out) == (0, "digits-7f3k\n")
    [body] = fake.submitted
    assert body["key"] == "k1"
    assert body["secrets"] == {"HF_TOKEN": "s3cret", "KEY": "from a file"}
    assert body["job"] == {
        "run": ["python", "train.py", "--gpu", "7"],
        "name": "digits",
        "resources": {"cpu": 0.5, "memory": "500Mi", "gpu": 1},
        "env": {"A": "1", "B": "x=y"},
        "secrets": ["HF_TOKEN", "KEY"],
        "tags": ["baseline", "1.10"],
        "retries": 2,
        "timeout": "12h",
        "priority": "high",
        "grace": "30s",
        "checkpoint": {"keep": 3},
        "setup": {"run": "pip list", "inputs": ["a.txt"]},
    }


def test_a_name_alone_passes_the_variable_of_this_shell(
    fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DATA_ROOT", "/data=1")
    monkeypatch.setenv("GITHUB_TOKEN", "s3cret")
    monkeypatch.delenv("NOT_THERE", raising=False)
    assert invoke("run", "-d", "-e", "DATA_ROOT", "--env", "A=1", "-e", "GITHUB_TOKEN", "train.py").code == 0
    [body] = fake.submitted
    assert body["job"]["env"] == {"DATA_ROOT": "/data=1", "A": "1"}
    assert (body["job"]["secrets"], body["secrets"]) == (["GITHUB_TOKEN"], {"GITHUB_TOKEN": "s3cret"})
    refused = invoke("run", "-d", "-e", "NOT_THERE", "train.py")
    assert refused.code == 2 and len(fake.submitted) == 1
    assert "--env NOT_THERE: this shell has no variable of that name" in refused.err
    assert "--env NOT_THERE=VALUE" in refused.err


def test_variables_for_training_come_along_unless_the_environment_is_clean(
    fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HOME", "/data")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert invoke("run", "-d", "train.py").code == 0
    assert invoke("run", "-d", "--clean-env", "train.py").code == 0
    whole, clean = fake.submitted
    assert whole["record"]["environment"]["HF_HOME"] == "/data"
    assert "HF_HOME" not in clean["record"]["environment"]
    assert clean["record"]["environment"]["PATH"] == whole["record"]["environment"]["PATH"]
    assert "s3cret" not in json.dumps(fake.submitted), "STOKER_URL names the server of another machine"


def test_secrets_of_the_shell_go_to_runs_on_this_machine_only(monkeypatch: Any) -> None:
    from stoker.cli.submit_flow import _shell_secrets

    monkeypatch.delenv("STOKER_URL", raising=False)
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    given = {"WANDB_API_KEY": "other"}
    assert _shell_secrets({"run": "x"}, given) == {"HF_TOKEN": "s3cret"}
    assert _shell_secrets({"run": "x", "cluster": "local"}, given) == {"HF_TOKEN": "s3cret"}
    for more in ({"cluster": "lab"}, {"image": "torch"}, {"env": {"HF_TOKEN": "mine"}}):
        assert _shell_secrets({"run": "x", **more}, given) == {}


def test_rerun_and_resume_read_the_shells_secrets_again(
    fake: Any, invoke: Any, make_run: Any, monkeypatch: Any
) -> None:
    record = {"executable": "/usr/bin/python", "secrets": ["HF_TOKEN", "WANDB_API_KEY"]}
    fake.runs = [make_run("digits-7f3k", "failed", record=record, job={"run": ["true"]})]
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    again = invoke("rerun", "-d", "digits-7f3k")
    assert again.code == 0 and "note: WANDB_API_KEY: passed on by the shell that submitted" in again.err
    [body] = fake.submitted
    assert body["secrets"] == {"HF_TOKEN": "s3cret"} and body["record"]["secrets"] == ["HF_TOKEN"]
    fake.runs = [make_run("mnist-1a2b", "stopped", record=record, job={"run": ["true"]})]
    assert invoke("resume", "mnist-1a2b").code == 0
    assert [body["secrets"] for method, path, _, body in fake.requests if path.endswith("/resume")] == [
        {"HF_TOKEN": "s3cret"}
    ]


def test_the_plain_job_means_the_same_as_the_checked_one() -> None:
    """The unchecked job that `run` sends equals what the job file reader makes of the same flags."""
    from stoker.cli import job_flags
    from stoker.spec import Job

    found = {
        "name": "digits", "cpu": "500m", "memory": "1.5Gi", "gpu": "1", "env": ("A=1", "B="), "tag": ("1.10", "x"),
        "retries": "2", "timeout": "90", "priority": "-5", "grace": "0", "checkpoint_keep": "3", "exclusive": True,
        "setup": "pip list", "setup_input": ("a.txt",), "secret": ("T=@f",), "python": "3.10", "project": "1",
        "workers": "2..4", "lease": "1e3", "checkpoint_best_metric": "1.0", "checkpoint_best_mode": "max",
    }  # fmt: skip
    plain = job_flags.plain_job(found, ["python", "train.py"])
    assert Job.from_json(plain).to_json() == job_flags.checked_job(found, ["python", "train.py"], None)


def test_a_script_is_run_by_the_available_python(
    fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    tools = script.parent / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    for name in ("python3", "python", "tool.py"):
        (tools / name).touch(mode=0o755)
        invoke("run", "-d", "train.py")
        assert fake.submitted[-1]["job"]["run"] == ["python3" if name == "python3" else "python", "train.py"]
    invoke("run", "-d", "tool.py", "-x")
    assert fake.submitted[-1]["job"]["run"] == ["tool.py", "-x"]


def test_code_that_the_server_lacks_is_sent(fake: Any, invoke: Any, script: Path) -> None:
    fake.known_code = False
    assert invoke("run", "-d", "train.py").code == 0
    sent = [body for method, path, _, body in fake.requests if path == "/code/blobs"]
    assert len(sent) == 1
    assert b"print('hello')" in sent[0]


def test_a_detached_run_as_json_has_its_id(fake: Any, invoke: Any, script: Path) -> None:
    assert json.loads(invoke("run", "-d", "--json", "train.py").out)["id"] == "digits-7f3k"


def test_dry_run_starts_nothing_and_shows_no_secret(
    fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret-value")
    result = invoke("run", "--dry-run", "--secret", "TOKEN", "train.py")
    assert json.loads(result.out)["fits"] is True
    assert result.err == "note: a note\n"
    assert fake.submitted == []
    assert "s3cret-value" not in repr(result) + repr(fake.requests)


def test_a_mistake_found_by_the_server_names_the_flag(fake: Any, invoke: Any, script: Path) -> None:
    fake.errors["POST", "/runs"] = (422, {"code": "spec", "message": "resources.memory: bad", "details": {}})
    result = invoke("run", "--memory", "5 apples", "train.py")
    assert result.code == 2
    assert result.err.startswith("error: --memory"), result


def test_submit(fake: Any, invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "stoker.yaml").write_text("name: digits\nrun: python train.py\nresources: {cpu: 2}\n")
    result = invoke("submit", "stoker.yaml", "--set", "resources.gpu=1", "-d", "--json")
    assert json.loads(result.out)["id"] == "digits-7f3k"
    assert fake.submitted[0]["job"]["resources"] == {"cpu": 2.0, "gpu": 1}
    (tmp_path / "bad.yaml").write_text("name: digits\nrun: python train.py\nresorces: {cpu: 2}\n")
    wrong = invoke("submit", "bad.yaml", "-d")
    assert wrong.code == 2
    assert "bad.yaml:3" in wrong.err
    assert "resources" in wrong.err


def test_rerun_keeps_the_code_and_applies_the_flags(digits: Any, invoke: Any) -> None:
    digits.runs[0]["job"] = {"run": "python train.py", "name": "digits", "resources": {"memory": 1 << 30}}
    assert invoke("rerun", "digits-7f3k", "--set", "resources.memory=2Gi", "-d").out == "digits-7f3k\n"
    [body] = digits.submitted
    assert body["code"] == "1f3a" * 16
    assert body["job"]["resources"]["memory"] == 2 << 30
    assert body["record"]["rerun_of"] == "digits-7f3k"


def test_resume_reads_secrets_again(digits: Any, invoke: Any, monkeypatch: Any) -> None:
    digits.runs[0] |= {"state": "stopped", "job": {"secrets": ["HF_TOKEN"]}}
    result = invoke("resume", "digits-7f3k")
    assert (result.code, result.err) == (
        2,
        "error: the secret HF_TOKEN is not in the environment\n\nhint: export HF_TOKEN=..., or --secret HF_TOKEN=@FILE\n",
    )
    monkeypatch.setenv("HF_TOKEN", "again")
    assert invoke("resume", "digits-7f3k", "--set", "timeout=24h").out == "digits-7f3k\n"
    body = next(body for _, path, _, body in digits.requests if path.endswith("/resume"))
    assert body["secrets"] == {"HF_TOKEN": "again"}
    assert body["set"] == ["timeout=24h"]


# -- Ctrl-C ----------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first wait for a record is interrupted, as by Ctrl-C; a test can set the number of interrupts."""
    import queue

    from stoker.cli import watch_run

    left = {"interrupts": 1}
    real = queue.SimpleQueue

    class Interrupting:
        def __init__(self) -> None:
            self._real: Any = real()

        def put(self, item: Any) -> None:
            self._real.put(item)

        def get(self, timeout: float) -> Any:
            if left["interrupts"]:
                left["interrupts"] -= 1
                raise KeyboardInterrupt
            return self._real.get(timeout=timeout)

    monkeypatch.setattr(watch_run.queue, "SimpleQueue", Interrupting)
    return left


def test_ctrl_c_without_a_terminal_detaches(fake: Any, invoke: Any, script: Path, interrupted: Any) -> None:
    fake.logs = [[end()]]
    result = invoke("run", "train.py")
    assert result.code == 130
    assert result.err.splitlines() == [
        "digits-7f3k submitted",
        "detached; digits-7f3k goes on",
        "  stoker logs -f digits-7f3k",
        "  stoker stop digits-7f3k",
    ]
    assert not any(path.endswith("/stop") for _, path, _, _ in fake.requests)


def test_ctrl_c_asks(fake: Any, invoke: Any, script: Path, interrupted: Any) -> None:
    fake.logs = [[end("stopped", None)]]
    detached = invoke("run", "train.py", tty=80, typed="what?\nd\n")
    assert detached.code == 0
    assert detached.err.count("detach, stop or continue? [d/s/c] ") == 2
    interrupted["interrupts"] = 1
    assert invoke("run", "train.py", tty=80, typed="s\n").code == 143
    stops = [body for _, path, _, body in fake.requests if path.endswith("/stop")]
    assert stops == [{"kill": False}]
    interrupted["interrupts"] = 1
    fake.logs = [[end()]]
    assert invoke("run", "train.py", tty=80, typed="c\n").code == 0
    interrupted["interrupts"] = 2
    invoke("run", "train.py", tty=80, typed="s\n")
    stops = [body for _, path, _, body in fake.requests if path.endswith("/stop")]
    assert stops == [{"kill": False}, {"kill": False}, {"kill": True}]


def test_the_state_is_shown_while_nothing_is_printed(fake: Any, make_run: Any) -> None:
    from stoker.cli.watch_run import status_text

    run = make_run("digits-7f3k", "queued", place=2, reason="waits for 2 cpu")
    assert status_text(run) == "digits-7f3k queued (2nd in line): waits for 2 cpu"


# -- control ---------------------------------------------------------------------------------------------------


def test_stop_tries_every_run(digits: Any, invoke: Any) -> None:
    result = invoke("stop", "nothing-0000", "digits-7f3k", "--kill")
    assert (result.code, result.err) == (3, "error: no run 'nothing-0000'\ndigits-7f3k stopping\n")
    assert digits.requests[-1][3] == {"kill": True}


def test_wait_exits_as_the_training_did(fake: Any, invoke: Any, make_run: Any, clock: float) -> None:
    fake.runs = [
        make_run("a-1111", "succeeded"),
        make_run("b-2222", "failed", exit_code=9, reason="exit code 9"),
    ]
    result = invoke("wait", "a-1111", "b-2222")
    assert result.code == 9
    assert result.err == "a-1111 succeeded after 2m12s\nb-2222 failed after 2m12s: exit code 9\n"
    fake.runs.append(make_run("c-3333", "running"))
    slow = invoke("wait", "c-3333", "--timeout", "0.01")
    assert (slow.code, slow.err) == (124, "c-3333 has not ended after 0.01s\n")


def test_drill_reports_what_was_lost(digits: Any, invoke: Any) -> None:
    digits.metrics = {"loss": {"key": "loss", "last_step": 412}}
    digits.runs[0]["attempts"] = [{"number": 1, "generation": 1}]

    def back(run: dict[str, Any]) -> None:
        run["attempts"].append({"number": 2, "generation": 1, "resumed_from": "ck-4"})
        run["checkpoints"] = [{"id": "ck-4", "name": "last.pt", "step": 400, "created_at": time.time() - 30}]
        digits.events[run["id"]] = [{"t": NOW, "kind": "running", "text": "attempt 2 runs"}]

    digits.on_drill = back
    report = json.loads(invoke("drill", "digits-7f3k", "--json").out)
    assert {key: report[key] for key in ("resumed", "from_step", "last_step", "lost_steps", "attempt")} == {
        "resumed": True,
        "from_step": 400,
        "last_step": 412,
        "lost_steps": 12,
        "attempt": 2,
    }
    digits.runs[0]["attempts"] = [{"number": 1, "generation": 1}]
    result = invoke("drill", "digits-7f3k", "--how", "launcher")
    assert result.code == 0
    assert result.out.startswith("verdict: resumed in ")
    assert result.out.endswith(" from step 400; lost 12 steps, 30s of work\n")
    assert result.err.startswith("killed the launcher of digits-7f3k\n")


def test_drill_of_a_script_that_goes_on_from_its_own_files(digits: Any, invoke: Any) -> None:
    digits.runs[0]["attempts"] = [{"number": 1, "generation": 1}]

    def back(run: dict[str, Any]) -> None:
        number = run["attempts"][-1]["number"] + 1
        run["attempts"].append({"number": number, "generation": 1, "resumed_from": None})
        run["folder"] = {"files": 2, "newest": "out/last.pt", "newest_at": time.time() - 30, "attempt": 1}
        digits.events[run["id"]] = [{"t": NOW, "kind": "running", "text": "attempt 2 runs"}]

    digits.on_drill = back
    result = invoke("drill", "digits-7f3k")
    assert result.code == 0
    assert " in its working folder, newest file out/last.pt, written 30s before the kill\n" in result.out
    assert "hint:" not in result.err
    report = json.loads(invoke("drill", "digits-7f3k", "--json").out)
    assert report["from_file"] is None, "its folder has nothing of the attempt that was killed now"


def test_drill_of_a_run_that_does_not_come_back(digits: Any, invoke: Any) -> None:
    digits.on_drill = lambda run: run.update(state="failed", cause="user-error", reason="killed by SIGKILL")
    result = invoke("drill", "digits-7f3k")
    assert result.code == 1
    assert result.out.startswith("verdict: not resumed: failed after ")
    assert result.out.endswith(": killed by SIGKILL\n")
    refused = invoke("drill", "digits-7f3k")
    assert refused.err == (
        "error: digits-7f3k is failed, and only a running run can be drilled\n\n"
        "hint: stoker resume digits-7f3k starts it again.\n"
    )


# -- pull ------------------------------------------------------------------------------------------------------


def test_pull_continues_where_it_was_cut_off(digits: Any, invoke: Any, tmp_path: Path) -> None:
    data = os.urandom(200_000)
    digits.files = {"model/weights.pt": data, "plot.svg": b"<svg/>"}
    digits.cut_content_after = 70_000
    result = invoke("pull", "digits-7f3k")
    assert result.code == 0, result
    assert (tmp_path / "digits-7f3k/outputs/model/weights.pt").read_bytes() == data
    assert result.err == "2 files, 195 KiB (195 KiB fetched) in digits-7f3k/outputs\n"
    again = invoke("pull", "digits-7f3k")
    assert again.err == "2 files, 195 KiB (0 B fetched) in digits-7f3k/outputs\n"


def test_an_interrupted_pull_is_continued_by_the_next_one(digits: Any, invoke: Any, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    digits.files = {"w.pt": data}
    part = tmp_path / "there/w.pt.part"
    part.parent.mkdir()
    part.write_bytes(data[:60_000])
    assert (
        invoke("pull", "digits-7f3k", "-o", "there").err == "1 file, 97.7 KiB (39.1 KiB fetched) in there\n"
    )
    assert (part.parent / "w.pt").read_bytes() == data
    assert not part.exists()


def test_a_damaged_part_is_detected(digits: Any, invoke: Any, tmp_path: Path) -> None:
    digits.files = {"w.pt": b"x" * 1000}
    (tmp_path / "there").mkdir()
    (tmp_path / "there/w.pt.part").write_bytes(b"y" * 500)
    result = invoke("pull", "digits-7f3k", "-o", "there")
    assert result.code == 1
    assert (
        result.err
        == "error: 'w.pt' arrived damaged: its SHA-256 differs\n\nhint: It was removed; pull again.\n"
    )
    assert invoke("pull", "digits-7f3k", "-o", "there").code == 0


def test_pull_keeps_local_files_that_differ(digits: Any, invoke: Any, tmp_path: Path) -> None:
    digits.files = {"w.pt": b"new"}
    (tmp_path / "there").mkdir()
    (tmp_path / "there/w.pt").write_bytes(b"mine")
    result = invoke("pull", "digits-7f3k", "-o", "there")
    assert result.err == (
        "error: there/w.pt exists and differs from the run's file\n\nhint: Use --force to replace it, or -o DIR.\n"
    )
    assert (tmp_path / "there/w.pt").read_bytes() == b"mine"
    assert invoke("pull", "digits-7f3k", "-o", "there", "--force").code == 0
    assert (tmp_path / "there/w.pt").read_bytes() == b"new"


@pytest.mark.parametrize(
    "path", ["../evil", "/etc/evil", "a/../../evil", "a//b", "", "a\0b", "./a", "..", "a\\..\\b"]
)
def test_pull_writes_nothing_outside_its_folder(digits: Any, invoke: Any, tmp_path: Path, path: str) -> None:
    digits.file_list = [{"path": path, "size": 4, "sha256": None}]
    result = invoke("pull", "digits-7f3k", "-o", "there")
    assert result.code == 2
    assert "unsafe path" in result.err
    assert list(tmp_path.iterdir()) == []


def test_pull_of_a_checkpoint(digits: Any, invoke: Any, tmp_path: Path) -> None:
    digits.files = {"last.pt": b"state"}
    digits.runs[0]["checkpoints"] = [
        {"id": "ck-1", "name": "last.pt", "kept": True, "created_at": 1},
        {"id": "ck-2", "name": "last.pt", "kept": True, "created_at": 2},
        {"id": "ck-3", "name": "gone.pt", "kept": False, "created_at": 3},
    ]
    for argv, wanted in [
        ([], "ck-2"),
        (["--checkpoint", "ck-1"], "ck-1"),
        (["--checkpoint", "last.pt"], "ck-2"),
    ]:
        assert invoke("pull", "digits-7f3k", "--what", "checkpoints", *argv).code == 0
        assert (
            next(query for _, path, query, _ in reversed(digits.requests) if path.endswith("/files"))[
                "checkpoint"
            ]
            == wanted
        )
    wrong = invoke("pull", "digits-7f3k", "--checkpoint", "ck-3")
    assert (wrong.code, wrong.err) == (
        3,
        "error: digits-7f3k keeps no checkpoint 'ck-3'\n\nhint: Kept: ck-1, ck-2.\n",
    )


def test_pull_with_nothing_there(digits: Any, invoke: Any) -> None:
    assert invoke("pull", "digits-7f3k").err == (
        "error: digits-7f3k has no outputs\n\n"
        "hint: They are collected when the run ends; --what checkpoints and --what logs are there before.\n"
    )


def test_backup_create(fake: Any, invoke: Any, tmp_path: Path) -> None:
    assert invoke("backup", "create", "copy").out == f"{tmp_path}/copy\n"


# -- the framework ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "framework", "said"),
    [
        (["--workers", "2"], "torch", "framework: torch (train.py imports torch.distributed)\n"),
        (["--processes", "2"], "torch", "framework: torch (train.py imports torch.distributed)\n"),
        (["--workers", "1..4"], "torch", "framework: torch (train.py imports torch.distributed)\n"),
        (["--workers", "2", "--framework", "none"], "none", ""),
        (["--workers", "2", "-q"], "torch", ""),
        ([], None, ""),
    ],
)
def test_a_framework_is_guessed_from_the_script_for_several_processes(
    flags: list[str], framework: str | None, said: str, fake: Any, invoke: Any, script: Path, monkeypatch: Any
) -> None:
    script.write_text("import torch.distributed\nraise SystemExit('never run')\n")
    monkeypatch.chdir(script.parent)
    result = invoke("run", "-d", *flags, "train.py")
    assert fake.submitted[-1]["job"].get("framework") == framework
    assert result.err == said


def test_the_framework_of_a_job_file(fake: Any, invoke: Any, script: Path, monkeypatch: Any) -> None:
    script.write_text("from mpi4py import MPI\nimport torch.distributed\n")
    (script.parent / "stoker.yaml").write_text("run: python train.py\nworkers: 2\n")
    monkeypatch.chdir(script.parent)
    result = invoke("submit", "-d", "stoker.yaml")
    assert "framework" not in fake.submitted[-1]["job"]
    assert result.err == (
        "framework: none (train.py imports mpi4py and train.py imports torch.distributed; say which with --framework)\n"
    )


def test_only_shipped_files_are_read(fake: Any, invoke: Any, script: Path, monkeypatch: Any) -> None:
    inside = script.parent / "inside"
    inside.mkdir()
    script.write_text("import jax")
    (inside / "link.py").symlink_to(script)
    monkeypatch.chdir(inside)
    for command in (["python", "../train.py"], ["python", "link.py"]):
        invoke("run", "-d", "--no-code", "--workers", "2", "--", *command)
        assert "framework" not in fake.submitted[-1]["job"]
