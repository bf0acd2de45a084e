"""One rank's part of a sharded state, in the format of torch.distributed.checkpoint (DCP).

DCP's planner decides which rank writes what. The layout of the files is computed here, so that another process can write
them. There is one collective call per save, with names and sizes only; the whole plan is exchanged only when the state has
changed its structure. Errors are exchanged in the same call. So either every rank raises or none does, and no rank waits
for the others without end.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch  # this module is imported only where torch is used
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.planner import WriteItemType

from stoker.sdk import archive
from stoker.sdk.async_save import Memory
from stoker.sdk.torch_state import Archive, copy

METADATA = ".metadata"
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLANS_ITSELF = ("__create_write_items__", "global_shape")
"""Attributes of values for which DCP has no plan of its own: these values describe how they are written."""


class Shard:
    """The files that this rank will write. The constructor is collective: every rank calls it, in the same order."""

    def __init__(self, state: Dict[str, Any], directory: str, error: Optional[Exception]) -> None:
        """`error`: the error of this rank's save before; all ranks raise it."""
        global _global_plan, _local_plan
        self._sources: List[Tuple[int, Any]] = []
        self.size = 0
        self.files: Dict[str, List[Any]] = {}
        rank = dist.get_rank() if _distributed() else 0
        planner, local, fingerprint = None, None, ""
        items: List[Any] = []
        sizes: List[int] = []
        if error is None:
            try:
                planner, local, fingerprint = _plan(state, rank)
                if _global_plan is not None and [fingerprint] == _global_plan.fingerprints[rank : rank + 1]:
                    items, sizes = self._layout(planner, _global_plan.items(rank))
            except Exception as exc:  # noqa: BLE001 - raised below, when all ranks have it
                error, _local_plan = exc, None
        gathered = _all_gather((_text(error), fingerprint, sizes, os.urandom(4).hex(), _place(directory)))
        _raise_for(error, [values[0] for values in gathered])
        fingerprints, places = [values[1] for values in gathered], [values[4] for values in gathered]
        plan, all_sizes = _global_plan, [values[2] for values in gathered]
        if plan is None or fingerprints != plan.fingerprints:
            plans = _all_gather(local)
            try:
                plan = _GlobalPlan(planner, plans, fingerprints)
                items, sizes = self._layout(planner, plan.items(rank))
            except Exception as exc:  # noqa: BLE001 - as above
                error, _local_plan = exc, None
            sized = _all_gather((_text(error), sizes))
            _raise_for(error, [values[0] for values in sized])
            all_sizes = [values[1] for values in sized]
        assert plan is not None
        _global_plan = plan
        if items:
            self.files[_file(rank)] = items
        if rank == 0:
            data = plan.metadata(all_sizes)
            self.files[METADATA] = [["raw", [self.size, len(data)]]]
            self._add(data)
        expected = [
            _file(other) for other, found in enumerate(all_sizes) if found and places[other] == places[rank]
        ]
        expected += [METADATA] if places[0] == places[rank] else []
        self.part_of = {"token": gathered[0][3], "files": expected}

    def fill(self, memory: Memory) -> None:
        copy(self._sources, memory)

    def _layout(self, planner: Any, items: Sequence[Any]) -> Tuple[List[Any], List[int]]:
        """The archives, one per item, and their sizes. DCP reads each with `torch.load`."""
        self._sources, self.size = [], 0
        found: List[Any] = []
        sizes: List[int] = []
        with torch.no_grad():
            for item in items:
                value = planner.lookup_object(item.index)
                if item.type == WriteItemType.BYTE_IO:
                    records, size = self._object(value)
                else:
                    records, size = self._tensor(value.detach())
                found.append(["zip", records])
                sizes.append(size)
        return found, sizes

    def _object(self, value: Any) -> Tuple[List[archive.Record], int]:
        whole = Archive(value, self.size)
        self._sources += whole.sources
        self.size = whole.size
        return whole.records, archive.size(whole.records)

    def _tensor(self, value: Any) -> Tuple[List[archive.Record], int]:
        """The archive of a tensor: only the part of its storage that it shows, stored as a CPU tensor."""
        frame, start = _frame(value.shape, value.dtype), self.size
        self._sources += [(start + at, data) for at, data in frame.small]
        self._sources.append((start + frame.at, value))
        self.size = start + frame.room
        return [(name, start + at, length) for name, at, length in frame.records], frame.size

    def _add(self, data: bytes) -> None:
        self._sources.append((self.size, data))
        self.size += -(-len(data) // archive.ALIGNMENT) * archive.ALIGNMENT


class _GlobalPlan:
    """What each rank writes. It is the same on every rank, because each computes it from the same local plans."""

    def __init__(self, planner: Any, plans: List[Any], fingerprints: List[str]) -> None:
        self.fingerprints = fingerprints
        self._plans, self._metadata = planner.create_global_plan(plans)
        self._written: Tuple[List[List[int]], bytes] = ([], b"")

    def items(self, rank: int) -> Sequence[Any]:
        found: Sequence[Any] = self._plans[rank].items
        return found

    def metadata(self, sizes: List[List[int]]) -> bytes:
        """DCP's index of the checkpoint. Computed again only when a size has changed."""
        if self._written[0] != sizes:
            storage = {}
            for rank, lengths in enumerate(sizes):
                at = 0
                for item, length in zip(self.items(rank), lengths):  # noqa: B905 - Python 3.9
                    storage[item.index] = filesystem._StorageInfo(_file(rank), at, length)
                    at += length
            self._metadata.storage_data = storage
            if hasattr(filesystem, "CURRENT_DCP_VERSION"):
                self._metadata.version = filesystem.CURRENT_DCP_VERSION
            self._written = (sizes, pickle.dumps(self._metadata))
        return self._written[1]


class _Frame(NamedTuple):
    """A tensor's archive without the values."""

    records: List[archive.Record]
    small: List[Tuple[int, Any]]
    at: int
    """Offset of the values in the memory."""
    room: int
    """Bytes that it takes in the memory."""
    size: int
    """Bytes of the archive."""


@functools.lru_cache(maxsize=4096)
def _frame(shape: Any, dtype: Any) -> _Frame:
    """Computed from an empty tensor of the same shape and type."""
    made = Archive(torch.empty(shape, dtype=dtype, device="cpu"))
    *small, (at, _) = made.sources
    return _Frame(made.records, small, at, made.size, archive.size(made.records))


class _LocalPlan(NamedTuple):
    """What this rank planned to write at its last save, and what that plan depended on."""

    dependencies: Any
    local: Any
    fingerprint: str


_global_plan: Optional[_GlobalPlan] = None
_local_plan: Optional[_LocalPlan] = None
_group: Tuple[Any, Any] = (None, None)


def fill(state: Dict[str, Any], path: str) -> None:
    """Read this rank's part of a checkpoint into the state, however many ranks wrote it."""
    reader = dcp.FileSystemReader(path)
    if _distributed():
        dcp.load(state, storage_reader=reader, process_group=_cpu_group())
    else:
        dcp.load(state, storage_reader=reader, no_dist=True)


def _plan(state: Dict[str, Any], rank: int) -> Tuple[Any, Any, str]:
    """DCP's planner, this rank's plan, and a fingerprint of the plan.

    DCP takes longer to plan a state of DTensors than the copy takes. So the last plan is used again while nothing that it
    depends on has changed.
    """
    global _local_plan
    planner = default_planner.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    dependencies = _dependencies(planner)
    if dependencies is None or _local_plan is None or _local_plan.dependencies != dependencies:
        local = planner.create_local_plan()
        _local_plan = _LocalPlan(dependencies, local, hashlib.sha256(pickle.dumps(local)).hexdigest())
    return planner, _local_plan.local, _local_plan.fingerprint


def _dependencies(planner: Any) -> Optional[List[Any]]:
    """Everything that a plan depends on. None: the state has a value for which that is not known."""
    world = (dist.get_rank(), dist.get_world_size()) if _distributed() else None
    dependencies: List[Any] = [world, planner.is_coordinator, torch.is_grad_enabled(), planner.mappings]
    with torch.no_grad():
        for name, value in planner.state_dict.items():
            if type(value) is default_planner.DTensor:
                mesh = value.device_mesh
                place = (mesh, mesh.get_coordinate(), value.placements)
                dependencies.append((name, value.shape, *place, value.requires_grad))
                value = value.to_local()
            if isinstance(value, (torch.Tensor, io.BytesIO)) and type(value) not in _TENSORS:
                return None
            if any(hasattr(value, own) for own in _PLANS_ITSELF):
                return None
            if isinstance(value, torch.Tensor):
                own = (value.shape, value.stride(), value.dtype, value.layout)
                dependencies.append((name, *own, value.requires_grad, value.is_pinned()))
            else:
                dependencies.append((name,))
    return dependencies


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _place(directory: str) -> Tuple[str, ...]:
    """Identifies the directory that a rank writes into. Outside Stoker all ranks have the same one, as with DCP."""
    known = ("STOKER_TASK_DIR", "STOKER_ROLE", "STOKER_TASK_INDEX")
    return (directory, *(os.environ.get(name, "") for name in known))


def _distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _all_gather(what: Any) -> List[Any]:
    """The values of all ranks, by rank. Collective."""
    if not _distributed():
        return [what]
    values: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, what, group=_cpu_group())
    return values


def _cpu_group() -> Any:
    """A process group of the whole world on the CPU: objects sent through NCCL would wait for the work queued on the GPU."""
    global _group
    world = dist.group.WORLD
    if _group[0] is not world:
        config = str(dist.get_backend())
        _group = (world, None if "gloo" in config or "mpi" in config else dist.new_group(backend="gloo"))
    return _group[1]


def _text(error: Optional[Exception]) -> Optional[str]:
    return None if error is None else str(error) or type(error).__name__


def _raise_for(error: Optional[Exception], errors: List[Optional[str]]) -> None:
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
    if failed:
        raise RuntimeError(f"no checkpoint was saved; {'; '.join(failed)}")
