"""Servers on PostgreSQL: two on one database, killed, stopped and resumed; and outages of the database."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stoker.client.api import Client
from stoker.errors import StokerError
from stoker.server.leadership import STEPPED_DOWN
from stoker.store import Store
from stoker.testing.store_postgres import PostgresServer
from support.box import Box
from support.store.contents import everything
from support.waiting import wait

PASSWORD = "correct-horse-battery"

PACED = """
import json, os, time
directory = os.environ["STOKER_CHECKPOINT_DIR"]
import stoker
for step in range(100000):
    stoker.report(step=step, loss=1.0 / (step + 1))
    print("step", step, flush=True)
    if step % 20 == 0:
        path = os.path.join(directory, "state.json")
        with open(path + ".tmp", "w") as file:
            json.dump({"step": step}, file)
        os.replace(path + ".tmp", path)
    time.sleep(0.05)
"""


class Shared(Box):
    """A home that several servers share."""

    def __init__(self, root: Path, database: str, *, lease: float) -> None:
        super().__init__(root)
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.database = database
        self.home.root.mkdir(parents=True)
        self.home.config.write_text(f'[server]\ndatabase = "{database}"\nlease = {lease}\n')

    def start(self, name: str) -> Server:
        """Start a server of this name. It runs when this returns, leading or waiting."""
        log = self.home.root / f"server-{name}.log"
        size = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as file:
            self.servers[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.server", "--home", str(self.home.root)],
                env={**self.env, "STOKER_REPLICA": name},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        line = wait(lambda: [line for line in log.read_text()[size:].splitlines() if "serving" in line])[0]
        url = next(word for word in line.replace(",", "").split() if word.startswith("http://"))
        return Server(url, self.home.token.read_text().strip(), self.servers[name])

    def carried(self, run: str) -> int:
        """Bytes of the run's log that the servers have collected."""
        return sum(path.stat().st_size for path in (self.home.runs / run / "logs").rglob("*.log"))

    def close(self) -> None:
        for server in self.servers.values():
            if server.poll() is None:
                server.send_signal(signal.SIGCONT)
        super().close()
        for server in self.servers.values():
            if server.poll() is None:
                server.kill()
            server.wait(60)


