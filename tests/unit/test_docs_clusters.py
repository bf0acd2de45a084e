"""docs/clusters.md describes every setting of a cluster, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.engine.kubernetes.config import ClusterConfig

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_every_setting_is_described() -> None:
    table = PAGE.read_text().partition("## Settings of a cluster")[2].partition("###")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described == set(ClusterConfig.model_fields)
