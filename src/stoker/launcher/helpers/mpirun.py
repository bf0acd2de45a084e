"""`mpirun COMMAND...`: runs a command over the workers of this world, with the MPI on the PATH.

Open MPI 4 and 5, MPICH and Intel MPI have different settings for the hosts and for the program to call instead of ssh. All of
them read the environment, so the variables of all are set. A command that calls mpirun itself is started unchanged, with the
same environment.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import sys
import tempfile
from typing import Dict, List, Sequence

from stoker.launcher.helpers import CANNOT, again, become
from stoker.launcher.helpers.rsh_client import HOSTS, Host, read_hosts

RUNNERS = (
    "mpirun",
    "mpiexec",
    "orterun",
    "prterun",
    "mpiexec.hydra",
    "mpiexec.openmpi",
    "mpirun.openmpi",
    "mpirun_rsh",
)
GRACE = "STOKER_MPI_GRACE"
LOOPBACK = "127.0.0.0/8"
HERE = "/proc/self/cwd"


def main(argv: List[str], wrap: Sequence[str] = ()) -> int:
    hosts = read_hosts(os.environ.get(HOSTS, ""))
    if not hosts or not argv:
        print(f"usage: mpirun COMMAND..., with {HOSTS} in the environment", file=sys.stderr)
        return 64
    place = _place()
    env = {**os.environ, **environment(hosts, place, float(os.environ.get(GRACE) or 1.0))}
    write(hosts, place)
    runner = next((name for name in ("mpirun", "mpiexec") if shutil.which(name)), None)
    if runner is None and not calls_mpirun(argv):
        print(
            "stoker: there is no mpirun on the PATH: the image or the setup must provide an MPI",
            file=sys.stderr,
        )
        return CANNOT
    command = complete(argv, runner or "mpirun", hosts, [*again(wrap[0]), *wrap[1:]] if wrap else [])
    return become(command, env)


def complete(argv: Sequence[str], runner: str, hosts: Sequence[Host], wrap: Sequence[str] = ()) -> List[str]:
    """The command for one rank per slot. A command that calls mpirun itself is unchanged."""
    if calls_mpirun(argv):
        return list(argv)
    return [runner, "-np", str(sum(host.slots for host in hosts)), "--wdir", HERE, *wrap, *argv]


def calls_mpirun(argv: Sequence[str]) -> bool:
    """Whether the command, or its line for the shell, begins with mpirun or another name of it."""
    words = list(argv)
    if len(words) == 3 and os.path.basename(words[0]) in ("sh", "bash") and words[1].startswith("-"):
        try:
            words = shlex.split(words[2])
        except ValueError:
            words = words[2].split()
        while words and (words[0] == "exec" or "=" in words[0].split("/")[0]):
            words.pop(0)
    return bool(words) and os.path.basename(words[0]) in RUNNERS


def environment(hosts: Sequence[Host], place: str, grace: float) -> Dict[str, str]:
    """The variables for every supported MPI. `place`: the directory of the files that `write` makes."""
    agent, hostfile, plain = (os.path.join(place, name) for name in ("agent", "hostfile", "hosts"))
    seconds = str(max(1, int(grace)))
    env = {
        # Ranks are started in mpirun's working directory, by its path. On a worker this path is the worker's own
        # directory. Open MPI 4 and MPICH take it from PWD; Open MPI 5 needs an option (`complete`).
        "PWD": HERE,
        # MPI names its files by process ids, which are not unique where each task has a PID namespace.
        "TMPDIR": place,
        # Open MPI 4
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": f"/bin/sh {agent}",
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_default_hostfile": hostfile,
        "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
        "OMPI_MCA_orte_leave_session_attached": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_odls_base_sigkill_timeout": seconds,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Open MPI 5
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": f"/bin/sh {agent}",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": hostfile,
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
        "PRTE_MCA_prte_leave_session_attached": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PRTE_MCA_odls_base_sigkill_timeout": seconds,
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # MPICH
        "HYDRA_LAUNCHER": "rsh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_HOST_FILE": plain,
        # Intel MPI
        "I_MPI_HYDRA_BOOTSTRAP": "rsh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent,
        "I_MPI_HYDRA_HOST_FILE": plain,
    }
    if all(ipaddress.ip_address(host.address).is_loopback for host in hosts):
        # All on one machine. Open MPI does not use the loopback interface by default, and there may be no other.
        env["OMPI_MCA_oob_tcp_if_include"] = env["OMPI_MCA_btl_tcp_if_include"] = LOOPBACK
        env["HYDRA_IFACE"] = "lo"
    return env


def write(hosts: Sequence[Host], place: str) -> None:
    """The files that `environment` names."""
    _put(os.path.join(place, "hostfile"), "".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    _put(os.path.join(place, "hosts"), "".join(f"{host.name}:{host.slots}\n" for host in hosts))
    _put(os.path.join(place, "agent"), f'#!/bin/sh\nexec {shlex.join(again("mpi-agent"))} "$@"\n', 0o700)


def _place() -> str:
    """A directory for this body, without a space in its path: Open MPI splits the agent's path at spaces."""
    task = os.environ.get("STOKER_TASK_DIR")
    if task and not any(character.isspace() for character in task):
        place = os.path.join(task, "mpi")
        os.makedirs(place, mode=0o700, exist_ok=True)
        return place
    return tempfile.mkdtemp(prefix="stoker-mpi-")


def _put(path: str, text: str, mode: int = 0o600) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
