"""Operations on a run in a cluster: resizing, keeping, entering, dry runs, nodes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from boxes import ClusterBox, box

from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(600)

LOOP = "import time\nprint('here', flush=True)\nwhile True: time.sleep(0.1)\n"


def running(box: ClusterBox, *flags: str) -> str:
    box.write("loop.py", LOOP)
    run = box.there("--grace", "1s", *flags, "--", "python3", "loop.py")
    wait(lambda: "here" in box("logs", run).stdout, limit=180)
    return run


def limits(box: ClusterBox, run: str) -> dict[str, Any]:
    main = next(one for one in box.pods(run)[0]["spec"]["containers"] if one["name"] == "main")
    found: dict[str, Any] = main["resources"]["limits"]
    return found


def test_resizing_in_place(box: ClusterBox) -> None:
    run = running(box, "--cpu", "0.2", "--memory", "128Mi")
    answer = box.json("resize", run, "--cpu", "0.4", "--memory", "192Mi")
    assert answer["how"] == "in place", answer
    wait(lambda: limits(box, run)["memory"] in ("192Mi", str(192 << 20)), limit=60)
    shown = box.show(run)
    assert len(shown["attempts"]) == 1 and shown["job"]["resources"]["memory"] == 192 << 20


def test_a_failed_task_is_kept_and_entered(box: ClusterBox) -> None:
    box.write("fail.py", "open('clue.txt', 'w').write('it was the butler')\nraise SystemExit(3)\n")
    run = box.there("--keep-on-failure", "10m", "--", "python3", "fail.py")
    assert box.ended(run, limit=180)["state"] == "failed"
    looked = box("shell", run, "cat", "clue.txt")
    assert "it was the butler" in looked.stdout
    box("stop", run)
    wait(lambda: not box.pods(run), limit=120)


def test_a_dry_run_is_what_the_api_server_accepts(box: ClusterBox) -> None:
    box.env["TOKEN"] = "very-secret-word"
    shown = box(
        "run", "--cluster", "lab", "--dry-run", "--gpu", "1", "--secret", "TOKEN", "--", "python3", "-c", "1"
    )
    assert "very-secret-word" not in shown.stdout
    said = box.cluster.kubectl(
        "-n", box.namespace, "apply", "--dry-run=server", "-f", "-", input=shown.stdout
    )
    assert "pod/" in said and "secret/" in said
    assert not box.pods()


def test_nodes_and_top_show_who_has_the_gpus(box: ClusterBox) -> None:
    nodes = [node for node in box.json("nodes") if node["cluster"] == "lab" and node["gpus"]]
    if not nodes:
        pytest.skip("the cluster has no GPUs to count")
    run = running(box, "--gpu", "1")
    shown = next(node for node in box.json("nodes") if any(one["id"] == run for one in node["runs"]))
    assert shown["used"]["gpus"] == 1
    text = box("nodes").stdout
    assert shown["name"] in text and run in text
    assert run in box("top").stdout
    plan = json.loads(box("top", "--json").stdout)
    assert plan and isinstance(plan, list)


def test_a_run_without_a_launcher(box: ClusterBox) -> None:
    run = box.there("--launcher", "none", "--", "sh", "-c", "echo plain; echo lines >&2; exit 7")
    shown = box.ended(run, limit=180)
    assert (shown["state"], shown["exit_code"], shown["cause"]) == ("failed", 7, "user-error")
    assert sorted(box("logs", run).stdout.split() + box("logs", run).stderr.split())[:2] == ["lines", "plain"]


def test_kubectl_is_not_needed_but_for_a_shell(box: ClusterBox) -> None:
    box.env["PATH"] = ":".join(p for p in box.env["PATH"].split(":") if not _has_kubectl(p))
    box.kill_server()
    run = running(box)
    said = box("shell", run, code=None)
    assert said.returncode != 0 and "kubectl" in said.stderr and "exec" in said.stderr


def _has_kubectl(folder: str) -> bool:
    return subprocess.run(["test", "-e", f"{folder}/kubectl"], check=False).returncode == 0
