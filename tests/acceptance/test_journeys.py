"""A user's journeys through the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.errors import StokerError
from support.box import Box
from support.waiting import wait


@pytest.mark.shared_server
def test_run_streams_and_exits_as_the_training_did(box: Box) -> None:
    box.write(
        "train.py", "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(int(sys.argv[1]))\n"
    )
    done = box("run", "train.py", "7", code=7)
    assert done.stdout == "out\n"
    assert "err" in done.stderr
    box("run", "--", "true", code=0)
    box("run", "--", "/bin/sh", "-c", "kill -TERM $$", code=128 + 15)
    box("run", "--", "no-such-command", code=127)


def test_detached_wait_show_and_list(box: Box) -> None:
    box.write("train.py", "import sys; print('hello'); sys.exit(3)\n")
    run = box.submit(
        "--name", "digits", "--cpu", "1", "--memory", "500Mi", "--tag", "blue", "--", "python", "train.py"
    )
    assert run.startswith("digits-")
    box("wait", run, code=3)
    shown = box.json("show", run)
    assert (shown["id"], shown["state"], shown["exit_code"]) == (run, "failed", 3)
    assert shown["attempts"][0]["cause"] == "user-error"
    assert shown["attempts"][0]["evidence"]["exit_code"] == 3
    assert shown["job"]["resources"]["memory"] == 500 << 20
    assert shown["attempts"][0]["usage"]["memory_peak"] > 0
    other = box.submit("--", "true")
    box("wait", other)
    assert [entry["id"] for entry in box.json("ps")] == [other, run]
    assert [entry["id"] for entry in box.json("ps", "--filter", "tag=blue")] == [run]
    assert [entry["id"] for entry in box.json("ps", "--filter", "state=failed")] == [run]
    assert [entry["id"] for entry in box.json("ps", "--filter", "name~=igi")] == [run]
    assert "exit code 3" in box("why", run).stdout


def test_a_job_file_with_overrides_and_a_dry_run(box: Box) -> None:
    box.write("stoker.yaml", "name: filed\nrun: echo $SOURCE\nenv: {SOURCE: file}\n")
    plan = json.loads(box("submit", "stoker.yaml", "--dry-run", "--json").stdout)
    assert plan["fits"] and plan["job"]["name"] == "filed"
    assert box.json("ps") == []
    assert box("submit", "stoker.yaml", "--set", "env.SOURCE=flag").stdout == "flag\n"


@pytest.mark.shared_server
def test_editing_after_the_submit_changes_nothing(box: Box) -> None:
    box.write(
        "train.py", "import time, pathlib\nwhile not pathlib.Path('/tmp').exists(): pass\nprint('first')\n"
    )
    blocker = box.submit("--cpu", str(os.cpu_count()), "--", "sleep", "600")
    box.until(blocker, "running")
    run = box.submit("train.py")
    box.write("train.py", "print('second')\n")
    box("stop", blocker, "--kill")
    box("wait", run)
    assert box("logs", run).stdout == "first\n"


@pytest.mark.shared_server
def test_ignored_files_are_not_shipped(box: Box) -> None:
    box.write(".gitignore", "*.bin\n")
    box.write(".stokerignore", "private/\n")
    box.write("big.bin", "x")
    box.write("private/notes.txt", "x")
    box.write("kept/data.txt", "x")
    done = box("run", "--", "find", ".", "-type", "f")
    assert sorted(done.stdout.split()) == ["./.gitignore", "./.stokerignore", "./kept/data.txt"]


@pytest.mark.shared_server
def test_what_ran_is_recorded(box: Box) -> None:
    box.write("train.py", "print(1)\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *args], cwd=box.work, check=True, env=box.env)
    box.write("train.py", "print(2)\n")
    run = box.submit("train.py")
    box("wait", run)
    record = wait(lambda: box.show(run)["record"], lambda found: "packages" in found)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=box.work, capture_output=True, text=True, check=True
    )
    assert record["git"]["commit"] == head.stdout.strip()
    assert "+print(2)" in record["git"]["diff"]
    assert any(package.startswith("numpy==") for package in record["packages"])
    assert box.show(run)["command"] == ["python", "train.py"]


def test_a_secret_reaches_the_process_and_nothing_else(box: Box) -> None:
    box.env["API_KEY"] = "sesame-open-1234"
    box.write("train.py", "import os, time\nprint(len(os.environ['API_KEY']))\ntime.sleep(1)\n")
    run = box.submit("--secret", "API_KEY", "train.py")
    box.until(run, "running", "succeeded")
    box("wait", run)
    assert box("logs", run).stdout == "16\n"
    for command in (
        ("show", run),
        ("show", run, "--json"),
        ("ps", "--json"),
        ("why", run),
        ("server", "logs"),
    ):
        done = box(*command)
        assert "sesame" not in done.stdout + done.stderr
    wait(lambda: not (box.home.tasks / run).exists())
    box("server", "stop")
    holding = [p for p in box.home.root.rglob("*") if p.is_file() and b"sesame-open" in p.read_bytes()]
    assert holding == []


@pytest.mark.shared_server
def test_setup_runs_once_for_its_inputs(box: Box) -> None:
    counter = box.work / "count"
    box.write("requirements.txt", "one\n")
    setup = f"echo ran >> {counter}; python -c 'import sys; print(sys.prefix)'; touch made"
    box.write(
        "job.yaml",
        f"run: test -e made && echo ready\nsetup:\n  run: {setup!r}\n  inputs: [requirements.txt]\n",
    )
    assert box("submit", "job.yaml").stdout.endswith("ready\n")
    assert box("submit", "job.yaml").stdout == "ready\n"
    assert counter.read_text() == "ran\n"
    box.write("requirements.txt", "two\n")
    box("submit", "job.yaml")
    assert counter.read_text() == "ran\nran\n"
    box.write("job.yaml", "run: echo never\nsetup: echo oh no; exit 9\n")
    done = box("submit", "job.yaml", code=9)
    assert "never" not in done.stdout
    assert box.json("ps", "-n", "1")[0]["cause"] == "setup"


@pytest.mark.shared_server
def test_stop_is_graceful_and_resume_goes_on(box: Box) -> None:
    box.write(
        "train.py",
        "import os, signal, sys, time, pathlib\n"
        "state = pathlib.Path(os.environ['STOKER_CHECKPOINT_DIR']) / 'state.txt'\n"
        "if state.exists(): print('resumed', state.read_text()); sys.exit(0)\n"
        "def polite(*_):\n"
        "    tmp = state.with_suffix('.tmp'); tmp.write_text('41'); tmp.rename(state)\n"
        "    print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, polite)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n",
    )
    run = box.submit("train.py")
    wait(lambda: "ready" in box("logs", run).stdout)
    box("stop", run)
    box.until(run, "stopped")
    assert "saved" in box("logs", run).stdout
    box("resume", run)
    assert box.ended(run)["state"] == "succeeded"
    assert box("logs", run, "--attempt", "2").stdout == "resumed 41\n"


@pytest.mark.shared_server
def test_stop_ends_the_whole_tree(box: Box) -> None:
    box.write(
        "train.py",
        "import subprocess, sys, time, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['setsid', 'sleep', '4711'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n",
    )
    run = box.submit("--grace", "1s", "train.py")
    wait(lambda: box("logs", run).stdout)
    box("stop", run)
    shown = box.until(run, "stopped")
    assert shown["attempts"][0]["cause"] == "stopped"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _command(pid) == ["sleep", "4711"]]


@pytest.mark.shared_server
def test_outputs_checkpoints_and_logs_come_back_verified(box: Box, tmp_path: Path) -> None:
    box.write(
        "train.py",
        "import os, pathlib\n"
        "out = pathlib.Path(os.environ['STOKER_OUTPUT_DIR'])\n"
        "(out / 'plots').mkdir()\n"
        "(out / 'model.bin').write_bytes(b'm' * 3_000_000)\n"
        "(out / 'plots/loss.svg').write_text('<svg/>')\n"
        "path = pathlib.Path(os.environ['STOKER_CHECKPOINT_DIR']) / 'step-5.json'\n"
        "path.write_text('{}')\n"
        "print('done')\n",
    )
    run = box.submit("train.py")
    box("wait", run)
    target = tmp_path / "pulled"
    box("pull", run, "-o", str(target))
    assert (target / "model.bin").read_bytes() == b"m" * 3_000_000
    assert (target / "plots/loss.svg").exists()
    (target / "model.bin").write_bytes(b"x" * 10)
    box("pull", run, "-o", str(target), code=1)
    box("pull", run, "-o", str(target), "--force")
    assert (target / "model.bin").stat().st_size == 3_000_000
    box("pull", run, "--what", "checkpoints", "-o", str(tmp_path / "ck"))
    assert [p.name for p in (tmp_path / "ck").rglob("*.json")] == ["step-5.json"]
    box("pull", run, "--what", "logs", "-o", str(tmp_path / "logs"))
    assert any(p.is_file() for p in (tmp_path / "logs").rglob("*"))


@pytest.mark.shared_server
def test_metrics_are_listed_and_plotted(box: Box) -> None:
    box.write("train.py", "import stoker\nfor n in range(50): stoker.report(step=n, loss=1 / (n + 1))\n")
    run = box.submit("train.py")
    box("wait", run)
    listed = box.json("metrics", run)
    assert "loss" in json.dumps(listed)
    plot = box("metrics", run, "loss").stdout
    assert len(plot.splitlines()) > 4


@pytest.mark.shared_server
def test_a_progress_bar_and_binary_junk_do_not_break_the_log(box: Box) -> None:
    box.write(
        "train.py",
        "import sys, time\n"
        "for n in range(20000): sys.stdout.write(f'\\r{n}%')\n"
        "sys.stdout.write('\\n'); sys.stdout.flush()\n"
        "sys.stdout.buffer.write(bytes(range(256)) + b'\\n\\x1b]0;owned\\x07\\x1b[2Jend\\n')\n",
    )
    done = box("run", "train.py")
    assert len(done.stdout.splitlines()) < 30
    assert "19999%" in done.stdout
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout


def test_drill_reports_the_recovery(box: Box) -> None:
    box.write(
        "train.py",
        "import os, time, stoker\n"
        "first = int(stoker.checkpoint.load() or b'-1') + 1\n"
        "for step in range(first, 100000):\n"
        "    stoker.checkpoint.save('state.txt', str(step), step=step)\n"
        "    stoker.report(step=step, x=step)\n"
        "    time.sleep(0.02)\n",
    )
    run = box.submit("--retries", "9", "train.py")
    wait(lambda: [c for c in box.show(run)["checkpoints"] if c["kept"]])
    for how in ("process", "launcher", "preempt", "server"):
        done = box("drill", run, "--how", how, "--json")
        report = json.loads(done.stdout)
        assert report["resumed"] is True, report
        if how == "server":
            assert report["kept_going"], report
        else:
            assert report["from_checkpoint"], report
        box.until(run, "running")
    box("stop", run, "--kill")


@pytest.mark.shared_server
def test_rerun_applies_the_given_changes(box: Box) -> None:
    box.write("train.py", "import os; print(os.environ.get('LR'))\n")
    run = box.submit("--env", "LR=1", "train.py")
    box("wait", run)
    box.write("train.py", "print('changed afterwards')\n")
    done = box("rerun", run, "--set", "env.LR=2")
    assert done.stdout == "2\n"


@pytest.mark.shared_server
def test_memory_over_the_limit_is_oom_and_the_neighbour_goes_on(box: Box) -> None:
    box.write("hog.py", "data = []\nwhile True: data.append(bytearray(10_000_000))\n")
    neighbour = box.submit(
        "--cpu", "0.5", "--memory", "200Mi", "--", "/bin/sh", "-c", "for i in $(seq 40); do sleep 0.1; done"
    )
    hog = box.submit("--cpu", "0.5", "--memory", "150Mi", "hog.py")
    shown = box.ended(hog)
    assert (shown["state"], shown["cause"]) == ("failed", "oom")
    assert shown["attempts"][0]["evidence"]["limit"] == 150 << 20
    assert shown["attempts"][0]["evidence"]["peak"] > 100 << 20
    assert box.ended(neighbour)["state"] == "succeeded"
    assert "memory" in box("why", hog).stdout


def test_two_homes_never_meet(box: Box, tmp_path: Path) -> None:
    other = Box(tmp_path / "other")
    try:
        run = box.submit("--", "true")
        box("wait", run)
        assert other.json("ps") == []
        assert other.server_pid() != box.server_pid()
        other("show", run, code=None)
        assert run not in other("ps", "-a").stdout
    finally:
        other.close()


def test_this_machine_switched_off_runs_nothing_new_and_ends_what_runs(box: Box) -> None:
    old = box.submit("--", "sh", "-c", "trap 'echo saved; exit 0' TERM; while :; do sleep 0.1; done")
    box.until(old, "running")
    box("server", "stop")
    box.home.config.write_text("[local]\nenabled = false\n")
    for words in ((), ("--cluster", "local"), ("--cluster", "any")):
        refused = box("run", *words, "--", "true", code=None)
        assert refused.returncode != 0 and "runs nothing on its own machine" in refused.stderr, refused
    assert box.json("nodes") == [] and box("nodes").returncode == 0
    assert box.json("cluster", "ls")[0]["nodes"] == 0
    assert box.show(old)["state"] == "running", "the running run continues"
    box("stop", old)
    assert box.ended(old)["state"] == "stopped"
    assert "saved" in box("logs", old).stdout

    box("server", "stop")
    box.home.config.write_text("[server]\ncluster = 'lab'\n[local]\nenabled = false\n")
    refused = box("run", "--", "true", code=None)
    assert "no cluster 'lab' here" in refused.stderr, "a run that names no engine goes to the server's"


def test_an_unchanged_tree_is_not_sent_again(box: Box) -> None:
    for number in range(50):
        box.write(f"data/{number}.txt", str(number) * 100_000)
    first = box("run", "--", "true")
    before = _blob_bytes(box)
    assert before > 4_000_000
    box("run", "--", "true")
    assert _blob_bytes(box) == before
    assert first.returncode == 0


@pytest.mark.shared_server
def test_ctrl_c_without_a_terminal_detaches_or_stops_as_documented(box: Box) -> None:
    box.write("train.py", "import time\nprint('go', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "run", "train.py"],
        cwd=box.work, env=box.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        process.send_signal(2)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.communicate()
    run = box.json("ps")[0]
    assert run["state"] in ("running", "stopping", "stopped")
    assert process.returncode != 0


@pytest.mark.shared_server
@pytest.mark.parametrize("args", [("ps",), ("nodes",), ("doctor",), ("server", "status")])
def test_every_list_can_be_json(box: Box, args: tuple[str, ...]) -> None:
    box("server", "start")
    json.loads(box(*args, "--json", code=None).stdout)


def _command(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _blob_bytes(box: Box) -> int:
    time.sleep(0)
    return sum(path.stat().st_size for path in box.home.blobs.rglob("*") if path.is_file())


_SHOWN = ("engine", "setups", "tasks")
"""The parts of the home that a run sees, reduced to what it needs."""


def test_a_run_sees_neither_the_servers_key_nor_other_runs(box: Box) -> None:
    """Needs mount namespaces. A run as root could undo it, as docs/security.md states. A run that started
    before the first secret existed does not see it either."""
    box.env["API_KEY"] = "sesame-open-1234"
    home = box.home.root
    box.write(
        "early.sh",
        "exec 2>/dev/null; echo up; while [ ! -e $STOKER_TASK_DIR/go ]; do sleep 0.05; done\n"
        f"grep -rl sesame-[o]pen {home}; cat {home}/config.toml; ls {home}/engine; ls {home}; echo looked\n",
    )
    early = box.submit("--", "sh", "early.sh")
    wait(lambda: "up" in box("logs", early).stdout)
    other = box.submit("--secret", "API_KEY", "--", "sleep", "600")
    box.until(other, "running")
    assert list(box.home.secrets.iterdir())
    box.home.config.write_text("# sesame\n")
    (box.home.tasks / early / "1" / "worker-0" / "go").touch()
    box("wait", early)
    assert box("logs", early).stdout.split() == ["up", "bundle", *_SHOWN, "looked"]
    box.write(
        "look.sh",
        f"cat {home}/token; ls {home}/secrets; ls {home}/tasks; cat {home}/tasks/{other}/1/worker-0/secrets.json\n"
        "echo mine > $STOKER_OUTPUT_DIR/x; ls $STOKER_TASK_DIR | grep -c order.json\n",
    )
    done = box("run", "--name", "nosy", "--", "sh", "look.sh")
    assert "sesame" not in done.stdout + done.stderr
    seen = done.stdout.split()
    assert len(seen) == 2 and seen[0].startswith("nosy-") and seen[1] == "1", done.stdout
    assert box.json("show", "@last")["outputs"]["files"] == 1
    box("stop", other, "--kill")


@pytest.mark.shared_server
def test_a_secret_in_names_is_taken_out_and_the_checkpoint_is_found_again(box: Box) -> None:
    box.env["API_KEY"] = "sesame-open-1234"
    box.write(
        "train.py",
        "import os, stoker\n"
        "key, there = os.environ['API_KEY'], os.environ['STOKER_CHECKPOINT_DIR']\n"
        "before = os.environ.get('STOKER_RESUME_FROM')\n"
        "if before:\n"
        "    assert before == f'{there}/model-{key}.pt' and open(before).read() == 'weights', os.listdir(there)\n"
        "    raise SystemExit(0)\n"
        "stoker.report(step=1, plain=2.0, **{f'loss/{key}': 1.0})\n"
        "open(f'{there}/.tmp', 'w').write('weights')\n"
        "os.rename(f'{there}/.tmp', f'{there}/model-{key}.pt')\n"
        "raise SystemExit(f'no {key} here')\n",
    )
    run = box.submit("--secret", "API_KEY", "--retries", "1", "train.py")
    box("wait", run)
    shown = box.json("show", run)
    (checkpoint,) = shown["checkpoints"]
    assert checkpoint["name"] == "model-[secret API_KEY].pt"
    assert checkpoint["metrics"] == {"loss/[secret API_KEY]": 1.0, "plain": 2.0}
    assert "sesame" not in json.dumps(shown)
    wait(lambda: not (box.home.tasks / run).exists())
    box("server", "stop")
    holding = [p for p in box.home.root.rglob("*") if p.is_file() and b"sesame-open" in p.read_bytes()]
    assert holding == []


def test_secrets_that_no_environment_can_hold_are_refused(box: Box) -> None:
    (box.work / "key").write_bytes(b"sesame\0open")
    done = box("run", "--secret", "API_KEY=@key", "--", "true", code=2)
    assert "API_KEY" in done.stderr and "NUL" in done.stderr and "hint:" in done.stderr
    assert "sesame" not in done.stdout + done.stderr
    box("ps")
    for key, value in (("nul", "sesame\0open"), ("half", "sesame\ud800open")):
        with pytest.raises(StokerError) as refused:
            box.client().submit(
                key=key, job={"run": "true", "secrets": ["API_KEY"]}, secrets={"API_KEY": value}
            )
        assert "API_KEY" in str(refused.value) and "sesame" not in str(refused.value)