class Server:
    def __init__(self, url: str, token: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self._token, self.process = url, token, process

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def client(self) -> Client:
        return Client(self.url, self._token)

    def leads(self) -> bool:
        return self.process.poll() is None and self.get("/readyz")[0] == 200


@pytest.fixture
def shared(tmp_path: Path, postgres: PostgresServer) -> Iterator[Shared]:
    database = postgres.fresh().replace("stoker@", f"stoker:{PASSWORD}@")
    box = Shared(tmp_path, database, lease=8)
    yield box
    box.close()
    for path in box.home.root.rglob("*"):
        if path.is_file() and path != box.home.config:
            assert PASSWORD.encode() not in path.read_bytes(), f"the password is in {path}"


def check_once(box: Shared, run: str) -> None:
    """Nothing of the run is duplicated or missing."""
    shown = box.show(run)
    assert [attempt["number"] for attempt in shown["attempts"]] == [1]
    lines = [line for line in box("logs", run).stdout.splitlines() if line.startswith("step")]
    assert lines == [f"step {number}" for number in range(len(lines))] and lines
    with Store.open(box.database, create=False) as store:
        steps = [point[0] for point in store.metric_points(run, "loss")]
        assert steps == list(range(len(steps))) and steps
        kinds = [event.kind for event in store.events(run)]
        assert kinds.count("queued") == kinds.count("starting") == kinds.count("running") == 1
        names = [checkpoint.id for checkpoint in store.checkpoints(run)]
        assert len(names) == len(set(names))


@pytest.mark.long
def test_one_leads_the_other_waits_and_takes_over_when_it_is_killed(shared: Shared) -> None:
    ada = shared.start("ada")
    wait(ada.leads)
    bob = shared.start("bob")
    assert bob.get("/healthz") == (200, {"status": "standby", "home_id": ada.get("/healthz")[1]["home_id"]})
    status, body = wait(lambda: bob.get("/readyz"), lambda answer: "ada leads" in str(answer))
    assert status == 503 and body["error"]["code"] == "not-leading" and ada.url in body["error"]["hint"]
    assert bob.get("/api/v1/runs")[0] == 503
    assert bob.get("/api/v1/server")[1]["leading"] is False
    found = shared.json("server", "status")
    assert found["leading"] is True and found["url"] == ada.url and found["store"]["kind"] == "postgresql"

    if "namespace" in json.dumps(shared.client().nodes()):
        curious = shared.submit(
            "--", "sh", "-c", f"cat {shared.home.config} /proc/[0-9]*/environ; echo looked"
        )
        assert shared.ended(curious)["state"] == "succeeded"
        said = shared("logs", curious).stdout
        assert "looked" in said and PASSWORD not in said, "a run sees the password of the database"

    shared.write("train.py", PACED)
    run = shared.submit("train.py")
    queued = [shared.submit("--", "sh", "-c", "sleep 0.2; echo done") for _ in range(3)]
    wait(lambda: shared.show(run)["checkpoints"])
    launcher = shared.launcher(run)
    ada.process.kill()
    wait(bob.leads)
    assert shared.json("server", "status")["url"] == bob.url
    for other in queued:
        assert shared.ended(other)["state"] == "succeeded"
    assert shared.ended(shared.submit("--", "true"))["state"] == "succeeded"
    assert shared.show(run)["state"] == "running" and shared.launcher(run) == launcher
    before = shared.carried(run)
    wait(lambda: shared.carried(run), lambda now: now > before + 1000)
    shared("stop", run)
    shared.ended(run)
    check_once(shared, run)


def test_a_home_whose_database_another_home_leads_says_so(shared: Shared, tmp_path: Path) -> None:
    """Two homes were given the same database by mistake."""
    ada = shared.start("ada")
    wait(ada.leads)
    other = Box(tmp_path / "other")
    other.home.root.mkdir(parents=True)
    other.home.config.write_text(shared.home.config.read_text())
    try:
        done = other("ps", code=None)
        assert done.returncode == 1 and "ada leads" in done.stderr and ada.url in done.stderr
        assert other.json("server", "status")["leading"] is False
        other("server", "stop")
        assert other.server_pid() is None and ada.leads()
    finally:
        other.kill_server()


@pytest.mark.long
def test_a_leader_that_was_stopped_and_wakes_up_changes_nothing(shared: Shared) -> None:
    ada = shared.start("ada")
    wait(ada.leads)
    bob = shared.start("bob")
    shared.write("train.py", PACED)
    run = shared.submit("train.py")
    wait(lambda: shared.show(run)["checkpoints"])
    ada.process.send_signal(signal.SIGSTOP)
    answers: list[object] = []

    def ask_the_sleeper() -> None:
        try:
            with ada.client() as client:
                answers.append(client.submit(key="late", job={"name": "late", "run": "true"}))
        except StokerError as exc:
            answers.append(exc)

    asking = threading.Thread(target=ask_the_sleeper)
    asking.start()
    wait(bob.leads)
    other = shared.submit("--", "sh", "-c", "sleep 3; echo done")
    shared.until(other, "running", "succeeded")
    ada.process.send_signal(signal.SIGCONT)
    assert ada.process.wait(60) == STEPPED_DOWN
    asking.join(60)
    assert len(answers) == 1 and isinstance(answers[0], StokerError), (
        "a request sent while it was stopped is refused"
    )
    assert shared.ended(other)["state"] == "succeeded"
    assert "late" not in [found["name"] for found in shared.client().runs()["runs"]]
    before = shared.carried(run)
    wait(lambda: shared.carried(run), lambda now: now > before + 1000)

    again = shared.start("ada")
    wait(lambda: again.get("/readyz"), lambda answer: "bob leads" in str(answer))
    shared("stop", run)
    shared.ended(run)
    check_once(shared, run)
    assert [attempt["number"] for attempt in shared.show(other)["attempts"]] == [1]


def test_an_orderly_stop_or_quick_restart_causes_no_wait(tmp_path: Path, postgres: PostgresServer) -> None:
    """With a lease of an hour, no server could take the lead in time if the lease had to expire."""
    shared = Shared(tmp_path, postgres.fresh(), lease=3600)
    try:
        ada = shared.start("ada")
        wait(ada.leads)
        ada.process.kill()
        ada.process.wait(60)
        ada = shared.start("ada")
        wait(ada.leads, limit=60)
        # A waiting server checks the lease only every tenth of its duration, so it starts after the leader
        # has stopped.
        ada.process.send_signal(signal.SIGTERM)
        assert ada.process.wait(60) == 0
        bob = shared.start("bob")
        wait(bob.leads, limit=60)
    finally:
        shared.close()


@pytest.mark.long
def test_a_database_that_is_away(shared: Shared, postgres: PostgresServer) -> None:
    """A short outage has no effect. After a long one the leader steps down, and the other leads once the
    database is back."""
    ada = shared.start("ada")
    wait(ada.leads)
    shared.write("train.py", PACED)
    run = shared.submit("train.py")
    wait(lambda: shared.show(run)["checkpoints"])
    postgres.crash()
    assert shared.ended(shared.submit("--", "true"))["state"] == "succeeded"
    assert ada.process.poll() is None

    postgres.stop()
    try:
        assert ada.process.wait(120) == STEPPED_DOWN
        bob = shared.start("bob")
        wait(lambda: bob.get("/readyz"), lambda answer: answer[0] == 503 and "refused" in str(answer))
    finally:
        postgres.resume()
    wait(bob.leads)
    assert shared.ended(shared.submit("--", "true"))["state"] == "succeeded"
    shared("stop", run)
    shared.ended(run)
    check_once(shared, run)


def test_the_only_server_of_a_home_says_what_is_wrong_with_its_database(tmp_path: Path) -> None:
    box = Box(tmp_path, env={"STOKER_DATABASE": f"postgresql://ada:{PASSWORD}@127.0.0.1:1/nowhere"})
    done = box("server", "start", code=None)
    assert done.returncode == 1
    assert "ada@127.0.0.1:1/nowhere" in done.stderr and "hint:" in done.stderr
    assert PASSWORD not in done.stderr + box.server_log()


def test_servers_that_share_a_home_need_a_database_that_says_who_leads(tmp_path: Path) -> None:
    box = Box(tmp_path)
    for name, said in (("bob", "stoker server migrate"), ("../evil", "Letters")):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stoker.server", "--home", str(box.home.root)],
            env={**box.env, "STOKER_REPLICA": name},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "evil.lock").exists() and os.listdir(tmp_path) != []


