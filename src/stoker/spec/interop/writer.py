"""Jobs and manifests as readable YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from stoker.spec.job import Job, Role
from stoker.spec.keys import BY_PATH, find
from stoker.spec.quantities import show_duration, show_size

_FIRST = ("name", "run", "args", "image")


def job_tree(job: Job) -> dict[str, Any]:
    """The same as plain values."""
    usual = Job(run="x", name="x").to_json()
    tree = {
        key: _written(value, (key,))
        for key, value in job.to_json().items()
        if key in ("name", "run") or usual.get(key) != value
    }
    if tree.get("resources") == {}:
        del tree["resources"]
    if job.roles:
        tree["roles"] = {name: _role(role) for name, role in job.roles.items()}
    return {
        key: tree[key] for key in sorted(tree, key=lambda key: (key not in _FIRST, list(BY_PATH).index(key)))
    }


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(
        list(documents),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=False,
    )


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, which are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data and all(line == line.rstrip() for line in data.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)


def _role(role: Role) -> dict[str, Any]:
    usual = Role().model_dump(mode="json", by_alias=True, exclude_none=True)
    raw = role.model_dump(mode="json", by_alias=True, exclude_none=True)
    found = {
        key: _written(value, ("roles", "r", key)) for key, value in raw.items() if usual.get(key) != value
    }
    return {key: value for key, value in found.items() if value != {} or key == "pod"}


def _written(value: Any, path: tuple[str, ...]) -> Any:
    """Sizes and durations with units; whole numbers without a decimal point."""
    key = find(path)
    kind = key.kind if key is not None else ""
    if kind == "template":
        return value
    if isinstance(value, dict):
        found = {name: _written(item, (*path, name)) for name, item in value.items()}
        return {name: item for name, item in found.items() if not (path[-1] == "resources" and item == 0)}
    if kind == "size" and isinstance(value, int):
        return show_size(value)
    if kind == "duration" and isinstance(value, (int, float)):
        return show_duration(value) if value else 0
    return int(value) if isinstance(value, float) and value == int(value) else value
