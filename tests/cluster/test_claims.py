"""Checkpoints on a claim that every node mounts: they outlive their node, are salvaged, and are removed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import CLUSTER, ClusterBox
from faulting import TRAIN, node_of, said, steps, train, whole
from harness import Cluster
from harness.pods import apply, claim

from support.waiting import wait

pytestmark = pytest.mark.timeout(900)

OTHERS = "0therhome123"
"""The home of another server on the same claim."""
TORN = """
import os
torn = open(os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "step-999999.json"), "w")
torn.write('{"step": 999999, "process": "nob')  # and never gets its end
torn.flush()
"""


class ClaimBox(ClusterBox):
    """A box whose cluster keeps checkpoints on a claim; `volume` is the claim's directory."""

    def __init__(self, root: Path, cluster: Cluster, namespace: str, volume: Path) -> None:
        super().__init__(root, cluster, namespace, "checkpoints=kept")
        self.volume = volume

    def parts(self, run: str = "") -> list[Path]:
        return sorted(self.volume.glob(f"stoker/*/{run or '*'}/*.*.*"))

    @property
    def runs(self) -> list[str]:
        """The runs of this home that have a directory on the claim, even an empty one."""
        return sorted(path.name for path in self.volume.glob("stoker/*/*") if path.parent.name != OTHERS)

    def step(self, run: str, attempt: int = 1) -> int:
        """The step of the newest checkpoint in the attempt's directory on the claim; -1 before the first."""
        found = [path for path in self.parts(run) if path.name == f"{attempt}.worker-0.1"]
        try:
            return int(json.loads((found[0] / "checkpoints/1/last.json").read_text())["step"])
        except (FileNotFoundError, IndexError):
            return -1

    def events(self, run: str, kind: str) -> list[str]:
        listed: Any = self.client().events(run)
        rows = listed["events"] if isinstance(listed, dict) else listed
        return [row["text"] for row in rows if row["kind"] == kind]


@pytest.fixture
def box(tmp_path: Path, own_cluster: Cluster, namespace: str) -> Iterator[ClaimBox]:
    name = f"{namespace}-kept"
    volume = own_cluster.volume(name, mode="ReadWriteMany")
    apply(own_cluster, namespace, claim("kept", name, mode="ReadWriteMany"))
    level = "pod-security.kubernetes.io/enforce=restricted"
    own_cluster.kubectl("label", "namespace", namespace, level)
    made = ClaimBox(tmp_path, own_cluster, namespace, volume)
    made.write("train.py", TRAIN)
    yield made
    ready = '{.status.conditions[?(@.type=="Ready")].status}'
    for node in own_cluster.nodes:
        if "True" not in own_cluster.kubectl("get", "node", node, "-o", f"jsonpath={ready}"):
            own_cluster.restore_node(node)
    made.close()
    own_cluster.kubectl("delete", "persistentvolume", name, "--wait=false")
    shutil.rmtree(volume, ignore_errors=True)


def test_a_lost_node_costs_no_checkpoint_that_was_on_the_claim(box: ClaimBox) -> None:
    """Checkpoints written without a server are salvaged; a torn one is not, and another home's stay."""
    others = box.volume / "stoker" / OTHERS / "theirs-1a2b/1.worker-0.1/checkpoints"
    others.mkdir(parents=True)
    (others / "model.pt").write_bytes(b"theirs")
    box.write("train.py", TORN + TRAIN)
    run = train(box, 240, "--lost-after", "15s")
    first = node_of(box, run)
    box.kill_server()
    carried = box.step(run)  # at most this step: no server collects checkpoints now
    wait(lambda: box.step(run) >= carried + 8)
    box.cluster.lose_node(first)
    last = box.step(run)
    assert last < 239, "it was lost in the middle"
    box("ps")  # starts the server again
    shown = wait(lambda: box.show(run), lambda seen: len(seen["attempts"]) >= 2, limit=240)
    assert shown["attempts"][0]["cause"] == "lost"
    wait(lambda: len(said(box, run, "begin")) == 2, limit=240)
    assert int(said(box, run, "begin")[1][1]) == last + 1, (
        "it resumes after the newest checkpoint on the claim"
    )
    assert any("found on the shared volume" in text for text in box.events(run, "checkpoint"))
    assert any("step-999999.json" in text and "not offered" in text for text in box.events(run, "warning"))
    wait(lambda: [path.name for path in box.parts(run)] == ["2.worker-0.1"])
    shown = box.ended(run, limit=300)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    assert steps(box, run)[-1] == 239
    wait(lambda: not box.runs)
    assert (others / "model.pt").read_bytes() == b"theirs"
    box.cluster.restore_node(first)
    wait(lambda: not box.pods(run), limit=180)
    assert not box.runs, "the returned node brings nothing back"


