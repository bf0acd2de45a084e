"""Scripts as they are written without Stoker, killed and resumed: each goes on from what its framework wrote."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from support.journey import LIMIT, Journey
from support.waiting import wait

pytestmark = pytest.mark.timeout(600)

Make = Callable[..., Journey]

SCRIPTS = {
    "lightning": (["ordinary/lit_default.py"], {"lightning_logs/version_0/checkpoints/last.ckpt"}),
    "keras": (["ordinary/keras_backup.py"], {"model.keras", "log.csv"}),
    "torch on two workers": (["--workers", "2", "ordinary/ddp_snapshot.py"], {"snapshot.pt"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_goes_on_and_what_it_wrote_is_kept(name: str, journey: Make) -> None:
    arguments, wanted = SCRIPTS[name]
    it = journey("--env", "KERAS_BACKEND=torch", *arguments)
    wait(it.text, lambda text: "epoch 4" in text, LIMIT)
    it.kill("worker-0")
    it.succeeded()
    epochs = [int(found) for found in re.findall(r"epoch (\d+)", it.text())]
    assert max(epochs) == 7
    # It began once at 0, and again within one or two epochs of the kill.
    assert epochs.count(1) == (2 if "two" in name else 1), epochs
    kept = {file["path"] for file in it.box.client().files(it.run, what="files")["files"]}
    assert wanted <= kept
