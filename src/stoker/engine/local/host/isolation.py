"""Probes what isolation this machine can enforce, and reports what is missing.

A missing kind is not an error: the launcher then does what is possible without the kernel (affinity, a watchdog, a
guardian). `doctor`, `nodes` and `show` show the reason and the fix.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.engine.local.host import cgroups, processes
from stoker.linux import cgroup_paths, syscalls

PID_NAMESPACE = "pid namespace"
USER_NAMESPACE = "user + pid namespace"
GUARDIAN = "guardian"
WATCHDOG = "watchdog"
AFFINITY = "affinity"
VISIBLE_ONLY = "CUDA_VISIBLE_DEVICES only"


@dataclass(frozen=True)
class Missing:
    """A kind of isolation that is not available."""

    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Isolation:
    """How each kind of resource is isolated. Probed once per server; tasks keep what they were started with."""

    processes: str = GUARDIAN
    memory: str = WATCHDOG
    cpu: str = AFFINITY
    pids: str = WATCHDOG
    gpu: str = VISIBLE_ONLY
    tree: cgroups.CgroupTree | None = None
    """Where groups are created; None: no cgroups."""
    wrap: tuple[str, ...] = ()
    """Put before the fork server's command: a scope of the user's systemd, if groups are created there."""
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """kind -> why the best method is not used."""

    @property
    def pid_namespace(self) -> bool:
        return self.processes in (PID_NAMESPACE, USER_NAMESPACE)

    @property
    def user_namespace(self) -> bool:
        return self.processes == USER_NAMESPACE

    def summary(self) -> dict[str, str]:
        """The value of Node.isolation."""
        return {
            "processes": self.processes,
            "memory": self.memory,
            "cpu": self.cpu,
            "pids": self.pids,
            "gpu": self.gpu,
        }


def probe(home: Path, wanted: str = "auto") -> Isolation:
    """Try each kind. `wanted` is LocalSettings.isolation. Takes some tens of milliseconds; leaves only the empty group
    of this home behind."""
    if not processes.LINUX:
        return Isolation(cpu="none", missing=_everywhere(f"{sys.platform} has no namespaces and no cgroups"))
    if wanted == "none":
        off = Missing("switched off by local.isolation = 'none'", "Set local.isolation to 'auto'.")
        return Isolation(missing=dict.fromkeys(("processes", "memory", "cpu", "pids", "gpu"), off))
    missing: dict[str, Missing] = {}
    mode = _processes(missing)
    tree, wrap = _groups(home, missing)
    return _assembled(mode, tree, wrap, missing)


def _assembled(
    mode: str, tree: cgroups.CgroupTree | None, wrap: tuple[str, ...], missing: dict[str, Missing]
) -> Isolation:
    have = tree.roots if tree is not None else {}
    name = f"cgroup v{tree.version}" if tree is not None else ""
    quota = "cgroup v1 quota" if tree is not None and tree.version == 1 else name
    if "devices" not in have:
        missing.setdefault(
            "gpu", Missing("GPUs are hidden by CUDA_VISIBLE_DEVICES, which a process may change")
        )
    return Isolation(
        processes=mode,
        memory=name if "memory" in have else WATCHDOG,
        cpu=quota if "cpu" in have else AFFINITY,
        pids=name if "pids" in have else WATCHDOG,
        gpu="devices cgroup" if "devices" in have else VISIBLE_ONLY,
        tree=tree if have else None,
        wrap=wrap,
        missing=missing,
    )


def in_scope(found: Isolation, pid: int, name: str) -> Isolation:
    """The isolation once the fork server runs in its scope: groups are created below it, where tasks start."""
    _, own = cgroup_paths.find(
        processes.read_text("/proc/self/mountinfo"), processes.read_text(f"/proc/{pid}/cgroup")
    )
    own = own.removesuffix(f"/{cgroups.SERVER_LEAF}") if own is not None else None
    problem = "the fork server's cgroup is not known" if own is None else delegate(own, name, {pid})
    missing = {kind: why for kind, why in found.missing.items() if kind not in _FALLBACK}
    if problem is not None or own is None:
        _explain(missing, dict.fromkeys(_FALLBACK, problem or ""), have=set(), version=2)
        return replace(_assembled(found.processes, None, (), missing), wrap=found.wrap)
    tree = _tree_at(f"{own}/{name}")
    _explain(missing, {}, have=set(tree.roots), version=2)
    return _assembled(found.processes, tree, found.wrap, missing)


# -- processes ---------------------------------------------------------------------------------------------------

_UNSHARE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(what, *arguments):
    if getattr(libc, what)(*arguments) != 0:
        number = ctypes.get_errno()
        sys.exit(what + ": " + os.strerror(number))
uid, gid = os.getuid(), os.getgid()
user = sys.argv[1] == "user"
call("unshare", (0x10000000 if user else 0) | 0x20000000 | 0x00020000)
if user:
    for name, text in (("setgroups", "deny"), ("uid_map", "%d %d 1" % (uid, uid)), ("gid_map", "%d %d 1" % (gid, gid))):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
pid = os.fork()
if pid == 0:
    os._exit(0 if os.getpid() == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _processes(missing: dict[str, Missing]) -> str:
    plain = _unshare("plain")
    if plain is None:
        return PID_NAMESPACE
    user = _unshare("user")
    if user is None:
        return USER_NAMESPACE
    reason = f"no PID namespace ({plain}; with a user namespace: {user}), so a guardian process watches each launcher"
    missing["processes"] = Missing(reason, _namespace_fix())
    return GUARDIAN


def _unshare(how: str) -> str | None:
    """Why it does not work; None if it does."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _UNSHARE, how],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _namespace_fix() -> str:
    for path, bad, fix in (
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ):
        if processes.read_text(path).strip() == bad:
            return f"An administrator can allow it with `sysctl {fix}`."
    return (
        "In a container, allow it with `--security-opt seccomp=unconfined` or run as root with CAP_SYS_ADMIN."
    )


