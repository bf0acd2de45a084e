"""One rank's part of a state that is spread over many: the files of torch.distributed.checkpoint (DCP).

DCP's own planner says who writes what; the bytes are laid out here, so that another process can write them. The
ranks talk to each other once per save, and only about names and sizes; in full only when the state has another
shape than at the save before. What one rank failed at is told to all of them in that same talk, so either every
rank raises or none does, and none is left waiting for the others.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch  # this module is imported only by those who use it
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
"""By which DCP knows a value that says itself how it is to be written."""


class Shard:
    """What this rank will write. Making one is collective: every rank does so, in the same order."""

    def __init__(self, state: Dict[str, Any], directory: str, error: Optional[Exception]) -> None:
        """`error`: what went wrong on this rank at the save before; all ranks raise it."""
        global _agreed, _planned
        self._sources: List[Tuple[int, Any]] = []
        self.size = 0
        self.files: Dict[str, List[Any]] = {}
        rank = dist.get_rank() if _distributed() else 0
        planner, local, mark = None, None, ""
        items: List[Any] = []
        sizes: List[int] = []
        if error is None:
            try:
                planner, local, mark = _plan(state, rank)
                if _agreed is not None and [mark] == _agreed.marks[rank : rank + 1]:
                    items, sizes = self._lay_out(planner, _agreed.items(rank))
            except Exception as exc:  # noqa: BLE001 - raised below, once the others know
                error, _planned = exc, None
        told = _tell((_text(error), mark, sizes, os.urandom(4).hex(), _place(directory)))
        _raise_for(error, [said[0] for said in told])
        marks, places = [said[1] for said in told], [said[4] for said in told]
        agreed, everyones = _agreed, [said[2] for said in told]
        if agreed is None or marks != agreed.marks:
            plans = _tell(local)
            try:
                agreed = _Agreement(planner, plans, marks)
                items, sizes = self._lay_out(planner, agreed.items(rank))
            except Exception as exc:  # noqa: BLE001 - as above
                error, _planned = exc, None
            later = _tell((_text(error), sizes))
            _raise_for(error, [said[0] for said in later])
            everyones = [said[1] for said in later]
        assert agreed is not None
        _agreed = agreed
        if items:
            self.files[_file(rank)] = items
        if rank == 0:
            data = agreed.metadata(everyones)
            self.files[METADATA] = [["raw", [self.size, len(data)]]]
            self._add(data)
        expected = [
            _file(other) for other, found in enumerate(everyones) if found and places[other] == places[rank]
        ]
        expected += [METADATA] if places[0] == places[rank] else []
        self.part_of = {"token": told[0][3], "files": expected}

    def fill(self, memory: Memory) -> None:
        copy(self._sources, memory)

    def _lay_out(self, planner: Any, items: Sequence[Any]) -> Tuple[List[Any], List[int]]:
        """Archives, one per item, and their sizes. DCP reads each with `torch.load`."""
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
        """Only the values it shows of its storage, and for the CPU wherever it is now."""
        frame, start = _frame(value.shape, value.dtype), self.size
        self._sources += [(start + at, data) for at, data in frame.small]
        self._sources.append((start + frame.at, value))
        self.size = start + frame.room
        return [(name, start + at, length) for name, at, length in frame.records], frame.size

    def _add(self, data: bytes) -> None:
        self._sources.append((self.size, data))
        self.size += -(-len(data) // archive.ALIGNMENT) * archive.ALIGNMENT


class _Agreement:
    """Who writes what: the same on every rank, because each works it out from the same plans."""

    def __init__(self, planner: Any, plans: List[Any], marks: List[str]) -> None:
        self.marks = marks
        self._plans, self._metadata = planner.create_global_plan(plans)
        self._written: Tuple[List[List[int]], bytes] = ([], b"")

    def items(self, rank: int) -> Sequence[Any]:
        found: Sequence[Any] = self._plans[rank].items
        return found

    def metadata(self, sizes: List[List[int]]) -> bytes:
        """By which DCP finds everything again. Made anew when something has another size than last time."""
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
    """All of a tensor's archive but its values."""

    records: List[archive.Record]
    small: List[Tuple[int, Any]]
    at: int
    """Where in the memory the values go."""
    room: int
    """Bytes of the memory that all of it takes."""
    size: int
    """Bytes of the archive."""


@functools.lru_cache(maxsize=4096)
def _frame(shape: Any, dtype: Any) -> _Frame:
    """The one that is pickled is never touched: it is there for its shape."""
    made = Archive(torch.empty(shape, dtype=dtype, device="cpu"))
    *small, (at, _) = made.sources
    return _Frame(made.records, small, at, made.size, archive.size(made.records))


class _Planned(NamedTuple):
    """What this rank planned to write at its last save."""

    facts: Any
    local: Any
    mark: str


_agreed: Optional[_Agreement] = None
_planned: Optional[_Planned] = None
_group: Tuple[Any, Any] = (None, None)


def fill(state: Dict[str, Any], path: str) -> None:
    """Read this rank's part of a checkpoint into the state, however many ranks wrote it."""
    reader = dcp.FileSystemReader(path)
    if _distributed():
        dcp.load(state, storage_reader=reader, process_group=_cpu_group())
    else:
        dcp.load(state, storage_reader=reader, no_dist=True)


def _plan(state: Dict[str, Any], rank: int) -> Tuple[Any, Any, str]:
    """DCP's planner, what this rank wants to write, and a mark by which two such plans can be compared. DCP takes longer to
    plan a state of DTensors than we do to copy it, so as long as there is nothing new in it the plan is the one before."""
    global _planned
    planner = default_planner.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    facts = _facts(planner)
    if facts is None or _planned is None or _planned.facts != facts:
        local = planner.create_local_plan()
        _planned = _Planned(facts, local, hashlib.sha256(pickle.dumps(local)).hexdigest())
    return planner, _planned.local, _planned.mark


def _facts(planner: Any) -> Optional[List[Any]]:
    """All that a plan depends on. None: something is in it of which we do not know that."""
    world = (dist.get_rank(), dist.get_world_size()) if _distributed() else None
    facts: List[Any] = [world, planner.is_coordinator, torch.is_grad_enabled(), planner.mappings]
    with torch.no_grad():
        for name, value in planner.state_dict.items():
            if type(value) is default_planner.DTensor:
                mesh = value.device_mesh
                place = (mesh, mesh.get_coordinate(), value.placements)
                facts.append((name, value.shape, *place, value.requires_grad))
                value = value.to_local()
            if isinstance(value, (torch.Tensor, io.BytesIO)) and type(value) not in _TENSORS:
                return None
            if any(hasattr(value, own) for own in _PLANS_ITSELF):
                return None
            if isinstance(value, torch.Tensor):
                own = (value.shape, value.stride(), value.dtype, value.layout)
                facts.append((name, *own, value.requires_grad, value.is_pinned()))
            else:
                facts.append((name,))
    return facts


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _place(directory: str) -> Tuple[str, ...]:
    """Ranks of one place write into one directory. Outside Stoker that is the same directory for all, as for DCP."""
    known = ("STOKER_TASK_DIR", "STOKER_ROLE", "STOKER_TASK_INDEX")
    return (directory, *(os.environ.get(name, "") for name in known))


def _distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _tell(what: Any) -> List[Any]:
    """What every rank says, by rank."""
    if not _distributed():
        return [what]
    said: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, what, group=_cpu_group())
    return said


def _cpu_group() -> Any:
    """The world, by way of the CPUs: a GPU's queue of work is no place to talk about names."""
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
