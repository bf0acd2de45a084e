"""A given cluster, named by STOKER_TEST_KUBECONFIG: tests use it but break nothing in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness.binaries import binary
from harness.catalog import TestImages
from harness.errors import HarnessError, command

__all__ = ["ForeignCluster"]


class ForeignCluster:
    """Takes the place of `Cluster` in tests. Unsupported operations skip the test with a reason.

    STOKER_TEST_REGISTRY is a registry that the nodes pull from and that the test images are pushed to.
    """

    def __init__(self, kubeconfig: Path) -> None:
        if not kubeconfig.exists():
            raise HarnessError(f"STOKER_TEST_KUBECONFIG names {kubeconfig}, which does not exist")
        self.kubeconfig = kubeconfig

    @property
    def registry(self) -> str:
        named = os.environ.get("STOKER_TEST_REGISTRY")
        return named or _skip("set STOKER_TEST_REGISTRY to a registry that this cluster's nodes pull from")

    @property
    def images(self) -> Mapping[str, str]:
        return TestImages({}, self.registry)

    @property
    def nodes(self) -> tuple[str, ...]:
        listed = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return tuple(sorted(each["metadata"]["name"] for each in listed))

    def kubectl(self, *argv: str, input: str | None = None) -> str:
        program = shutil.which("kubectl") or binary("kubectl")
        return command([program, f"--kubeconfig={self.kubeconfig}", *argv], input=input)

    def services(self, *, names: bool = False) -> None:
        """Nothing to do: such a cluster has addresses and names of Services."""

    def names(self) -> None:
        """Nothing to do, as in `services`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        _skip(f"`{name}` needs a cluster that the tests may break; unset STOKER_TEST_KUBECONFIG")


def _skip(why: str) -> NoReturn:
    pytest.skip(why)
