"""What is published about the job file: schema, reference, and keys that an engine refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from stoker import spec
from stoker.errors import Refused, SpecError
from stoker.spec import Job, job_schema, parse_job, reference_markdown, refuse_unsupported
from stoker.spec.flags import FLAGS
from stoker.spec.job import Best, Checkpoint, Hang, Idle, Resources, Role, Setup
from stoker.spec.keys import KEYS
from stoker.spec.support import NOT_YET, unsupported

ROOT = Path(__file__).parents[3]


def _paths(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    deeper: dict[str, type[BaseModel]] = {
        "resources": Resources,
        "setup": Setup,
        "checkpoint": Checkpoint,
        "checkpoint.best": Best,
        "hang": Hang,
        "idle": Idle,
    }
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        path = prefix + (info.alias or name)
        found[path] = info
        if path in deeper:
            found |= _paths(deeper[path], path + ".")
        if path == "roles":
            found |= _paths(Role, "roles.*.")
    return found


def test_the_table_has_every_key_of_the_models_and_no_other() -> None:
    assert [key.path for key in KEYS] == list(dict.fromkeys(key.path for key in KEYS))
    assert {key.path for key in KEYS} == set(_paths(Job))


@pytest.mark.parametrize("key", [key for key in KEYS if key.default is not None], ids=lambda key: key.path)
def test_defaults_in_the_table_are_those_of_the_models(key: Any) -> None:
    tree: dict[str, Any] = {"run": "x", "checkpoint": {}, "idle": {}, "hang": {}, "roles": {"r": {}}}
    without = Job.from_json(tree).to_json()
    *parents, leaf = [part if part != "*" else "r" for part in key.parts]
    here = tree
    for part in parents:
        here = here.setdefault(part, {})
    here[leaf] = key.default
    assert Job.from_json(tree).to_json() == without


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_examples_in_the_table_are_valid(key: Any) -> None:
    tree: dict[str, Any] = {"image": "x"} if key.path == "args" else {"run": "x"}
    if key.path == "setup.inputs":
        tree["setup"] = {"run": "make"}
    if key.path.startswith("checkpoint.best."):
        tree["checkpoint"] = {"best": {"metric": "loss", "mode": "min"}}
    here = tree
    *parents, leaf = [part if part != "*" else "r" for part in key.parts]
    for part in parents:
        here = here.setdefault(part, {})
    here[leaf] = key.example
    Job.from_json(tree)
    assert _accepts(job_schema(), tree)


def test_every_key_with_a_line_of_its_own_has_a_flag() -> None:
    flagged = {flag.key for flag in FLAGS}
    for key in KEYS:
        nested = any(other.path.startswith(key.path + ".") for other in KEYS)
        if not key.path.startswith("roles.") and not nested and key.path not in ("run", "setup.run"):
            assert key.path in flagged, key.path


def _accepts(schema: Any, value: Any) -> bool:
    """The part of JSON Schema that our schema uses; any other keyword is an error."""
    if isinstance(schema, bool):
        return schema
    known = {"$schema", "title", "description", "examples", "default", "type", "properties", "additionalProperties",
             "propertyNames", "required", "anyOf", "enum", "const", "not", "pattern", "minimum", "maximum",
             "exclusiveMinimum", "minLength", "items", "minItems"}  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "number": number,
        "integer": number and value == int(value),
    }
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    checks = [
        not wanted or any(kinds[kind] for kind in wanted),
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        "not" not in schema or not _accepts(schema["not"], value),
        "anyOf" not in schema or any(_accepts(one, value) for one in schema["anyOf"]),
    ]
    if isinstance(value, str):
        checks += [
            re.search(schema.get("pattern", ""), value) is not None,
            len(value) >= schema.get("minLength", 0),
        ]
    if number:
        checks += [
            value >= schema.get("minimum", value),
            value <= schema.get("maximum", value),
            "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"],
        ]
    if isinstance(value, list):
        checks += [_accepts(schema.get("items", True), item) for item in value]
        checks.append(len(value) >= schema.get("minItems", 0))
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        checks.append(set(schema.get("required", [])) <= set(value))
        for name, item in value.items():
            checks.append(_accepts(schema.get("propertyNames", True), name))
            checks.append(_accepts(properties.get(name, schema.get("additionalProperties", True)), item))
    return all(checks)


VALID: list[dict[str, Any]] = [
    {"run": "x"},
    {"run": ["python", "train.py", "--lr", 1e-5, True]},
    {"image": "harbor.example.com:5000/team/torch:2.9@sha256:" + "0" * 64},
    {
        "run": "x",
        "setup": {"run": "make", "inputs": ["a/**"]},
        "env": {"A": 1, "B": True, "C": "x", "_d": 1.5},
    },
    {"run": "x", "resources": {"cpu": "500m", "memory": "1.5GiB", "gpu": 8, "shm": 1 << 30, "disk": "2TB"}},
    {
        "run": "x",
        "workers": "2..8",
        "processes": 2,
        "framework": "horovod",
        "priority": -3,
        "timeout": "1h 30m",
    },
    {"run": "x", "roles": {"ps": {"count": 2, "run": ["a"], "resources": {"cpu": 1}, "env": {"A": 1}}}},
    {"run": "x", "idle": {"gpu_below": "0.5%", "for": 90, "then": "stop"}, "grace": 0, "tags": ["a/b:c=1"]},
]
WRONG: list[dict[str, Any]] = [
    {"name": "x"},
    {"run": "x", "nope": 1},
    {"run": []},
    {"run": "x", "name": "Not A Slug"},
    {"run": "x", "resources": {"memory": "8Gib"}},
    {"run": "x", "resources": {"gpu": -1}},
    {"run": "x", "resources": {"gpus": 1}},
    {"run": "x", "timeout": "2 hours"},
    {"run": "x", "framework": "pytorch"},
    {"run": "x", "env": {"STOKER_RUN": 1}},
    {"run": "x", "env": {"1A": 1}},
    {"run": "x", "env": {"A": None}},
    {"run": "x", "checkpoint": {"best": {"metric": "a"}}},
    {"run": "x", "roles": {"worker": {}}},
    {"run": "x", "roles": {"ps": {"cuont": 1}}},
    {"run": "x", "setup": {"inputs": ["a"]}},
    {"run": "x", "priority": "urgent"},
    {"run": "x", "inputs": {"a": "ftp://x"}},
]


@pytest.mark.parametrize("tree", VALID)
def test_schema_accepts_what_the_reader_accepts(tree: dict[str, Any]) -> None:
    assert _accepts(job_schema(), tree)
    assert _accepts(job_schema(), Job.from_json(tree).to_json()), "the normal form too"


@pytest.mark.parametrize("tree", WRONG)
def test_schema_refuses_what_the_reader_refuses(tree: dict[str, Any]) -> None:
    assert not _accepts(job_schema(), tree)
    with pytest.raises(SpecError):
        Job.from_json(tree)


def test_schema_describes_every_key() -> None:
    schema = job_schema()
    for key in KEYS:
        here = schema
        for part in key.parts:
            if "anyOf" in here and "properties" not in here:
                here = next(one for one in here["anyOf"] if "properties" in one)
            here = here["additionalProperties"] if part == "*" else here["properties"][part]
        assert here["description"] == key.meaning
        assert here["examples"] == [key.example]


def test_reference_is_up_to_date() -> None:
    page = (ROOT / "docs" / "job-file.md").read_text()
    assert page == reference_markdown(), (
        "docs/job-file.md is not what reference_markdown() gives: write it anew"
    )


def test_jobs_shown_in_the_reference_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", reference_markdown(), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        refuse_unsupported(parse_job(block))


NOT_LOCAL: dict[str, str] = {
    "resources.disk": "resources: {disk: 1Gi}",
    "launcher": "launcher: none\nimage: i\nworkers: 2",
    "inputs": "inputs: {d: data://d}",
    "idle": "idle: {for: 1h}",
    "exclusive": "exclusive: true",
    "pool": "pool: a100",
    "pod": "pod: {spec: {nodeSelector: {disk: ssd}}}",
    "mounts": "mounts: {/data: pvc://claim}",
    "cluster": "cluster: gpu-prod",
}


def test_every_refused_key_has_a_case() -> None:
    assert {row.key for row in NOT_YET["local"]} == set(NOT_LOCAL)


@pytest.mark.parametrize(("key", "line"), NOT_LOCAL.items())
def test_key_the_local_engine_cannot_honour_is_refused_by_name(key: str, line: str) -> None:
    job = parse_job(f"run: x\n{line}\n")
    with pytest.raises(Refused) as caught:
        refuse_unsupported(job)
    assert f"`{key}" in caught.value.message
    assert caught.value.message.endswith("is not yet available on the local engine")
    assert caught.value.hint
    assert caught.value.details["keys"] == [key]


def test_all_refused_keys_are_named_at_once() -> None:
    job = parse_job("run: x\nexclusive: true\npool: a\n")
    assert [error.details["key"] for error in unsupported(job)] == ["exclusive", "pool"]
    with pytest.raises(Refused, match="2 keys are not yet available"):
        refuse_unsupported(job, "local")


def test_what_the_local_engine_honours_is_not_refused() -> None:
    refuse_unsupported(
        parse_job(
            "run: x\nsetup: make\nenv: {A: 1}\nresources: {cpu: 1, memory: 1Gi, gpu: 1}\nworkers: 2\nprocesses: 2\nframework: torch\n"
            "checkpoint: {keep: 2, world_size: same}\nretries: 1\ntimeout: 1h\npriority: high\nsecrets: [T]\n"
            "grace: 5s\nlost_after: 1m\nlease: 1h\nexclusive: false\nlauncher: auto\ntags: [a]\nproject: p\ncluster: any\n"
        )
    )


def test_public_names() -> None:
    for name in spec.__all__:
        assert getattr(spec, name) is not None
    with pytest.raises(AttributeError):
        _ = spec.nonsense  # type: ignore[attr-defined]
