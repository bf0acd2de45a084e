"""Which files are states, and which belong together."""

from __future__ import annotations

import pytest

from stoker.launcher.folder import units
from stoker.launcher.folder.units import Unit


def unit_of(path: str, *sets: str) -> Unit | None:
    return units.unit_of(path, set(sets).__contains__)


@pytest.mark.parametrize(
    "name",
    ["checkpoint-500", "step_100", "epoch=3", "global_step10", "iter_0001", "epoch=3-step=400", "ckpt-3",
     "my_run.step-7", "Epoch_2", "iteration12"],
)  # fmt: skip
def test_a_directory_with_a_step_in_its_name_is_one_unit(name: str) -> None:
    wanted = Unit(f"out/{name}", units.DIRECTORY, True)
    assert unit_of(f"out/{name}/model.bin") == wanted
    assert unit_of(f"out/{name}/deep/er/x.dat") == wanted


@pytest.mark.parametrize(
    "name", ["version_0", "run-3", "exp1", "checkpoints", "steps", "footstep10", "fold_2", "2024", "step2vec"]
)
def test_other_directories_with_numbers_are_none(name: str) -> None:
    assert unit_of(f"{name}/model.pt") == Unit(f"{name}/model.pt", units.FILE, False)


@pytest.mark.parametrize(
    "name", ["epoch_3.pt", "model_step_100.pth", "500.pt", "ckpt-3.npz", "epoch=1-step=2.ckpt"]
)
def test_a_file_with_a_step_is_written_once(name: str) -> None:
    found = unit_of(f"a/{name}")
    assert found is not None and found.kind == units.FILE and found.numbered


@pytest.mark.parametrize(
    "name", ["last.pt", "best_model.h5", "rank_0.pt", "gpt2.bin", "snapshot-v2.pkl", "resnet50.pth"]
)
def test_a_file_without_a_step_is_rewritten(name: str) -> None:
    assert unit_of(name) == Unit(name, units.FILE, False)


@pytest.mark.parametrize(
    "path",
    ["train.log", "loss.csv", "notes.txt", "events.out.tfevents.1.host", "plot.png", "train.py", "data.tar.gz",
     "last.pt.tmp", ".hidden.pt", "__pycache__/x.pt", ".cache/hub/model.bin", "last.pt.torn", "a.torn/last.pt",
     "checkpoint-5/train.log", "checkpoint-5/model.bin.tmp"],
)  # fmt: skip
def test_what_is_no_state_belongs_to_no_unit(path: str) -> None:
    assert unit_of(path) is None


def test_a_file_of_another_name_has_to_show_what_it_is() -> None:
    found = unit_of("weights")
    assert found is not None and not found.named
    assert units.is_state_content(b"PK\x03\x04rest") and units.is_state_content(b"\x80\x04\x95" + b"\0" * 8)
    assert units.is_state_content((64).to_bytes(8, "little") + b'{"a"')
    assert not units.is_state_content(b"step 1 loss 0.5\n") and not units.is_state_content(b"\x80\x04")


def test_the_outermost_directory_counts() -> None:
    assert unit_of("checkpoint-500/global_step500/mp_rank_00.pt") == Unit(
        "checkpoint-500", units.DIRECTORY, True
    )
    assert unit_of("state/optimizer_0/x.distcp", "state", "state/optimizer_0") == Unit(
        "state", units.SET, False
    )


def test_a_numbered_checkpoint_in_the_directory_of_a_set_is_a_unit_by_itself() -> None:
    assert unit_of("out/checkpoint-5/model.bin", "out") == Unit("out/checkpoint-5", units.DIRECTORY, True)
    assert unit_of("out/model.bin", "out") == Unit("out", units.SET, False)
    assert unit_of("out/train.log", "out") is None
    out = Unit("out", units.SET, False)
    assert [units.is_member(out, f"out/{name}") for name in ("model.bin", "a/b.bin", "a.log", "step_1/a.bin")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"],
        ["weights.pt", "optimizer.pt"],
        ["model.bin", "random_states_0.pkl"],
        [".metadata", "__0_0.distcp"],
        ["training_metadata.json", "latest.weights.h5"],
    ],
)
def test_states_of_several_files_are_known_by_their_names(names: list[str]) -> None:
    assert units.holds_set(names)


@pytest.mark.parametrize(
    "names",
    [["optimizer.bin"], ["model.pt", "best.pt"], [".metadata", "x.pt"], ["training_metadata.json"], []],
)
def test_other_directories_hold_no_set(names: list[str]) -> None:
    assert not units.holds_set(names)


def test_a_checkpoint_of_tensorflow_is_its_stem() -> None:
    wanted = Unit("tf/ckpt-3", units.GROUP, True)
    assert unit_of("tf/ckpt-3.index") == unit_of("tf/ckpt-3.data-00000-of-00001") == wanted
    assert unit_of("tf/weights.index") == Unit("tf/weights", units.GROUP, False)


def test_lines_of_json_are_a_log() -> None:
    assert units.is_log("log.json", b'{"step": 1}\n{"step": 2}\n{"st')
    assert not units.is_log("state.json", b'{"step": 1}\n')
    assert not units.is_log("state.json", b'{\n  "step": 1,\n')
    assert not units.is_log("state.pt", b'{"step": 1}\n{"step": 2}\n')
