"""The JSON Schema of a job file, for editors. Built from the table of keys.

It accepts every job that is read without errors. Some mistakes (a secret that is also a variable) are found only by
the reader.
"""

from __future__ import annotations

import copy
from typing import Any

from stoker.spec.keys import KEYS, KINDS, Key

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """A new dict; draft 2020-12."""
    root: dict[str, Any] = {
        "$schema": SCHEMA_ID,
        "title": "Stoker job file",
        "description": "What to train, with what, and what to do when something goes wrong.",
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "anyOf": [{"required": ["run"]}, {"required": ["image"]}],
    }
    for key in KEYS:
        _place(root, key)
    role = root["properties"]["roles"]["additionalProperties"]
    role["properties"]["resources"]["properties"] = copy.deepcopy(
        root["properties"]["resources"]["properties"]
    )
    root["properties"]["roles"]["propertyNames"] = {"not": {"const": "worker"}}
    best = root["properties"]["checkpoint"]["properties"]["best"]
    best["required"] = ["metric", "mode"]
    setup = root["properties"]["setup"]
    setup["anyOf"] = [{"type": "string", "minLength": 1}, _object(setup.pop("properties"), ["run"])]
    del setup["additionalProperties"]
    return root


def _place(root: dict[str, Any], key: Key) -> None:
    here = root
    for part in key.parts[:-1]:
        if part == "*":
            here = here["additionalProperties"]
        else:
            here = here["properties"][part]
    here.setdefault("properties", {})[key.parts[-1]] = _leaf(key)


def _leaf(key: Key) -> dict[str, Any]:
    leaf = copy.deepcopy(KINDS[key.kind].schema)
    if key.choices:
        leaf["enum"] = list(key.choices)
    leaf["description"] = key.meaning
    leaf["examples"] = [key.example]
    if key.default is not None:
        leaf["default"] = key.default
    if key.kind in ("mapping", "setup"):
        leaf.update(properties={}, additionalProperties=False)
    if key.kind == "roles":
        leaf["additionalProperties"] = _object({}, [])
    return leaf


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": required} if required else found
