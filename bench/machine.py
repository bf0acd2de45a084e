"""The facts about the machine that affect the figures, read again for every row."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.figures import figure
from stoker import __version__

_SYNCS = 30


def describe(where: Path) -> dict[str, Any]:
    """`where`: a directory on the disk that the row works on."""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "disk": f"{_filesystem(where)}, fsync {figure(_sync_times(where), 'ms').text()}",
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def versions() -> dict[str, str]:
    """The versions of Stoker and its dependencies."""
    return {
        "stoker": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def commit() -> str:
    """Short hash of the checkout, with a + if measured files differ from it."""
    root = Path(__file__).parent.parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return f"{head}{'+' if _git(root, 'status', '--porcelain', '--', 'src', 'bench') else ''}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or sys.platform


def _filesystem(where: Path) -> str:
    best = max(
        (part for part in psutil.disk_partitions(all=True) if where.is_relative_to(part.mountpoint)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return best.fstype if best else "unknown file system"


def _sync_times(where: Path) -> list[float]:
    """Milliseconds for 4 KiB and fsync: the minimal cost of each durable answer."""
    times = []
    with tempfile.NamedTemporaryFile(dir=where) as handle:
        for _ in range(_SYNCS):
            begin = time.perf_counter()
            os.write(handle.fileno(), b"x" * 4096)
            os.fsync(handle.fileno())
            times.append((time.perf_counter() - begin) * 1000)
    return times
