"""A transition outside its table raises in tests, and is logged with its facts in production."""

from __future__ import annotations

import logging
from enum import StrEnum

import pytest

from stoker.spec.transitions import MISSING, STRICT, Table, UnexpectedTransition, staying, to


class Light(StrEnum):
    RED = "red"
    GREEN = "green"
    DARK = "dark"


class Switch(StrEnum):
    GO = "go"
    OFF = "off"


TABLE: Table[Light, Switch] = Table(
    "light",
    {
        Switch.GO: {Light.RED: Light.GREEN},
        Switch.OFF: {**to(Light.DARK, (Light.RED, Light.GREEN)), **staying([Light.DARK])},
    },
)


def test_transitions_in_the_table_are_followed() -> None:
    assert TABLE.after(Light.RED, Switch.GO) is Light.GREEN
    assert TABLE.after(Light.DARK, Switch.OFF) is Light.DARK
    assert TABLE.befores(Switch.OFF) == [Light.DARK, Light.GREEN, Light.RED]
    assert len(TABLE.transitions) == 4


def test_other_transitions_raise_in_tests(unexpected_transitions: list[str]) -> None:
    with pytest.raises(UnexpectedTransition, match="light: 'go' in state 'dark' is not in the table"):
        TABLE.after(Light.DARK, Switch.GO, run="digits-7f3k")
    assert len(unexpected_transitions) == 1
    unexpected_transitions.clear()


def test_other_transitions_are_logged_in_production(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unexpected_transitions: list[str]
) -> None:
    monkeypatch.delenv(STRICT)
    with caplog.at_level(logging.ERROR):
        assert TABLE.after(Light.DARK, Switch.OFF) is Light.DARK
        assert caplog.records == []
        assert TABLE.after(Light.DARK, Switch.GO, run="digits-7f3k", attempt=2) is Light.GREEN
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    for fact in ("light", "'go'", "'dark'", MISSING, "run digits-7f3k", "attempt 2", "going on as 'green'"):
        assert fact in record.getMessage()
    unexpected_transitions.clear()
