"""The remote shell that MPI uses in place of ssh, and the input of each MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher import helpers
from stoker.launcher.helpers import horovod, mpirun, rsh_protocol
from stoker.launcher.helpers.rsh_client import Host, ask, parse, read_hosts
from stoker.launcher.helpers.rsh_server import Shell, own_place
from support.processes import alive
from support.waiting import wait

KEY = "sesame-sesame"


@pytest.fixture
def shell() -> Iterator[Shell]:
    it = Shell("127.0.0.1", 0, KEY)
    thread = threading.Thread(target=it.serve)
    thread.start()
    yield it
    it.close()
    thread.join()


def at(shell: Shell) -> Host:
    return Host("worker-0", "127.0.0.1", shell.port, 1)


class TestRemoteShell:
    def test_output_and_exit_status_come_back(self, shell: Shell, capfdbinary: Any) -> None:
        assert ask(at(shell), "echo out; echo err >&2; exit 7", KEY) == 7
        out, err = capfdbinary.readouterr()
        assert (out, err) == (b"out\n", b"err\n")

    def test_a_signal_has_the_exit_status_of_a_shell(self, shell: Shell) -> None:
        assert ask(at(shell), "kill -9 $$", KEY) == 128 + signal.SIGKILL

    def test_much_output(self, shell: Shell, capfdbinary: Any) -> None:
        assert ask(at(shell), "head -c 5000000 /dev/zero", KEY) == 0
        assert len(capfdbinary.readouterr().out) == 5_000_000

    def test_the_command_sees_the_tasks_environment_but_not_the_key(
        self, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
    ) -> None:
        monkeypatch.setenv("STOKER_WORLD_KEY", KEY)
        monkeypatch.setenv("OF_THE_TASK", "yes")
        it = Shell("127.0.0.1", 0, KEY)
        thread = threading.Thread(target=it.serve)
        thread.start()
        assert ask(at(it), "echo $OF_THE_TASK:$STOKER_WORLD_KEY:", KEY) == 0
        it.close()
        thread.join()
        assert capfdbinary.readouterr().out == b"yes::\n"

    def test_another_key_is_refused_and_nothing_runs(self, shell: Shell, tmp_path: Path) -> None:
        with pytest.raises(rsh_protocol.Refused):
            ask(at(shell), f"touch {tmp_path}/ran", "another-key")
        assert ask(at(shell), "true", KEY) == 0
        assert not (tmp_path / "ran").exists()

    def test_a_replayed_request_is_refused(self, shell: Shell) -> None:
        """A proof is valid for one connection only."""
        with socket.create_connection(("127.0.0.1", shell.port)) as sock:
            first = rsh_protocol.receive(sock)["nonce"]
            second = rsh_protocol.nonce()
            heard = {
                "nonce": second,
                "command": "true",
                "mac": rsh_protocol.proof(KEY, "agent", first, second, "true"),
            }
            rsh_protocol.send(sock, heard)
            assert "mac" in rsh_protocol.receive(sock)
        with socket.create_connection(("127.0.0.1", shell.port)) as sock:
            rsh_protocol.receive(sock)
            rsh_protocol.send(sock, heard)
            with pytest.raises(rsh_protocol.Refused):
                rsh_protocol.receive(sock)

    def test_a_command_changed_on_the_way_is_refused(self, shell: Shell) -> None:
        with socket.create_connection(("127.0.0.1", shell.port)) as sock:
            first, second = rsh_protocol.receive(sock)["nonce"], rsh_protocol.nonce()
            mac = rsh_protocol.proof(KEY, "agent", first, second, "true")
            rsh_protocol.send(sock, {"nonce": second, "command": "false", "mac": mac})
            with pytest.raises(rsh_protocol.Refused):
                rsh_protocol.receive(sock)

    def test_a_shell_without_the_key_is_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def pretend() -> None:
                sock, _ = server.accept()
                with sock:
                    rsh_protocol.send(sock, {"nonce": rsh_protocol.nonce()})
                    rsh_protocol.receive(sock)
                    rsh_protocol.send(sock, {"mac": "0" * 64})

            thread = threading.Thread(target=pretend)
            thread.start()
            with pytest.raises(rsh_protocol.Refused, match="does not have the key"):
                ask(Host("worker-0", "127.0.0.1", server.getsockname()[1], 1), "true", KEY)
            thread.join()

    @pytest.mark.parametrize("what", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n", b'{"mac": 3}\n'])
    def test_other_protocols_are_refused(self, shell: Shell, what: bytes) -> None:
        with socket.create_connection(("127.0.0.1", shell.port)) as sock:
            rsh_protocol.receive(sock)
            # The connection may be closed before all of this is sent.
            with contextlib.suppress(OSError):
                sock.sendall(what)
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b""
        assert ask(at(shell), "true", KEY) == 0

    def test_the_command_ends_with_its_connection(self, shell: Shell, tmp_path: Path) -> None:
        """The agent is killed; the command that it started ends too."""
        mark = tmp_path / "pid"
        env = {**os.environ, "STOKER_WORLD_KEY": KEY, "STOKER_MPI_HOSTS": f"w=127.0.0.1:{shell.port}*1"}
        agent = subprocess.Popen(
            helpers.again("mpi-agent", "w", f"sleep 1000 & echo $! > {mark}; wait"), env=env
        )
        pid = int(wait(lambda: mark.exists() and mark.read_text().strip()))
        agent.kill()
        agent.wait()
        wait(lambda: not alive(pid))

    def test_when_terminated_it_waits_for_running_commands(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shell = subprocess.Popen(
            helpers.again("remote-shell", "127.0.0.1", str(port)),
            env={**os.environ, "STOKER_WORLD_KEY": KEY},
            stdout=subprocess.PIPE,
        )
        try:
            assert shell.stdout is not None and b"ready" in shell.stdout.readline()
            codes: list[int] = []
            command = f"touch {tmp_path}/up; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"
            thread = threading.Thread(
                target=lambda: codes.append(ask(Host("w", "127.0.0.1", port, 1), command, KEY))
            )
            thread.start()
            wait(lambda: (tmp_path / "up").exists())
            shell.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                shell.wait(0.5)
            (tmp_path / "go").touch()
            assert shell.wait(30) == 0
            thread.join()
            assert codes == [3]
        finally:
            shell.kill()
            shell.wait()
            assert shell.stdout is not None
            shell.stdout.close()

    def test_a_port_in_use_is_reported(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            done = subprocess.run(
                helpers.again("remote-shell", "127.0.0.1", str(taken.getsockname()[1])),
                env={**os.environ, "STOKER_WORLD_KEY": KEY},
                capture_output=True,
                text=True,
            )
        assert done.returncode == 71
        assert "Address already in use" in done.stderr


def test_each_task_has_its_own_directory_and_leaves_no_files() -> None:
    one, other = own_place("/tasks/a/1/worker-0"), own_place("/tasks/a/1/worker-1")
    try:
        assert one != other
        (Path(one) / "left").touch()
        assert own_place("/tasks/a/1/worker-0") == one
        assert list(Path(one).iterdir()) == []
        assert Path(one).stat().st_mode & 0o777 == 0o700
    finally:
        Path(one).rmdir()
        Path(other).rmdir()


class TestAgent:
    @pytest.mark.parametrize(
        ("argv", "found"),
        [
            (["worker-0", "orted", "-mca", "ess", '"env"'], ("worker-0", 'orted -mca ess "env"')),
            (["-x", "worker-1", "PATH=/x orted"], ("worker-1", "PATH=/x orted")),
            (["-l", "ann", "-q", "worker-1", "proxy"], ("worker-1", "proxy")),
            (["ann@worker-1", "proxy"], ("worker-1", "proxy")),
            ([], ("", "")),
        ],
    )
    def test_arguments_as_ssh_has_them(self, argv: list[str], found: tuple[str, str]) -> None:
        assert parse(argv) == found

    def test_hosts(self) -> None:
        assert read_hosts("worker-0=10.0.0.7:7000*2,worker-1=[fd00::8]:7001*4") == [
            Host("worker-0", "10.0.0.7", 7000, 2),
            Host("worker-1", "fd00::8", 7001, 4),
        ]
        assert read_hosts("") == []

    def test_an_unknown_host(self) -> None:
        env = {**os.environ, "STOKER_MPI_HOSTS": "worker-0=127.0.0.1:1*1"}
        done = subprocess.run(
            helpers.again("mpi-agent", "worker-7", "true"), env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (
            255,
            "stoker mpi-agent: no task named 'worker-7' in this world; there are: worker-0\n",
        )


class TestMpirun:
    HOSTS = [Host("worker-0", "10.0.0.7", 7000, 2), Host("worker-1", "10.0.0.8", 7000, 2)]

    @pytest.mark.parametrize(
        "argv",
        [
            ["mpirun", "-np", "2", "train"],
            ["/opt/openmpi/bin/mpiexec", "train"],
            ["/bin/sh", "-c", "mpirun -np 4 python train.py"],
            ["/bin/sh", "-c", "OMP_NUM_THREADS=1 exec mpiexec.hydra python train.py"],
        ],
    )
    def test_a_command_that_calls_it_stays_as_it_is(self, argv: list[str]) -> None:
        assert mpirun.complete(argv, "mpirun", self.HOSTS) == argv

    def test_another_command_is_run_once_for_each_slot(self) -> None:
        argv = ["/bin/sh", "-c", "python mpirun.py"]
        there = ["--wdir", "/proc/self/cwd"]
        assert mpirun.complete(argv, "mpiexec", self.HOSTS) == ["mpiexec", "-np", "4", *there, *argv]
        assert mpirun.complete(["x"], "mpirun", self.HOSTS, ["wrap"])[2:] == ["4", *there, "wrap", "x"]

    def test_files(self, tmp_path: Path) -> None:
        mpirun.write(self.HOSTS, str(tmp_path))
        assert (tmp_path / "hostfile").read_text() == "worker-0 slots=2\nworker-1 slots=2\n"
        assert (tmp_path / "hosts").read_text() == "worker-0:2\nworker-1:2\n"
        agent = (tmp_path / "agent").read_text()
        assert agent.startswith(f"#!/bin/sh\nexec {sys.executable} -I -S -c ")
        assert agent.endswith(' mpi-agent "$@"\n')
        assert (tmp_path / "agent").stat().st_mode & 0o777 == 0o700

    def test_files_of_open_mpi_4_and_5_and_mpich(self) -> None:
        env = mpirun.environment(self.HOSTS, "/task/mpi", 30.0)
        assert env == {
            "PWD": "/proc/self/cwd",
            "TMPDIR": "/task/mpi",
            "OMPI_MCA_plm": "rsh",
            "OMPI_MCA_plm_rsh_agent": "/bin/sh /task/mpi/agent",
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "OMPI_MCA_orte_default_hostfile": "/task/mpi/hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
            "OMPI_MCA_orte_leave_session_attached": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "OMPI_MCA_odls_base_sigkill_timeout": "30",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_plm": "ssh",
            "PRTE_MCA_plm_ssh_agent": "/bin/sh /task/mpi/agent",
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "PRTE_MCA_prte_default_hostfile": "/task/mpi/hostfile",
            "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
            "PRTE_MCA_prte_leave_session_attached": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PRTE_MCA_odls_base_sigkill_timeout": "30",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "HYDRA_LAUNCHER": "rsh",
            "HYDRA_LAUNCHER_EXEC": "/task/mpi/agent",
            "HYDRA_HOST_FILE": "/task/mpi/hosts",
            "I_MPI_HYDRA_BOOTSTRAP": "rsh",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": "/task/mpi/agent",
            "I_MPI_HYDRA_HOST_FILE": "/task/mpi/hosts",
        }

    def test_on_one_machine_the_loopback_is_enough(self) -> None:
        env = mpirun.environment([Host("worker-0", "127.0.0.1", 7000, 1)], "/task/mpi", 0.0)
        assert env["OMPI_MCA_btl_tcp_if_include"] == env["OMPI_MCA_oob_tcp_if_include"] == "127.0.0.0/8"
        assert env["OMPI_MCA_odls_base_sigkill_timeout"] == "1"


def test_variables_of_horovod_from_those_of_mpi() -> None:
    said = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert horovod.variables({f"OMPI_COMM_WORLD_{name}": value for name, value in said.items()}) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }
    assert horovod.variables({}) == {}
