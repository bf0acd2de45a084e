"""Checks checkpoints of several files: even if every file is complete, one may be missing.

Only a marker of the format proves that none is: the index of a TensorFlow bundle, the `.metadata` of a torch distributed
checkpoint, the index of sharded weights, the files that the Hugging Face Trainer always writes.
"""

from __future__ import annotations

import json
import os
import re
from typing import Dict, List, Optional, Sequence, Tuple

from stoker.launcher.verify import pickles, tf_bundle
from stoker.launcher.verify.verdict import Verdict

Part = Tuple[str, Verdict]
"""Path relative to the root, and the verdict of its own format."""

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(\.|$)")


def check_tree(root: str, name: str, parts: Sequence[Part]) -> Verdict:
    """Check the files of one checkpoint, none of which is damaged."""
    files = [path for path, _ in parts]
    for check in (_tensorflow, _distributed, _trainer, _sharded):
        verdict = check(root, files, dict(parts))
        if verdict is not None:
            return verdict
    return Verdict(None, "directory", "its content does not prove that all files are there")


def _tensorflow(root: str, files: List[str], parts: Dict[str, Verdict]) -> Optional[Verdict]:
    indexes = [path for path in files if path.endswith(".index") and _data_of(path[:-6], files)]
    orphans = [
        path for path in files if ".data-" in path and path.rsplit(".data-", 1)[0] + ".index" not in files
    ]
    if not indexes:
        return (
            Verdict(False, "tensorflow", "data without an index")
            if orphans and len(orphans) == len(files)
            else None
        )
    for index in indexes:
        shards = [os.path.join(root, path) for path in _data_of(index[:-6], files)]
        verdict = tf_bundle.check_bundle(os.path.join(root, index), shards)
        if verdict.ok is not True:
            return verdict
    known = {path for index in indexes for path in [index, *_data_of(index[:-6], files)]}
    if known == set(files):
        return Verdict(True, "tensorflow")
    return Verdict(None, "tensorflow", "other files are beside the bundle")


def _data_of(stem: str, files: List[str]) -> List[str]:
    return [path for path in files if path.startswith(stem + ".data-")]


def _distributed(root: str, files: List[str], parts: Dict[str, Verdict]) -> Optional[Verdict]:
    found = [path for path in files if os.path.basename(path) == ".metadata"]
    if not found:
        if any(path.endswith(".distcp") for path in files):
            return Verdict(None, "torch dcp", "there is no .metadata, which is written last")
        return None
    for path in found:
        with open(os.path.join(root, path), "rb") as file:
            extents = pickles.storage_extents(file.read(256 << 20))
        if extents is None:
            return Verdict(None, "torch dcp", "its .metadata has an unknown format")
        for name, need in extents.items():
            part = os.path.join(os.path.dirname(path), name)
            if part not in files:
                # Another task may have it: each writes its own part of a distributed checkpoint.
                return Verdict(None, "torch dcp", f"{part} is not here")
            size = os.path.getsize(os.path.join(root, part))
            if size != need:
                return Verdict(False, "torch dcp", f"{part} needs {need} bytes and has {size}")
    if len(found) == 1 and all(path == found[0] or path.endswith(".distcp") for path in files):
        return Verdict(True, "torch dcp")
    return Verdict(None, "torch dcp", "other files are beside it")


def _trainer(root: str, files: List[str], parts: Dict[str, Verdict]) -> Optional[Verdict]:
    """Hugging Face Trainer: weights, optimizer, schedule, random state and `trainer_state.json`, all complete."""
    by_name = {os.path.basename(path): path for path in files if path.count("/") == 1}
    if "trainer_state.json" not in by_name:
        return None
    needed = ["trainer_state.json", "optimizer.pt", "scheduler.pt", "training_args.bin"]
    missing = [name for name in needed if name not in by_name]
    if not any(re.match(r"rng_state(_\d+)?\.pth$", name) for name in by_name):
        missing.append("rng_state.pth")
    if missing:
        return Verdict(None, "hf trainer", f"{missing[0]} is not there")
    weights = _weights(root, by_name)
    if weights.ok is not True:
        return weights
    for name, path in by_name.items():
        if name.endswith((".pt", ".pth", ".bin", ".safetensors", ".json")) and parts[path].ok is not True:
            return Verdict(None, "hf trainer", f"{name} cannot be verified")
    return Verdict(True, "hf trainer")


def _weights(root: str, by_name: Dict[str, str]) -> Verdict:
    if any(
        name in by_name for name in ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
    ):
        return Verdict(True, "hf trainer")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index in by_name:
            return _listed(root, by_name[index], set(by_name))
    return Verdict(None, "hf trainer", "there are no weights")


def _sharded(root: str, files: List[str], parts: Dict[str, Verdict]) -> Optional[Verdict]:
    """`model-00001-of-00002.safetensors` and the like, with an index of all of them."""
    shards = [path for path in files if _SHARD.search(path)]
    indexes = [path for path in files if path.endswith(".index.json")]
    if not shards or len(indexes) != 1 or len(shards) + 1 != len(files):
        return None
    if any(parts[path].ok is not True for path in files):
        return Verdict(None, "shards", "not every shard can be verified")
    return _listed(root, indexes[0], {os.path.basename(path) for path in files})


def _listed(root: str, index: str, there: "set[str]") -> Verdict:
    try:
        with open(os.path.join(root, index), "rb") as file:
            names = set(json.load(file)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        return Verdict(None, "shards", f"{index} has an unknown format: {exc}")
    missing = sorted(name for name in names if name not in there)
    if missing:
        return Verdict(None, "shards", f"{missing[0]} is not here")
    return Verdict(True, "shards")
