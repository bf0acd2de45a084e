"""Checks of this machine for `stoker doctor`. Each fact comes with its fix."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stoker import disks
from stoker.engine.local.containers import commands, runtime
from stoker.engine.local.host import capacity, isolation, processes
from stoker.engine.local.host.gpus import Gpus
from stoker.engine.local.host.isolation import Isolation
from stoker.linux.inotify import Inotify
from stoker.linux.process import boot_id
from stoker.settings import Settings
from stoker.task.units import readable_size

LITTLE_DISK = 5 << 30
NO_DISK = 64 << 20
"""With less free a server may not start, and checkpoints find no room."""
LITTLE_SHM = 1 << 30
"""Data loaders with workers pass batches through it; containers often have 64 MiB."""
FEW_FILES = 4096
FEW_INSTANCES = 512
FEW_WATCHES = 65_536


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Fact:
    name: str
    status: Health
    text: str
    fix: str = ""


def doctor_facts(settings: Settings, found: Isolation | None = None) -> list[Fact]:
    """All checks, which take some tens of milliseconds. `found`: the result of an earlier probe. Without it the
    isolation is probed, and an empty cgroup of this home may stay behind."""
    return [
        *_system(),
        *_isolation(found or isolation.probe(settings.home.root, settings.local.isolation)),
        *_resources(settings),
        *_containers(),
        *_gpus(),
        *_disk(settings.home.root),
        *_limits(),
        *_clock(),
    ]


def _system() -> Iterator[Fact]:
    yield Fact("python", Health.OK, f"{platform.python_version()} ({sys.executable})")
    if not processes.LINUX:
        text = f"{platform.system()}: runs work, but nothing is isolated and no limit is enforced"
        yield Fact("system", Health.WARN, text, "Use Linux for anything shared.")
        return
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if version < (5, 3):
        text = f"Linux {platform.release()}: the end of a launcher is found by polling, not at once"
        yield Fact("system", Health.WARN, text, "Linux 5.3 or newer has pidfds.")
    else:
        yield Fact("system", Health.OK, f"Linux {platform.release()}")
    if boot_id():
        yield Fact("boot id", Health.OK, boot_id())
    else:
        text = "/proc/sys/kernel/random/boot_id cannot be read: a reboot of the machine is not recognised"
        yield Fact("boot id", Health.FAIL, text, "Mount /proc.")


def _isolation(found: Isolation) -> Iterator[Fact]:
    for kind, how in found.summary().items():
        missing = found.missing.get(kind)
        if missing is None or (kind == "gpu" and not Path("/dev/nvidiactl").exists()):
            yield Fact(f"isolation: {kind}", Health.OK, how)
        else:
            yield Fact(f"isolation: {kind}", Health.WARN, f"{how}: {missing.reason}", missing.fix)


def _resources(settings: Settings) -> Iterator[Fact]:
    cores, memory = capacity.cpus(settings.local), capacity.memory(settings.local)
    yield Fact("cpu", Health.OK, f"{cores:g} cores for runs")
    status = Health.OK if memory >= 1 << 30 else Health.WARN
    yield Fact(
        "memory",
        status,
        f"{readable_size(memory)} for runs",
        "" if status is Health.OK else "Stop other programs.",
    )


def _containers() -> Iterator[Fact]:
    found = runtime.describe()
    if found is None:
        yield Fact("containers", Health.OK, "none: jobs with `image:` are refused here")
    elif found.limits >= {"cpu", "memory", "pids"}:
        yield Fact("containers", Health.OK, commands.summary(found))
    else:
        fix = "On machines with version 2 of control groups, delegate them to this user (systemd does)."
        yield Fact("containers", Health.WARN, commands.summary(found), fix)


def _gpus() -> Iterator[Fact]:
    gpus = Gpus()
    found = gpus.look(set())
    if gpus.problem:
        yield Fact(
            "gpu",
            Health.FAIL,
            gpus.problem,
            "Check `nvidia-smi`; after a driver update, restart the machine.",
        )
    elif not found:
        yield Fact("gpu", Health.OK, "none")
    for gpu in found:
        text = f"{gpu.model}, {readable_size(gpu.memory)}"
        if gpu.healthy:
            yield Fact(f"gpu {gpu.index}", Health.OK, text)
        else:
            fix = (
                "It is assigned again when it is free."
                if "held" in gpu.reason
                else "Reset or replace the GPU."
            )
            yield Fact(f"gpu {gpu.index}", Health.WARN, f"{text}: {gpu.reason}", fix)


def _disk(home: Path) -> Iterator[Fact]:
    existing = next(path for path in (home, *home.parents) if path.exists())
    if disks.is_read_only(existing):
        mount = disks.mount_of(existing)
        fix = f"Find out why (dmesg, mount), then: mount -o remount,rw {mount}."
        yield Fact("home", Health.FAIL, f"{home} is on a read-only file system, {mount}", fix)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Fact(
            "home", Health.FAIL, f"{home} cannot be written", "Set STOKER_HOME to a directory of yours."
        )
    free = shutil.disk_usage(existing).free
    status, text, fix = Health.OK, f"{readable_size(free)} free for {home}", ""
    if free < LITTLE_DISK:
        fix = "Make room, or set STOKER_HOME to a bigger disk."
        status = Health.FAIL if free < NO_DISK else Health.WARN
    if disks.has_no_inodes(existing):
        status, text, fix = Health.FAIL, f"no inodes for new files, {text}", "Remove some files."
    yield Fact("disk", status, text, fix)
    shm = Path("/dev/shm")
    if shm.is_dir():
        total = shutil.disk_usage(shm).total
        enough = total >= LITTLE_SHM
        fix = "" if enough else "In a container: --shm-size=2g. Otherwise: mount -o remount,size=2G /dev/shm."
        text = f"{readable_size(total)} in /dev/shm" + (
            "" if enough else ": data loaders with workers may die with a bus error"
        )
        yield Fact("shared memory", Health.OK if enough else Health.WARN, text, fix)


def _limits() -> Iterator[Fact]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        fix = "Raise the hard limit of open files (ulimit -Hn, limits.conf)."
        yield Fact("open files", Health.WARN, f"at most {hard}: about {hard // 4} tasks at once", fix)
    else:
        yield Fact(
            "open files", Health.OK, "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}"
        )
    if not processes.LINUX:
        return
    try:
        Inotify().close()
    except OSError as exc:
        text = f"not available ({exc.strerror}): changes are found by polling, up to two seconds late"
        yield Fact("inotify", Health.WARN, text, "sysctl fs.inotify.max_user_instances=8192")
        return
    instances = _sysctl("/proc/sys/fs/inotify/max_user_instances")
    watches = _sysctl("/proc/sys/fs/inotify/max_user_watches")
    text = f"{instances} instances, {watches} watches per user"
    if instances < FEW_INSTANCES:
        text += f": about {instances // 2} tasks at once are watched, the others are polled"
        yield Fact("inotify", Health.WARN, text, "sysctl fs.inotify.max_user_instances=8192")
    elif watches < FEW_WATCHES:
        yield Fact("inotify", Health.WARN, text, "sysctl fs.inotify.max_user_watches=524288")
    else:
        yield Fact("inotify", Health.OK, text)


def _clock() -> Iterator[Fact]:
    now = time.time()
    built = Path(__file__).stat().st_mtime
    if now < built - 86_400:
        text = f"says {time.strftime('%Y-%m-%d', time.gmtime(now))}, before this program was installed"
        yield Fact("clock", Health.FAIL, text, "Set the clock (timedatectl set-ntp true).")
        return
    start, wall = time.monotonic(), time.time()
    time.sleep(0.02)
    drift = abs((time.time() - wall) - (time.monotonic() - start))
    if drift > 0.01:
        text = f"jumped by {drift:.3f} s during the check: times in logs will not be in order"
        yield Fact("clock", Health.WARN, text, "Check which program sets the clock.")
        return
    synced = _synchronised()
    if synced is False:
        text = "not synchronised: times shown may be wrong (Stoker decides nothing by them)"
        yield Fact("clock", Health.WARN, text, "timedatectl set-ntp true, or install chrony.")
    else:
        yield Fact("clock", Health.OK, "synchronised" if synced else "steady")


def _synchronised() -> bool | None:
    """The kernel's answer (adjtimex): False if no program synchronises the clock. None: not known."""
    if not processes.LINUX:
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    # struct timex, all zero: only reads the state
    state = int(adjtimex(ctypes.create_string_buffer(512)))
    return None if state < 0 else state != 5  # TIME_ERROR


def _sysctl(path: str) -> int:
    text = processes.read_text(path).strip()
    return int(text) if text.isdigit() else 0
