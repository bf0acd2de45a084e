"""Manifests as users have them, each compared as a whole: its job, and its notes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import SpecError
from stoker.spec import parse_job
from stoker.spec.interop import Level, Target, is_foreign, translate
from stoker.spec.interop.writer import job_tree, to_yaml
from support import manifests
from support.manifests import FILES


def test_there_are_enough_files() -> None:
    assert len(FILES) >= 25
    assert {path.name for path in (manifests.HERE / "expected").iterdir()} == {
        f"{path.name}.json" for path in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_job_of_each_file(path: Path) -> None:
    assert is_foreign(path.read_bytes())
    wanted = manifests.expected(path)
    for name, target in manifests.TARGETS.items():
        assert json.loads(json.dumps(manifests.made(path, target))) == wanted[name], name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_printed_job_file_is_the_same_job(path: Path) -> None:
    reading = translate(path.read_bytes(), source=path.name, target=Target(cluster=True))
    for one in reading.translations:
        assert parse_job(to_yaml([job_tree(one.job)])) == one.job


def _as_json(path: Path) -> str | None:
    """None where JSON has no equivalent: several documents, octal numbers, or the YAML text `1e-3`."""
    text = path.read_text()
    trees = [tree for tree in yaml.safe_load_all(text) if tree]
    return None if len(trees) != 1 or "0755" in text or "1e-3" in text else json.dumps(trees[0])


@pytest.mark.parametrize("path", [path for path in FILES if _as_json(path)], ids=lambda path: path.name)
def test_json_and_yaml_give_the_same_job(path: Path) -> None:
    target = Target(cluster=True)
    ours = translate(path.read_bytes(), source="x", target=target)
    theirs = translate((_as_json(path) or "").encode(), source="x", target=target)
    assert [one.job for one in theirs.translations] == [one.job for one in ours.translations]


FREE = ("labels", "annotations", "nodeSelector", "status", "data", "ports", "seccompProfile")
"""Mappings whose keys are the user's own, or of which nothing is read."""


def _mappings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
        for key, child in value.items():
            yield from _mappings(child, (*path, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _mappings(child, (*path, number))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_unknown_key_is_ignored(path: Path) -> None:
    """An unknown key is put into every mapping in turn: it is noted, refused, or kept."""
    trees = [tree for tree in yaml.safe_load_all(path.read_text()) if tree]
    for number, tree in enumerate(trees):
        if tree["kind"] in ("ConfigMap",):
            continue
        for place in _mappings(tree):
            if set(place) & set(FREE) or place[-1:] == ("items",):
                continue
            changed = copy.deepcopy(trees)
            here = changed[number]
            for part in place:
                here = here[part]
            here["unheardOf"] = "xyzzy"
            for target in manifests.TARGETS.values():
                assert _is_accounted_for(yaml.safe_dump_all(changed), target), place


def _is_accounted_for(text: str, target: Target) -> bool:
    try:
        reading = translate(text.encode(), source="x", target=target)
    except SpecError:
        return True
    everything = [note for level in Level for note in reading.of(level)]
    if any("unheardOf" in note.path or "xyzzy" in note.value for note in everything):
        return True
    if any("xyzzy" in json.dumps(one.job.to_json()) for one in reading.translations):
        return True
    return any(_holds(text, note.path) for note in everything)


def _holds(text: str, path: str) -> bool:
    """A note about a mapping covers all of its keys."""
    import re

    for tree in yaml.safe_load_all(text):
        here: Any = tree
        for part in re.findall(r"[^.\[\]]+", path):
            if isinstance(here, list):
                here = here[int(part)] if part.isdigit() and int(part) < len(here) else None
            else:
                here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, (dict, list)) and "unheardOf" in json.dumps(here, default=str):
            return True
    return False
