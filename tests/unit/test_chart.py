"""The chart without Helm: its files agree with each other and with Stoker."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker import __version__
from stoker.control.clusters import _NAME as CLUSTER_NAME
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig, Pool
from stoker.settings import Settings
from stoker.task import courier_protocol

CHART = Path(__file__).parents[2] / "deploy/chart"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
KINDS = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


def parts(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each closed object of the schema with its values, and each leaf."""
    yield path, schema, values
    for key, below in schema.get("properties", {}).items():
        if isinstance(values, dict) and key in values:
            yield from parts(below, values[key], f"{path}.{key}" if path else key)


ALL = list(parts(SCHEMA, VALUES))
IDS = [path or "(all)" for path, _, _ in ALL]


@pytest.mark.parametrize(("path", "schema", "values"), ALL, ids=IDS)
def test_the_values_match_their_schema(path, schema, values):
    kind = KINDS[schema["type"]]
    assert isinstance(values, kind) and not (kind is int and isinstance(values, bool))
    if "enum" in schema:
        assert values in schema["enum"]
    if "pattern" in schema:
        assert re.search(schema["pattern"], values)
    if "minimum" in schema:
        assert schema["minimum"] <= values <= schema["maximum"]


@pytest.mark.parametrize(("path", "schema", "values"), ALL, ids=IDS)
def test_every_value_is_in_the_schema_and_the_other_way_round(path, schema, values):
    """Except for what Helm itself adds, and sections that are empty by default."""
    if schema.get("additionalProperties") is False and path != "config":
        assert set(values) == set(schema["properties"]) - {"global"}


def test_nothing_secret_has_a_default():
    assert VALUES["token"] == {"existingSecret": "", "key": "token"}
    assert VALUES["database"]["existingSecret"] == ""
    assert "password" not in json.dumps(VALUES).lower()


def test_the_version_is_that_of_stoker():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_the_sections_of_the_configuration_are_those_of_stoker():
    sections = {field.name for field in dataclasses.fields(Settings)} - {"home"}
    assert set(SCHEMA["properties"]["config"]["properties"]) == sections


def test_a_pool_has_the_keys_of_a_pool():
    pool = SCHEMA["properties"]["cluster"]["properties"]["pools"]["additionalProperties"]
    assert set(pool["properties"]) == set(Pool.model_fields)


def test_the_name_of_the_cluster_is_valid():
    pattern = SCHEMA["properties"]["cluster"]["properties"]["name"]["pattern"]
    for name in ("main", "a", "gpu-prod", "x" * 40, "x" * 41, "Main", "-a", "a-", "a_b", ""):
        assert bool(re.search(pattern, name)) == bool(CLUSTER_NAME.fullmatch(name)), name


def template(name: str) -> str:
    return (CHART / "templates" / name).read_text()


def test_the_policies_use_the_labels_and_ports_of_the_pods():
    policies = template("networkpolicy.yaml")
    assert f"ports: [{{port: {courier_protocol.PORT}}}]" in policies
    assert f"key: {names.RUN}," in policies
    assert f"{names.PREFIX}project:" in policies
    assert f"key: {names.RUN}," in template("pdb.yaml")


def test_what_the_chart_sets_itself_exists_and_is_refused_in_the_free_settings():
    ours = set(re.findall(r'^  "([a-z_]+)" ', template("_helpers.tpl"), re.M))
    assert ours <= set(ClusterConfig.model_fields)
    refused = next(line for line in template("checks.yaml").splitlines() if '"kubeconfig"' in line)
    assert ours | {"context"} == set(re.findall(r'"([a-z_]+)"', refused))
