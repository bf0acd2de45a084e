"""The job files in docs/distributed.md are valid, and its variables are those that tasks get."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stoker.frameworks import NAMES, find
from stoker.frameworks.base import World, WorldMember
from stoker.launcher.helpers import horovod
from stoker.spec import parse_job
from stoker.spec.roles import parts

TEXT = (Path(__file__).parents[3] / "docs/distributed.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M))


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
def test_job_files_can_be_submitted(block: str) -> None:
    job = parse_job(block)
    assert parts(find(job.framework).complete(job))


@pytest.mark.parametrize("name", NAMES)
def test_every_framework_has_its_section(name: str) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[name], re.S)
    assert parse_job(block).framework == name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "horovod")])
def test_the_variables_it_names_are_set(name: str) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[name], re.S)
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", "".join(_rows(SECTIONS[name]))))
    found = _variables(name, block, processes=1) | _variables(name, block, processes=2)
    assert named and named <= found
    common = set() if name == "torch" else _common()
    ours = {one for one in found - common if not one.startswith("STOKER_")} | (named & found)
    assert ours - named == set(), "set, and not said"


def test_the_variables_of_every_task_are_documented() -> None:
    named = _common()
    ours = {"STOKER_PEERS_WORKER", "STOKER_ROLE", "STOKER_TASK_INDEX", "STOKER_GENERATION"}
    plain = set(re.findall(r"`([A-Z_]+)`", SECTIONS["none"]))
    assert _variables("none", "run: x\nworkers: 2\n", processes=1) <= named | ours | plain


def test_horovods_variables() -> None:
    said = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    set_ = horovod.variables({f"OMPI_COMM_WORLD_{name}": value for name, value in said.items()})
    assert set(re.findall(r"`(HOROVOD_[A-Z_]+)`", SECTIONS["horovod"])) == set(set_)


def _common() -> set[str]:
    (common,) = re.findall(r"## Variables of every task\n(.*?)^## ", TEXT, re.S | re.M)
    return set(re.findall(r"`([A-Z_]+)`", "".join(_rows(common))))


def _rows(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]


def _variables(name: str, block: str, *, processes: int) -> set[str]:
    framework = find(name)
    job = framework.complete(parse_job(block))
    members: list[Any] = []
    for part in parts(job):
        for index, task in enumerate(part.names):
            ports = tuple(range(7000, 7000 + framework.ports(part.role)))
            members.append(
                WorldMember(task, part.role, index, "10.0.0.7", ports, processes=processes, gpus=2)
            )
    world = World("r", 1, 1, tuple(members), key="k")
    found: set[str] = set()
    for part in parts(job):
        for member in world.role(part.role):
            body = framework.body(world, member, part.job, part.job.argv())
            found |= {*body.env, *(key for one in body.each for key in one)}
    return found