# -- cgroups -----------------------------------------------------------------------------------------------------


def _groups(home: Path, missing: dict[str, Missing]) -> tuple[cgroups.CgroupTree | None, tuple[str, ...]]:
    first, second = cgroup_paths.find(
        processes.read_text("/proc/self/mountinfo"), processes.read_text("/proc/self/cgroup")
    )
    name = cgroups.home_name(home)
    problems: dict[str, str] = {}
    roots = {}
    for controller, own in first.items():
        problem = _try_v1(controller, f"{own}/{name}")
        if problem is None:
            roots[controller] = f"{own}/{name}"
        else:
            problems[controller] = problem
    if roots:
        _explain(missing, problems, have=set(roots), version=1)
        return cgroups.CgroupTree(1, roots), ()
    if second is not None and not any(controller in first for controller in cgroups.V2_CONTROLLERS):
        tree, wrap, problem = _find_v2_tree(second, name)
        if tree is not None and not wrap:
            problem = _try_v2(tree)
        if tree is not None and not problem:
            _explain(missing, {}, have=set(tree.roots), version=2)
            return tree, wrap
        problems.update(dict.fromkeys(cgroups.V2_CONTROLLERS, problem))
    _explain(missing, problems, have=set(), version=1 if first else 2)
    return None, ()


def _try_v1(controller: str, root: str) -> str | None:
    """Create a group, set a limit, put a process into it. The error; None: it works."""
    trial = cgroups.CgroupTree(1, {controller: root})
    name = f"probe-{os.getpid()}"
    try:
        cgroups.make(trial, name, cgroups.Limits(cpu=1.0, memory=64 << 20, pids=16))
        return _try_joining(f"{root}/{name}")
    except OSError as exc:
        return f"{exc.strerror or exc} ({exc.filename or root})"
    finally:
        cgroups.remove(trial.record(name))


def _try_v2(tree: cgroups.CgroupTree) -> str:
    """As `_try_v1` for version 2; empty: it works."""
    name = f"probe-{os.getpid()}"
    try:
        cgroups.make(tree, name, cgroups.Limits(cpu=1.0, memory=64 << 20, pids=16))
        return _try_joining(f"{next(iter(tree.roots.values()))}/{name}") or ""
    except (OSError, StopIteration) as exc:
        return f"{getattr(exc, 'strerror', None) or exc} ({getattr(exc, 'filename', None) or name})"
    finally:
        cgroups.remove(tree.record(name))


