"""The engine as an ordinary user: no cgroups, perhaps a user namespace, else a guardian."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

import stoker

UID = 54321
NEEDED = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection", "yaml")
"""The packages that the engine imports besides Stoker."""
STORY = r"""
import asyncio, json, os, sys, time
from datetime import timedelta
from pathlib import Path
from stoker.engine.base import Attempt, Presence, TaskPlan
from stoker.engine.local import LocalEngine, doctor_facts
from stoker.settings import Home, LocalSettings, Settings
from stoker.task import formats

os.environ.pop("XDG_RUNTIME_DIR", None)
settings = Settings(Home(Path(sys.argv[1])), local=LocalSettings(isolation=sys.argv[2]))
GREEDY = "import time\nx = []\nwhile True: x.append(bytearray(8 << 20)); time.sleep(0.02)"
DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('up'); time.sleep(600)"

async def start(engine, run, code, **limits):
    handle = await engine.submit(Attempt(run, 1, (TaskPlan("worker-0", **limits),)))
    directory = await engine.reach(handle, "worker-0")
    argv = [sys.executable, "-c", code]
    directory.write_order(formats.Order(seq=1, generation=1, verb="run", argv=argv, env={"PATH": "/usr/bin:/bin"}))
    return handle, directory

async def until(probe):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (found := probe()):
            return found
        await asyncio.sleep(0.02)
    raise SystemExit("waited too long")

async def main():
    engine = LocalEngine(settings)
    node = (await engine.capacity())[0]
    told = {"isolation": dict(node.isolation), "doctor": {f.name: str(f.status) for f in doctor_facts(settings)}}
    _, plain = await start(engine, "plain", "import os; raise SystemExit(7 if os.getuid() == %d else 1)" % os.getuid())
    told["plain"] = (await until(lambda: plain.status() and plain.status().ending))["code"]
    _, greedy = await start(engine, "greedy", GREEDY, memory=150 << 20)
    told["greedy"] = (await until(lambda: greedy.status() and greedy.status().ending))["kind"]
    handle, hurt = await start(engine, "hurt", "import time; time.sleep(600)")
    await until(lambda: hurt.status() and hurt.status().phase == "running")
    await engine.hurt(handle, "worker-0", "process")
    told["hurt"] = (await until(lambda: hurt.status() and hurt.status().ending))["signal"]
    handle, lost = await start(engine, "lost", DAEMON)
    await until(lambda: lost.status() and lost.status().phase == "running")
    await engine.hurt(handle, "worker-0", "launcher")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = {found.run: found for found in await engine.observe()}
        if seen["lost"].presence is Presence.GONE:
            break
        await asyncio.sleep(0.02)
    told["lost"] = str(seen["lost"].presence)
    for found in await engine.observe():
        await engine.stop(found.handle, grace=timedelta(seconds=1))
        await engine.remove(found.handle)
    told["left"] = [str(path) for path in settings.home.tasks.iterdir()]
    await engine.close()
    print(json.dumps(told))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user: the rest of the suite tests this")
@pytest.mark.parametrize("mode", ["auto", "none"])
def test_an_ordinary_user_can_run_and_is_told_what_is_missing(mode: str) -> None:
    with tempfile.TemporaryDirectory(prefix="stoker-user-") as root:
        os.chmod(root, 0o755)
        # Root's own installation is often closed to others: a copy of the code, and an interpreter that they
        # may use.
        shutil.copytree(
            Path(stoker.__file__).parent, Path(root, "lib", "stoker"), ignore=shutil.ignore_patterns("static")
        )
        for name in NEEDED:
            found = Path(sysconfig.get_path("purelib"), name)
            copy = shutil.copytree if found.is_dir() else shutil.copy
            copy(found, Path(root, "lib", name))
        home = Path(root, "home")
        home.mkdir(mode=0o700)
        os.chown(home, UID, UID)
        done = _as_user([_python(root), "-c", STORY, str(home), mode], root)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["isolation"]["processes"] in (
        {"user + pid namespace", "guardian"} if mode == "auto" else {"guardian"}
    )
    assert (told["isolation"]["memory"], told["isolation"]["pids"]) == ("watchdog", "watchdog")
    assert told["isolation"]["cpu"] == "affinity"
    assert told["doctor"]["isolation: memory"] == "warn"
    assert (told["plain"], told["greedy"], told["lost"]) == (7, "oom", "gone")
    assert told["hurt"] == 9
    assert told["left"] == []


def _python(root: str) -> str:
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if (
                _as_user(
                    [path, "-c", "import sys, stoker.engine.local; assert sys.version_info >= (3, 11)"], root
                ).returncode
                == 0
            ):
                return path
        except OSError:
            continue
    pytest.skip("no Python like ours that other users may run")


def _as_user(command: list[str], root: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        user=UID,
        group=UID,
        extra_groups=[],
        env={"PATH": "/usr/bin:/bin", "HOME": f"{root}/home", "PYTHONPATH": f"{root}/lib"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
