"""stoker.jax_initialize, with a jax that only records its arguments."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import stoker


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    heard: list[dict[str, Any]] = []
    distributed = SimpleNamespace(initialize=lambda **options: heard.append(options))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(distributed=distributed))
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    return heard


def test_jax_gets_its_rank_and_address(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.7:7000")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    stoker.jax_initialize(initialization_timeout=60)
    assert told == [
        {
            "coordinator_address": "10.0.0.7:7000",
            "num_processes": 4,
            "process_id": 3,
            "local_device_ids": [2, 3],
            "initialization_timeout": 60,
        }
    ]


def test_a_single_task_does_nothing(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    stoker.jax_initialize()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    stoker.jax_initialize()
    assert told == []