def _try_joining(directory: str) -> str | None:
    child = subprocess.Popen(["/bin/sh", "-c", "read x"], stdin=subprocess.PIPE)
    try:
        Path(directory, "cgroup.procs").write_text(str(child.pid))
        inside = str(child.pid) in processes.read_text(f"{directory}/cgroup.procs").split()
        return None if inside else f"a process put into {directory} did not stay there"
    finally:
        child.communicate()


def _find_v2_tree(own: str, name: str) -> tuple[cgroups.CgroupTree | None, tuple[str, ...], str]:
    """Version 2: the own subtree if it was delegated, else a systemd scope, else, as root, the top of the hierarchy."""
    own = own.removesuffix(f"/{cgroups.SERVER_LEAF}")
    ours = {os.getpid(), *syscalls.descendants(os.getpid())}
    problem = delegate(own, name, ours)
    if problem is None:
        return _tree_at(f"{own}/{name}"), (), ""
    scope = _scope()
    if scope is not None:
        # The fork server is started in the scope; the engine creates the groups below it afterwards.
        return cgroups.CgroupTree(2, {}), scope, ""
    top = cgroups.unified(processes.read_text("/proc/self/mountinfo"))
    if os.geteuid() == 0 and top is not None and top != own and delegate(top, name, ours) is None:
        return _tree_at(f"{top}/{name}"), (), ""
    return None, (), problem


def _tree_at(root: str) -> cgroups.CgroupTree:
    have = processes.read_text(f"{root}/cgroup.controllers").split()
    return cgroups.CgroupTree(2, {name: root for name in cgroups.V2_CONTROLLERS if name in have})


def delegate(own: str, name: str, ours: set[int]) -> str | None:
    """Prepare `own`/`name` for groups with limits. The error; None: it is ready.

    The kernel allows processes only in leaf groups, so the server's processes are moved into one. If the group has
    processes of others, it does not belong to the server, and nothing is moved.
    """
    is_top = not Path(own, "cgroup.type").exists()
    try:
        offered = set(processes.read_text(f"{own}/cgroup.controllers").split())
        wanted = [controller for controller in cgroups.V2_CONTROLLERS if controller in offered]
        if not wanted:
            return f"no controllers are delegated to {own}"
        inside = {int(word) for word in processes.read_text(f"{own}/cgroup.procs").split()}
        if not is_top and inside - ours:
            return f"other processes ({sorted(inside - ours)[0]}, ...) are in {own}"
        root = Path(own, name)
        root.mkdir(exist_ok=True)
        if not is_top:
            leaf = Path(own, cgroups.SERVER_LEAF)
            leaf.mkdir(exist_ok=True)
            for pid in inside:
                (leaf / "cgroup.procs").write_text(str(pid))
        enable(own, wanted)
        enable(str(root), wanted)
    except OSError as exc:
        return f"{exc.strerror or exc} ({exc.filename or own})"
    return None


def enable(directory: str, controllers: list[str]) -> None:
    Path(directory, "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def _scope() -> tuple[str, ...] | None:
    """The command that starts a program in a delegated scope of this user's systemd (root: the machine's). None:
    systemd does not respond."""
    program = shutil.which("systemd-run")
    if program is None or not Path("/run/systemd/system").is_dir():
        return None
    user = () if os.geteuid() == 0 else ("--user",)
    command = (program, *user, "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")
    try:
        done = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if done.returncode == 0 else None


# -- messages ----------------------------------------------------------------------------------------------------

_FALLBACK = {
    "memory": "a watchdog checks memory at short intervals, so a fast allocation may exceed the limit",
    "cpu": "tasks are bound to whole cores",
    "pids": "a watchdog counts processes",
}


def _explain(
    missing: dict[str, Missing], problems: Mapping[str, str], *, have: set[str], version: int
) -> None:
    fix = (
        "Run the server as root, or have an administrator delegate a cgroup to this user."
        if version == 1
        else "Start the server where systemd responds, or in a unit or container with a delegated cgroup."
    )
    for kind, instead in _FALLBACK.items():
        if kind not in have:
            why = problems.get(kind, "this machine has no such cgroup controller")
            missing[kind] = Missing(f"no {kind} cgroup: {why}; {instead}", fix)


def _everywhere(reason: str) -> dict[str, Missing]:
    return {
        kind: Missing(reason, "Use Linux for isolation.")
        for kind in ("processes", "memory", "cpu", "pids", "gpu")
    }
