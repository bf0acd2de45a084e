"""A pod that an earlier Stoker started: its launcher and courier continue, and this server adopts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stoker.blobs import BlobStore
from stoker.control.ingest.ingester import Ingester
from stoker.control.ingest.journal_reader import Intake, JournalReader
from stoker.settings import Home
from stoker.task import formats, layout
from stoker.testing.couriers import CourierProcess, remote_directory
from support import earlier
from support.control.ingesting import InlineTransfers, take_in
from support.waiting import wait

TASK = '{"run": "digits-7f3k", "attempt": 1, "task": "worker-0", "sample_every": 0.2}'
"""In the format of the earlier engine."""
TRAIN = """
import stoker
for step in range(3):
    stoker.report(step=step, loss=1.0 / (step + 1))
    stoker.checkpoint.save(f"state-{step}.txt", f"state {step}", step=step)
print("trained", flush=True)
"""


def test_what_its_task_wrote_is_taken_in_and_its_launcher_obeys(tmp_path: Path) -> None:
    source = earlier.source(tmp_path / "earlier")
    root, home = tmp_path / "task", Home(tmp_path / "home")
    root.mkdir()
    (root / layout.TASK).write_text(TASK)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source)}
    launcher = subprocess.Popen([sys.executable, "-m", "stoker.launcher", str(root)], env=env)
    program = ["env", f"PYTHONPATH={source}", sys.executable, "-m", "stoker.courier.sidecar"]
    courier = CourierProcess(root, tmp_path / "keys", program=program)
    try:
        with remote_directory(courier, tmp_path / "mirror" / "worker-0") as directory:
            order = formats.Order(
                seq=1, generation=1, verb="run", argv=[sys.executable, "-c", TRAIN], env=env
            )
            directory.write_order(order)
            reader = JournalReader(
                home,
                directory,
                run="digits-7f3k",
                attempt=1,
                task="worker-0",
                generation=1,
                cursors={},
                latest={},
            )
            blobs = BlobStore(home.blobs)
            ingester = Ingester(reader, blobs, InlineTransfers())
            found = Intake()

            def ended() -> bool:
                directory.catch_up(30)
                found.join(take_in(ingester))
                return found.ending is not None

            wait(ended)
            found.join(take_in(ingester, final=True))
            kept = found.checkpoints
            assert found.ending.code == 0
            assert sorted(row.name for row in kept) == [f"state-{step}.txt" for step in range(3)]
            assert all(blobs.verify_tree(row.digest) == [] for row in kept)
            assert [(point.step, round(point.value, 3)) for point in found.points] == [
                (0, 1.0),
                (1, 0.5),
                (2, 0.333),
            ]
            directory.write_order(formats.Order(seq=2, generation=1, verb="release"))
            assert launcher.wait(30) == 0
    finally:
        launcher.kill()
        launcher.wait()
        courier.kill()
