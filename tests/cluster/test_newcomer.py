"""From a kubeconfig to a finished run with the README's two commands; nothing is installed in the cluster."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_parts import image

from support.box import Box

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)


def test_two_commands(tmp_path: Path, cluster: Any, namespace: str) -> None:
    box = Box(tmp_path)
    kube = tmp_path / "user" / ".kube" / "config"
    kube.parent.mkdir()
    shutil.copy(cluster.kubeconfig, kube)
    context = cluster.kubectl("config", "current-context").strip()
    first, _, chapter = (ROOT / "README.md").read_text().partition("## The same on a cluster")
    box.write("train.py", re.findall(r"```python\n(.*?)```", first, re.S)[0])
    block = re.findall(r"```sh\n(.*?)```", chapter, re.S)[0]
    assert len(block.splitlines()) == 2
    here = {
        "--context lab": f"--context {context}",
        "training": namespace,
        "python:3.12": image(cluster, "train"),
    }
    for line in block.splitlines():
        for written, meant in here.items():
            line = line.replace(written, meant)
        done = box(*shlex.split(line)[1:], timeout=300)
    try:
        assert "step 100 loss" in done.stdout
        run = box.json("ps", "--all")[0]
        assert (run["state"], run["exit_code"]) == ("succeeded", 0)
        kinds = cluster.kubectl("get", "crd", "-o", "name") + cluster.kubectl(
            "get", "deployments,statefulsets,daemonsets", "-A", "-o", "name"
        )
        assert "stoker" not in kinds, "nothing was installed"
    finally:
        box.close()


def test_mistakes_of_the_first_hour(tmp_path: Path, cluster: Any, namespace: str) -> None:
    box = Box(tmp_path)
    try:
        said = box("cluster", "add", "lab", code=None)
        assert said.returncode != 0 and "no kubeconfig at" in said.stderr and "--kubeconfig" in said.stderr
        box.write("broken.yaml", "clusters: [")
        said = box("cluster", "add", "lab", "--kubeconfig", "broken.yaml", code=None)
        assert said.returncode != 0 and "broken.yaml" in said.stderr + said.stdout
        known = ["--kubeconfig", str(cluster.kubeconfig)]
        box("cluster", "rm", "lab", code=None)
        said = box("cluster", "add", "lab", *known, "--context", "nope", code=None)
        assert said.returncode != 0 and "nope" in said.stderr + said.stdout
        box("cluster", "rm", "lab", code=None)
        said = box("cluster", "add", "any", *known, code=None)
        assert said.returncode != 0 and "'any'" in said.stderr
        said = box("cluster", "add", "lab", *known, "--set", "namespcae=x", code=None)
        assert said.returncode != 0 and "namespace" in said.stderr
        box("cluster", "add", "lab", *known, "--namespace", namespace)
        said = box("cluster", "add", "lab", *known, code=None)
        assert said.returncode != 0 and "cluster set" in said.stderr
        said = box("run", "--cluster", "lba", "--", "true", code=None)
        assert said.returncode != 0 and "no cluster 'lba'" in said.stderr and "lab" in said.stderr
        said = box("run", "--cluster", "lab", "--", "true", code=None)
        assert said.returncode != 0 and "default_image" in said.stderr
        said = box("cluster", "set", "lab", "start_deadline=soon", code=None)
        assert said.returncode != 0 and "start_deadline" in said.stderr
        said = box("cluster", "rm", "lba", code=None)
        assert said.returncode != 0 and "lab" in said.stderr
    finally:
        box.close()
