"""A job from the flags of `stoker run`, alone or on top of an existing job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.spec import load
from stoker.spec.flags import FLAGS, Flag
from stoker.spec.job import Job
from stoker.spec.keys import holds_command, keeps_text
from stoker.spec.problems import Problem
from stoker.spec.quantities import show
from stoker.spec.yaml12 import YamlError, scalar


def job_from_flags(values: Mapping[str, Any], run: Sequence[str], base: Job | None = None) -> Job:
    """`values` by Flag.param; None and empty collections mean not given. Lists and mappings add to the base's,
    everything else replaces it. `run` is the command's arguments; empty keeps the base's. Raises SpecError that names
    the flag."""
    tree: dict[str, Any] = base.to_json() if base is not None else {}
    origin = load.Origin(names=Path() if base is None else None)
    mistakes: list[Problem] = []
    if run:
        tree["run"] = list(run)
        origin.given[("run",)] = "the command"
    by_param = {flag.param: flag for flag in FLAGS}
    unknown = set(values) - set(by_param)
    if unknown:
        raise KeyError(f"no such flag: {sorted(unknown)}")
    for param, value in values.items():
        if value is None or (isinstance(value, (list, tuple, dict)) and not value):
            continue
        mistakes += _give(tree, by_param[param], value, origin)
    if "run" not in tree and "image" not in tree:
        hint = "Write it last, as in `stoker run --cpu 1 -- python train.py`."
        origin.given[("run",)] = "the command"
        mistakes.append(Problem(("run",), "is missing", hint=hint, call="the command"))
    return load.job_from_tree(tree, origin, mistakes)


def _give(tree: dict[str, Any], flag: Flag, value: Any, origin: load.Origin) -> list[Problem]:
    path: tuple[str, ...] = tuple(flag.key.split("."))
    origin.given[path] = flag.flag
    if flag.kind == "map":
        return _give_map(tree, flag, value, origin)
    if flag.kind == "list":
        value = [
            *_there(tree, path),
            *(_name(item) if flag.key == "secrets" else item for item in _items(value)),
        ]
    elif isinstance(value, str):
        try:
            value = _read(value, flag, path)
        except YamlError as exc:
            return [Problem(path, exc.message, hint=exc.hint, call=flag.flag)]
    refused = load.put(tree, path, value)
    return [Problem(path, refused, call=flag.flag)] if refused else []


def _give_map(tree: dict[str, Any], flag: Flag, value: Any, origin: load.Origin) -> list[Problem]:
    pairs = (
        value.items() if isinstance(value, Mapping) else (item.partition("=")[::2] for item in _items(value))
    )
    mistakes = []
    without = [item for item in _items(value) if "=" not in item] if not isinstance(value, Mapping) else []
    for item in without:
        hint = f"Write it as `{flag.flag} {flag.metavar}`."
        mistakes.append(Problem((flag.key,), f"{show(item)} has no `=`", hint=hint, call=flag.flag))
    for name, item in pairs:
        if name in without:
            continue
        origin.given[(flag.key, name)] = flag.flag
        tree.setdefault(flag.key, {})[name] = item
    return mistakes


def _read(text: str, flag: Flag, path: tuple[str, ...]) -> Any:
    if flag.kind == "yaml":
        return load.yaml_value(text, path)
    if keeps_text(path) or holds_command(path):
        return text
    value = scalar(text)
    return "" if value is None else value


def _there(tree: Mapping[str, Any], path: Sequence[str]) -> list[Any]:
    here: Any = tree
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
    return list(here) if isinstance(here, (list, tuple)) else []


def _name(item: str) -> str:
    """`NAME=@file` says where the value is. The job holds the name alone."""
    name, equals, rest = item.partition("=")
    return name if equals and rest.startswith("@") else item


def _items(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else list(value)
