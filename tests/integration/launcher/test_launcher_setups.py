"""`setup:` runs once, all tasks use its result, and a partial result never counts."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]

INSTALL = (
    """python -c "import site; open(site.getsitepackages()[0] + '/fresh.py', 'w').write('word = 42')" """
)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The submitting user's virtual environment, with a package and a command of its own."""
    root = tmp_path_factory.mktemp("parent") / "env"
    venv.create(root, symlinks=True)
    site = next((root / "lib").glob("python*/site-packages"))
    (site / "owned.py").write_text("word = 'from the parent'")
    tool = root / "bin" / "tool"
    tool.write_text(f"#!{root}/bin/python\nimport fresh, owned\nprint('tool', fresh.word, owned.word)\n")
    tool.chmod(0o755)
    return root


def settings(place: Path, command: str) -> dict[str, Any]:
    return {"setup": {"command": command, "directory": str(place / "setups" / "key"), "key": "key"}}


def test_built_once_and_then_used(mode: Any, task: Make, place: Path, parent: Path) -> None:
    env = {"PATH": f"{parent}/bin:/usr/bin:/bin"}
    command = f"echo building; {INSTALL} && mkdir -p gen/deep && echo made > gen/deep/file && echo new >> old"
    body = "cat gen/deep/file old; python -c 'import fresh, owned; print(fresh.word, owned.word)'; tool; echo $VIRTUAL_ENV"
    texts = []
    for name in ("worker-0", "worker-1"):
        it = task(name)
        (it.root / "code").mkdir()
        (it.root / "code" / "old").write_text("old\n")
        mode.start(it)
        it.sh(body, env=env, **settings(place, command))
        ending = it.ending()
        assert ending.code == 0, (it.text("e"), ending)
        texts.append(it.text())
        states = [entry["state"] for entry in it.journal("setup")]
        assert states == (["built"] if name == "worker-0" else ["cached"])
    result = f"made\nold\nnew\n42 from the parent\ntool 42 from the parent\n{place}/setups/key/env\n"
    assert texts == ["building\n" + result, result]
    assert not list(parent.rglob("fresh.py")), "the setup has changed the environment it stands on"


def test_pip_installs_into_the_new_environment_only(mode: Any, task: Make, place: Path) -> None:
    found = subprocess.run([sys.executable, "-c", "import pip"], capture_output=True)
    if found.returncode:
        pytest.skip("this Python has no pip")
    wheel = make_wheel(place)
    it = task()
    mode.start(it)
    env = {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    it.sh(
        "python -c 'import tiny_thing; print(tiny_thing.__file__)'",
        env=env,
        **settings(place, f"pip install --no-index --quiet --disable-pip-version-check {wheel}"),
    )
    ending = it.ending()
    assert ending.code == 0, (ending, it.text("e"))
    assert it.text().startswith(str(place / "setups" / "key" / "env"))


def make_wheel(place: Path) -> Path:
    wheel = place / "tiny_thing-1.0-py3-none-any.whl"
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_thing.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_setup_that_fails(mode: Any, task: Make, place: Path) -> None:
    it = task()
    mode.start(it)
    it.sh("echo never", **settings(place, "echo trying; echo no such package >&2; exit 4"))
    ending = it.ending()
    assert (ending.kind, ending.code) == ("setup", 4)
    assert "no such package" in ending.last_lines and "trying" in ending.last_lines
    assert it.journal("setup")[0]["state"] == "failed"
    assert not (place / "setups" / "key").exists()
    assert "never" not in it.text()


def test_two_tasks_build_it_once(mode: Any, task: Make, place: Path) -> None:
    command = f"echo x >> {place}/count; sleep 0.5; echo ok > made"
    tasks = [task(f"worker-{n}") for n in range(3)]
    for it in tasks:
        mode.start(it)
        it.sh("cat made", **settings(place, command))
    for it in tasks:
        assert it.ending().code == 0
        assert it.text() == "ok\n"
    assert (place / "count").read_text() == "x\n"
    states = sorted(it.journal("setup")[0]["state"] for it in tasks)
    assert states == ["built", "cached", "cached"]


def test_stop_during_a_setup(mode: Any, task: Make, place: Path) -> None:
    it = task()
    mode.start(it)
    it.sh("echo never", **settings(place, "echo building; sleep 1000"))
    it.said("building")
    assert it.near.status().phase == "setup"
    it.order("stop", grace=10.0)
    assert it.ending(1).kind == "stopped"
    it.nothing_left()
    assert not (place / "setups" / "key").exists()


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
def test_a_killed_setup_is_made_again_from_nothing(mode: Any, task: Make, place: Path) -> None:
    first = task("worker-0")
    launcher = mode.start(first)
    half = "touch $VIRTUAL_ENV/half; echo building"
    first.sh("echo never", **settings(place, f"{half}; sleep 1000"))
    first.said("building")
    launcher.kill()
    first.nothing_left()
    second = task("worker-1")
    mode.start(second)
    second.sh("ls $VIRTUAL_ENV", **settings(place, "echo whole"))
    assert second.ending().code == 0
    assert "half" not in second.text() and "bin" in second.text()