METRICS = """
import os, stoker
for step in range(30):
    stoker.report(step=step, loss=1.0 / (step + 1), odd=float("nan"))
path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "weights.bin")
with open(path + ".tmp", "wb") as file:
    file.write(bytes(1000))
os.replace(path + ".tmp", path)
print("trained")
"""


def test_another_database_that_is_empty_is_not_taken_for_this_homes(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """A wrong database name, or a new empty database server: no task is ended."""
    box = Box(tmp_path)
    right, empty = postgres.fresh(), postgres.fresh()
    box.home.root.mkdir(parents=True)
    try:
        box.home.config.write_text(f'[server]\ndatabase = "{right}"\n')
        run = box.submit("--", "sleep", "600")
        box.until(run, "running")
        launcher = box.launcher(run)
        box("server", "stop")
        box.home.config.write_text(f'[server]\ndatabase = "{empty}"\n')
        refused = box("ps", code=1)
        assert "has no runs in it" in refused.stderr and "1 in its ledger" in refused.stderr
        assert f"[server] database in {box.home.config}" in refused.stderr
        box("server", "stop")
        box.home.config.write_text(f'[server]\ndatabase = "{right}"\n')
        assert box.until(run, "running")["id"] == run and box.launcher(run) == launcher
        box("stop", "--kill", run)
        assert box.ended(run)["cause"] == "stopped"
    finally:
        box.close()


@pytest.mark.long
def test_a_home_moves_with_everything_in_it_and_back(tmp_path: Path, postgres: PostgresServer) -> None:
    """Runs that have ended, one that continues meanwhile and one that waits for it."""
    box = Box(tmp_path)
    url = postgres.fresh()
    secret = url.replace("stoker@", f"stoker:{PASSWORD}@")
    try:
        box.write("train.py", METRICS)
        ended = box.submit("train.py")
        failed = box.submit("--", "sh", "-c", "echo no >&2; exit 3")
        assert (box.ended(ended)["state"], box.ended(failed)["state"]) == ("succeeded", "failed")
        box.write("paced.py", PACED)
        cpus = str(sum(int(node["cpu"]) for node in box.client().nodes()["nodes"]))
        running = box.submit("--cpu", cpus, "paced.py")
        box.until(running, "running")
        queued = box.submit("--cpu", cpus, "--", "true")

        refused = box("server", "migrate", "--to", secret, code=None)
        assert refused.returncode == 1 and "stoker server stop" in refused.stderr
        box("server", "stop")
        report = json.loads(box("server", "migrate", "--to", secret, "--json").stdout)
        assert report["rows"]["runs"] == 4 and report["to"] == url and not report["already"]
        with Store.open(report["kept"]) as old, Store.open(url) as new:
            assert everything(new) == everything(old)
        assert box.home.config.stat().st_mode & 0o777 == 0o600 and not box.home.database.exists()
        assert report["kept"] in box("backup", "list").stdout
        again = box("server", "migrate", "--to", secret)
        assert "was there already" in again.stderr and PASSWORD not in again.stdout + again.stderr

        status = box.json("server", "start")
        assert status["leading"] is True and status["store"]["kind"] == "postgresql"
        assert box.show(running)["state"] == "running" and box.show(queued)["state"] == "queued"
        made = box.json("backup", "create")["path"]
        assert PASSWORD not in (Path(made) / "config.toml").read_text(), (
            "a backup must not contain the password"
        )
        late = box.submit("--", "true")
        restored = box.json("backup", "restore", made, "--stop-server")
        assert [entry["id"] for entry in restored["missing"]] == [late]
        box("stop", running)
        assert box.ended(queued)["state"] == "succeeded"
        assert len(box.show(running)["attempts"]) == 1

        box("server", "stop")
        back = json.loads(box("server", "migrate", "--to", "sqlite", "--json").stdout)
        with Store.open(back["to"]) as file, Store.open(url) as server:
            assert everything(file) == everything(server)
        assert PASSWORD not in box.home.config.read_text()
        assert box.json("server", "start")["store"]["kind"] == "sqlite"
        assert box.show(queued)["state"] == "succeeded"
        assert box.ended(box.submit("train.py"))["state"] == "succeeded"
    finally:
        box.close()
