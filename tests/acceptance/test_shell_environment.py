"""The Python and the variables that a run on this machine gets from the shell that submits it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.box import Box
from support.waiting import wait

pytestmark = pytest.mark.shared_server

SHOW = """
import json, os, sys
print(json.dumps({"python": sys.executable, "env": dict(os.environ)}))
"""


def shown(box: Box, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box("run", "-q", *flags, "show.py").stdout)
    return found


def holders(box: Box, text: bytes) -> list[Path]:
    """The files of the home in which this is."""
    found = []
    for path in box.home.root.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.is_file() and text in path.read_bytes():
                found.append(path)
    return found


def test_the_python_of_the_shell_runs_it_and_is_named_where_a_module_is_missing(
    box: Box, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    box.write("show.py", SHOW)
    box.write("train.py", "import nothing_of_this_name\n")
    box.env.update(VIRTUAL_ENV=str(venv), PATH=f"{venv}/bin:{box.env['PATH']}")
    assert shown(box)["python"] == f"{venv}/bin/python"
    failed = box("run", "train.py", code=1).stderr
    assert f"hint: {venv}/bin/python ran it and has no nothing_of_this_name." in failed
    assert "activate its environment" in failed and "stoker why" in failed
    box.env["PATH"] = box.env["PATH"].removeprefix(f"{venv}/bin:")
    named = box("run", f"{venv}/bin/python", "train.py", code=1).stderr
    assert f"hint: {venv}/bin/python ran it" in named, "by its path, though the PATH leads elsewhere"


def test_variables_for_training_come_along_and_secrets_are_never_shown(box: Box) -> None:
    box.write("show.py", SHOW)
    box.env.update(
        HF_HOME="/data/hf",
        HF_TOKEN="hf-open-sesame",
        http_proxy="http://ada:open-sesame@127.0.0.1:9",
        GITHUB_TOKEN="ghp-open-sesame",
        DATA_ROOT="/data",
        MKL_NUM_THREADS="1",
        OMP_NUM_THREADS="",
        no_proxy="*",
    )
    del box.env["OMP_NUM_THREADS"]
    seen = shown(box, "--cpu", "2", "-e", "DATA_ROOT")["env"]
    names = ("HF_HOME", "DATA_ROOT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert [seen[name] for name in names] == ["/data/hf", "/data", "2", "1", "2"]
    assert (seen["HF_TOKEN"], seen["http_proxy"]) == ("[secret HF_TOKEN]", "[secret http_proxy]"), (
        "it had them"
    )
    assert "GITHUB_TOKEN" not in seen
    record = box.json("show", "@last")["record"]
    assert record["secrets"] == ["HF_TOKEN", "http_proxy"] and "HF_TOKEN" not in record["environment"]
    told = box("show", "@last", "--json").stdout + box("show", "@last").stdout + box("logs", "@last").stdout
    assert "sesame" not in told
    wait(
        lambda: holders(box, b"sesame"), lambda found: found == []
    )  # nothing of them is left of a run that is over

    clean = shown(box, "--clean-env", "--cpu", "2")["env"]
    assert clean["PATH"] == seen["PATH"] and clean["MKL_NUM_THREADS"] == "2"
    assert not {"HF_HOME", "HF_TOKEN", "http_proxy", "DATA_ROOT"} & set(clean)


def test_two_tasks_without_a_framework_find_their_world(box: Box) -> None:
    box.write(
        "show.py",
        "import os\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')\n"
        "print('world', *(os.environ[name] for name in names), os.environ['MASTER_PORT'].isdigit())\n",
    )
    box.env["RANK"] = "7"
    told = box("run", "-q", "--workers", "2", "show.py").stdout
    worlds = sorted(text[text.index("world") :] for text in told.splitlines() if "world" in text)
    assert worlds == [f"world {rank} 2 0 1 127.0.0.1 True" for rank in (0, 1)]