@pytest.mark.soak
def test_one_that_was_given_up_and_lives_changes_nothing(box: ClaimBox) -> None:
    """An orphaned task trains on while its directory is salvaged and removed; nothing of that counts."""
    run = train(box, 300, "--lost-after", "15s")
    first = node_of(box, run)
    box.kill_server()
    box.cluster.orphan_node(first)
    seen = box.step(run)
    wait(lambda: box.step(run) >= seen + 8)
    box("ps")  # starts the server again
    wait(lambda: len(said(box, run, "begin")) == 2, limit=300)
    (_, start), (second, again) = said(box, run, "begin")
    assert int(start) == 0 and int(again) > seen + 8, "steps that were written while no server ran count"
    wait(lambda: [path.name for path in box.parts(run)] == ["2.worker-0.1"])
    shown = box.ended(run, limit=400)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    mine = [int(step) for process, step in said(box, run, "step") if process == second]
    assert mine == list(range(int(again), 300)), "the remaining steps, by one process"
    box("pull", run, "-o", "out")
    assert second in next((box.work / "out").rglob("model.json")).read_text()
    box.cluster.restore_node(first)
    wait(lambda: not box.pods(run), limit=180)
    assert not box.runs


@pytest.mark.soak
def test_files_of_a_run_that_ended_while_lost_are_removed_by_the_next_run(box: ClaimBox) -> None:
    lost = train(box, 400, "--lost-after", "15s")
    first = node_of(box, lost)
    box.cluster.lose_node(first)
    box("stop", lost, "--kill", code=None)
    assert box.ended(lost, limit=240)["state"] == "stopped"
    assert box.parts(lost), "no server could remove it"
    run = train(box, 40)
    wait(lambda: not box.parts(lost))
    assert box.ended(run, limit=240)["state"] == "succeeded"
    whole(box, run, 40)
    wait(lambda: not box.runs)


@pytest.mark.parametrize("image", ["", "nonroot"])
def test_checkpoints_are_on_the_claim_until_the_server_has_them(box: ClaimBox, image: str) -> None:
    """As an ordinary user in a restricted namespace; a user resumes the run from the collected checkpoint."""
    run = train(box, 56, *(("--image", box.cluster.images[image]) if image else ()))
    wait(lambda: box.step(run) >= 3)
    (part,) = box.parts(run)
    assert owners(part) == {1000}
    assert (part / "checkpoints").stat().st_mode & 0o777 == 0o700
    seen = mounts(box, run)
    own = [f"{run}/1.worker-0.1/checkpoints", f"{run}/1.worker-0.1/staged"]
    assert seen["main"] == own, "user code sees its own part only"
    assert seen["courier"] == [*own, run if image else ""], (
        "in the user's image, the parts of its own run only"
    )
    box("stop", run)
    assert box.ended(run)["state"] == "stopped"
    wait(lambda: not box.parts())
    box("resume", run)
    assert box.ended(run, limit=240)["state"] == "succeeded"
    whole(box, run, 56)
    assert int(said(box, run, "begin")[1][1]) > 0, "it went on from its checkpoint"
    wait(lambda: not box.parts())
    if image:
        assert box.runs == [run], "an empty directory, which the server cannot see from outside"
        other = box.there("--cpu", "0.1", "--memory", "128Mi", "--", "true")
        assert box.ended(other)["state"] == "succeeded"
    wait(lambda: not box.runs)


def owners(part: Path) -> set[int]:
    """Owners of the files. A collected checkpoint may disappear meanwhile."""
    found = set()
    for path in [part, *part.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            found.add(path.stat().st_uid)
    return found


def mounts(box: ClaimBox, run: str) -> dict[str, list[str]]:
    """The subdirectories of this home's directory on the claim that are mounted, by container."""
    spec = box.pods(run)[0]["spec"]
    home = next(path.name for path in (box.volume / "stoker").iterdir())
    return {
        one["name"]: [
            mount["subPath"].removeprefix(f"stoker/{home}").strip("/")
            for mount in one["volumeMounts"]
            if mount["name"] == "checkpoints"
        ]
        for one in [*spec["initContainers"], *spec["containers"]]
    }


def test_several_tasks_have_a_part_each(box: ClaimBox) -> None:
    size = ("--cpu", "0.1", "--memory", "128Mi")
    run = box.there(*size, "--workers", "2", "--", "python3", "train.py", "60")
    wait(lambda: len(list(box.volume.glob(f"stoker/*/{run}/1.worker-[01].1/checkpoints/1/last.json"))) == 2)
    assert box.ended(run, limit=300)["state"] == "succeeded"
    wait(lambda: not box.runs)


def test_a_claim_for_one_node_gives_a_warning(box: ClaimBox) -> None:
    box.kubectl("delete", "persistentvolumeclaim", "kept")
    apply(box.cluster, box.namespace, claim("kept", "nothing"))
    facts = {fact["name"]: fact for fact in box.json("cluster", "check", CLUSTER, code=None)}
    assert facts["checkpoints"]["ok"] is None and "ReadWriteMany" in facts["checkpoints"]["text"]
