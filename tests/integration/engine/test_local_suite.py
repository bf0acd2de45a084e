"""The local engine passes the suite with real launchers and processes."""

from __future__ import annotations

from stoker.engine.base import Engine, Handle
from stoker.engine.local import LocalEngine
from stoker.engine.local.tasks.directories import TaskPlace
from stoker.engine.local.tasks.records import TaskRecords
from stoker.settings import Home, LocalSettings, Settings
from stoker.task.formats import Status
from stoker.testing.engine_suite import EngineSuite


class TestLocalEngine(EngineSuite):
    isolation = "auto"

    def make_engine(self, home: Home) -> Engine:
        return LocalEngine(Settings(home, local=LocalSettings(isolation=self.isolation)))

    def proof(self, engine: Engine, handle: Handle, status: Status) -> str:
        # In a PID namespace the launcher has pid 1; the engine's record has its pid on the machine.
        place = TaskPlace(str(handle["run"]), int(handle["attempt"]), "worker-0")
        record = TaskRecords(self.home.engine / "tasks").read(place)
        assert record is not None and record.identity is not None
        return f"launcher {record.identity.pid} is gone"


class TestWithoutIsolation(TestLocalEngine):
    """Guardian, affinity and watchdog instead of namespaces and cgroups."""

    isolation = "none"
