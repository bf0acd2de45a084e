"""Faults between the server and its tasks, and the resulting states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from boxes import ClusterBox
from faulting import box, steps, train, undisturbed

from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(900)


def test_the_api_server_is_away_for_a_minute(box: ClusterBox) -> None:
    """The training continues, no task counts as lost, and all lines arrive."""
    run = train(box, 330)
    box.cluster.stop_api()
    away = time.monotonic()
    try:
        wait(lambda: not _lab(box)["reachable"])
        assert box.show(run)["state"] == "running", "silence is never read as: all pods are gone"
        local = box.submit("--", "python3", "-c", "print('here')")
        assert box.ended(local)["state"] == "succeeded", "runs on this machine are not delayed"
        time.sleep(max(0.0, 60.0 - (time.monotonic() - away)))
        assert box.show(run)["state"] == "running"
    finally:
        box.cluster.start_api()
    undisturbed(box, run, 330)


def _lab(box: ClusterBox) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in box.json("cluster", "ls") if one["name"] == "lab")
    return found


@pytest.mark.soak
def test_an_api_server_that_takes_connections_and_never_answers(box: ClusterBox) -> None:
    run = train(box, 160)
    box.cluster.stop_api(freeze=True)
    try:
        wait(lambda: not _lab(box)["reachable"], limit=120)
    finally:
        box.cluster.start_api()
    undisturbed(box, run, 160)


def test_the_past_is_compacted_away(box: ClusterBox) -> None:
    """Watches get 410 Gone: the list is read again, and nothing is missed."""
    run = train(box, 100)
    box.cluster.compact()
    undisturbed(box, run, 100)


def test_a_cut_shorter_than_lost_after_is_nothing(box: ClusterBox) -> None:
    run = train(box, 320, "--lost-after", "10m")
    address = box.pods(run)[0]["status"]["podIP"]
    box.cluster.cut(address)
    time.sleep(60)
    assert len(box.show(run)["attempts"]) == 1
    box.cluster.heal(address)
    undisturbed(box, run, 320)


def test_a_frozen_container_that_wakes_up(box: ClusterBox) -> None:
    """A frozen body is not lost: while its courier answers, it is left alone."""
    run = train(box, 120, "--lost-after", "10s")
    pod = box.pods(run)[0]["metadata"]["name"]
    box.cluster.freeze(pod, "main", box.namespace)
    time.sleep(5)  # earlier lines are still being transferred
    before = steps(box, run)
    time.sleep(15)
    assert len(steps(box, run)) <= len(before) + 1
    assert box.show(run)["state"] == "running"
    box.cluster.thaw(pod, "main", box.namespace)
    undisturbed(box, run, 120)


@pytest.mark.soak
def test_a_token_that_is_rotated_while_it_runs(box: ClusterBox, tmp_path: Path) -> None:
    """The kubeconfig's token is rotated: the next request uses the new one."""
    token = tmp_path / "token"
    kubeconfig = yaml.safe_load(Path(box.cluster.kubeconfig).read_text())
    kubeconfig["users"][0]["user"] = {"tokenFile": str(token)}
    (tmp_path / "rotated").write_text(yaml.safe_dump(kubeconfig))
    box.kubectl("create", "serviceaccount", "stoker")
    grant = ("create", "clusterrolebinding", f"rotated-{box.namespace}", "--clusterrole=cluster-admin")
    box.kubectl(*grant, f"--serviceaccount={box.namespace}:stoker")

    def rotate() -> None:
        token.write_text(box.kubectl("create", "token", "stoker", "--duration=10m"))

    rotate()
    box("cluster", "set", "lab", f"kubeconfig={tmp_path / 'rotated'}", "context=null")
    try:
        run = train(box, 400)
        for _ in range(3):
            time.sleep(20)
            rotate()
        token.write_text("no token at all")
        time.sleep(30)
        assert box.show(run)["state"] == "running"
        rotate()
        undisturbed(box, run, 400)
    finally:
        box.kubectl("delete", "clusterrolebinding", f"rotated-{box.namespace}")
