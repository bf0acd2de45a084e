"""YAML 1.2 as in job files, and hostile YAML."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from stoker.errors import SpecError
from stoker.spec import parse_job
from stoker.spec.interop import reader
from stoker.spec.interop.reader import is_foreign
from stoker.spec.yaml12 import scalar

CORE: list[tuple[str, Any]] = [
    ("1e-5", 1e-5),
    ("1E3", 1000.0),
    (".5", 0.5),
    ("1.", 1.0),
    ("-12", -12),
    ("+3", 3),
    ("0o17", 15),
    ("0x1F", 31),
    ("017", 17),
    (".inf", float("inf")),
    ("-.INF", float("-inf")),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("yes", "yes"),
    ("on", "on"),
    ("Off", "Off"),
    ("12:30:00", "12:30:00"),
    ("190:20:30", "190:20:30"),
    ("2024-01-31", "2024-01-31"),
    ("1_000", "1_000"),
    ("0b11", "0b11"),
    ("1e", "1e"),
    ("tRue", "tRue"),
    ("9" * 5000, "9" * 5000),
]


@pytest.mark.parametrize(("text", "value"), CORE, ids=[text[:12] or "empty" for text, _ in CORE])
def test_core_schema(text: str, value: Any) -> None:
    found = scalar(text)
    assert (type(found), found) == (type(value), value)


def test_nan_is_a_number_until_a_key_refuses_it() -> None:
    found = scalar(".NaN")
    assert isinstance(found, float) and found != found


def test_text_is_kept_as_written() -> None:
    job = parse_job(
        "run: [python, train.py, --lr, 1e-5, --flag, true]\n"
        "env: {VERSION: 1.10, LR: 1e-5, ON: yes, DEBUG: True, OCT: 0o17, ZERO: 007, EMPTY: '', DAY: 2024-01-31}\n"
        "tags: [1.10, 2024]\nname: 007\n"
    )
    assert job.run == ("python", "train.py", "--lr", "1e-5", "--flag", "true")
    assert job.env == {
        "VERSION": "1.10",
        "LR": "1e-5",
        "ON": "yes",
        "DEBUG": "True",
        "OCT": "0o17",
        "ZERO": "007",
        "EMPTY": "",
        "DAY": "2024-01-31",
    }
    assert job.tags == ("1.10", "2024")
    assert job.name == "007"


def test_aliases_json_bom_and_crlf_are_fine() -> None:
    job = parse_job("run: x\nenv: &e {A: 1}\nroles: {ps: {env: *e}, chief: {env: *e}}\n")
    assert job.roles["ps"].env == job.roles["chief"].env == {"A": "1"}
    assert parse_job('{"run": ["a", "b"], "workers": 2}').argv() == ["a", "b"]
    assert parse_job(b"\xef\xbb\xbfrun: x\r\nname: y\r\n").name == "y"
    assert parse_job("%YAML 1.2\n---\nrun: !!str 5\n...\n").run == "5"


def test_multi_line_command() -> None:
    assert parse_job("run: |\n  echo a: b\n  echo c\n").argv() == ["/bin/sh", "-c", "echo a: b\necho c\n"]


BOMBS = {
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
    "deep aliases": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)),
    "itself": "run: &a [*a]\n",
    "flow depth": "[" * 10_000,
    "mapping depth": "{a: " * 10_000,
    "block depth": "- " * 10_000,
    "indented depth": "".join(" " * i + "a:\n" for i in range(1000)),
    "items": "tags:\n" + "- a\n" * 50_000,
    "keys": "".join(f"k{i}: 1\n" for i in range(30_000)),
    "one long value": "run: " + "a" * ((1 << 20) - 10),
    "blank lines": "\n" * (1 << 20),
    "python object": "run: !!python/object/apply:os.system ['touch /tmp/owned']\n",
    "python name": "run: !!python/name:os.system\n",
    "binary tag": "run: !!binary aGk=\n",
    "set": "tags: !!set {a}\n",
}


def test_bombs_are_refused_quickly() -> None:
    """In a separate process, so that a bomb fails only its own test."""
    code = (
        "import resource, sys, json\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from stoker.errors import SpecError\n"
        "from stoker.spec import parse_job\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    try:\n"
        "        parse_job(text)\n"
        "        print(name, 'was taken')\n"
        "    except SpecError:\n"
        "        pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(BOMBS),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_huge_text_is_refused_without_being_read() -> None:
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        parse_job(b"[" * 100_000_000)


def test_limits_leave_room_for_real_files() -> None:
    variables = "".join(f"  VAR_{i}: value {i}\n" for i in range(2000))
    assert len(parse_job("run: x\nenv:\n" + variables).env) == 2000


@pytest.mark.parametrize(
    "text", ["a: [1, 2\n", "a: {b: 1\n", 'a: "b\n', "a: b\n c: d\n", "a: `x`\n", "%FOO\n", "a: |2x\n"]
)
def test_broken_text_has_a_place_and_a_hint(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(text)
    assert caught.value.details["line"] >= 1
    assert caught.value.details["column"] >= 1
    assert caught.value.hint


def test_a_job_file_of_blanks_is_refused_at_once() -> None:
    """Ten times the lines cost about ten times the time; 1,600 of them once took a minute."""

    def cost(lines: int) -> float:
        began = time.process_time()
        assert not is_foreign(b" \n" * lines)
        return time.process_time() - began

    assert min(cost(40_000) for _ in range(3)) < 40 * min(cost(4000) for _ in range(3))


def test_sizes_are_checked_before_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_text", lambda data: pytest.fail("read all the same"))
    assert not is_foreign(b"kind: Job\n" * 200_000)
