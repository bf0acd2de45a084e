"""Packages of a run's Python, recorded with the run. Listed in the background, once per environment."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.errors import StokerError
from stoker.store import Store
from stoker.store.rows import RunRow, UpdateRun

log = logging.getLogger(__name__)

_LIST = (
    "import json, sys\n"
    "from importlib.metadata import distributions\n"
    "names = {(d.metadata['Name'] or '?') + '==' + d.version for d in distributions()}\n"
    "print(json.dumps({'packages': sorted(names, key=str.lower), 'path': [p for p in sys.path if 'site-packages' in p],"
    " 'python': sys.version.split()[0]}))\n"
)


class InstalledPackages:
    """`record` never blocks. If the packages cannot be listed, none are recorded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, tuple[tuple[float, ...], dict[str, object]]] = OrderedDict()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="packages")

    def record(self, run: RunRow, setup: str | None) -> dict[str, object] | None:
        """The run's record with its packages, if they are known already. Else None; they are then listed and recorded in
        the background. `setup`: directory of the environment that the run's setup made."""
        if "packages" in run.record:
            return None
        python, environment = _python(run, setup)
        if python is None:
            return None
        known = self._fresh(python)
        if known is None:
            self._executor.submit(self._record, run, python, environment)
            return None
        return {**run.record, **known}

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _record(self, run: RunRow, python: str, environment: dict[str, str]) -> None:
        try:
            found = self._fresh(python) or self._find(python, environment)
            self._store.apply([UpdateRun(run.id, {"record": {**run.record, **found}})])
        except (StokerError, OSError, ValueError, subprocess.SubprocessError) as exc:
            log.info("run %s: packages not recorded: %s", run.id, exc)

    def _fresh(self, python: str) -> dict[str, object] | None:
        with self._lock:
            known = self._known.get(python)
        if known is None or known[0] != _stamps(known[1]):
            return None
        return {"packages": known[1]["packages"], "python": known[1]["python"]}

    def _find(self, python: str, environment: dict[str, str]) -> dict[str, object]:
        done = subprocess.run(
            [python, "-c", _LIST],
            env={"PATH": environment["PATH"], "HOME": environment.get("HOME", "/")},
            cwd="/",
            capture_output=True,
            timeout=60,
            check=True,
        )
        found = json.loads(done.stdout)
        with self._lock:
            self._known[python] = (_stamps(found), found)
            if len(self._known) > 64:
                self._known.popitem(last=False)
        return {"packages": found["packages"], "python": found["python"]}


def _python(run: RunRow, setup: str | None) -> tuple[str | None, dict[str, str]]:
    """The interpreter that the run finds as `python`, and the environment that it was looked up in."""
    environment = dict(run.record.get("environment") or {})
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = path if setup is None else f"{setup}/env/bin{os.pathsep}{path}"
    found = (shutil.which(name, path=environment["PATH"]) for name in ("python", "python3"))
    return next((python for python in found if python), None), environment


def _stamps(found: dict[str, object]) -> tuple[float, ...]:
    """Modification times of the site directories: installing or removing a package changes them."""
    paths = found.get("path")
    return tuple(_mtime(Path(str(path))) for path in paths) if isinstance(paths, list) else ()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
