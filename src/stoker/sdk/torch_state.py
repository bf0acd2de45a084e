"""A torch state as the records of one archive, the same as `torch.save` writes.

Everything but the values of the tensors is pickled at once. Each storage is recorded once, however many tensors share it.
Copying the storages is all that remains to be done.
"""

from __future__ import annotations

import collections
import ctypes
import io
import os
import pickle
import sys
import threading
from typing import Any, Deque, Dict, List, Tuple

import torch  # this module is imported only where torch is used

from stoker.sdk import archive
from stoker.sdk.async_save import Memory

_PREFIX = "archive"
_PIECE = 8 << 20
"""Bytes that a thread copies at a time."""
_THREADS = 8
"""More threads do not increase the bandwidth of the memory."""
_PROTOCOL = 2


class Archive:
    """A state to be copied. The constructor raises what pickling raises, as `torch.save` does."""

    def __init__(self, state: Any, start: int = 0) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(state)
        parts: List[Tuple[str, Any]] = [
            ("data.pkl", file.getvalue()),
            ("byteorder", sys.byteorder.encode()),
            ("version", b"3\n"),
            *((f"data/{key}", storage) for key, storage in enumerate(pickler.storages)),
        ]
        self.records: List[archive.Record] = []
        self.sources: List[Tuple[int, Any]] = []
        """Offset in the memory and source (bytes or a tensor) of each record."""
        at = start
        for name, source in parts:
            length = len(source) if isinstance(source, bytes) else source.nbytes()
            self.records.append((f"{_PREFIX}/{name}", at, length))
            self.sources.append((at, source if isinstance(source, bytes) else _bytes(source)))
            at += -(-length // archive.ALIGNMENT) * archive.ALIGNMENT
        self.size = at
        """Offset after the last record."""

    def fill(self, memory: Memory) -> None:
        copy(self.sources, memory)


def copy(sources: List[Tuple[int, Any]], memory: Memory) -> None:
    """Copy tensors and bytes to their offsets, synchronously."""
    room = memory.map
    assert room is not None
    devices = {source.device for _, source in sources if isinstance(source, torch.Tensor)}
    accelerated = [device for device in devices if device.type == "cuda"]
    if accelerated:
        _pin(memory)
    target = torch.frombuffer(room, dtype=torch.uint8)
    moves: Deque[Tuple[int, int, int]] = collections.deque()
    with torch.no_grad():
        for at, source in sources:
            length = len(source) if isinstance(source, bytes) else source.numel() * source.element_size()
            if isinstance(source, bytes):
                room[at : at + length] = source
            elif length and _is_plain(source):
                address = target.data_ptr() + at - source.data_ptr()
                for begin in range(source.data_ptr(), source.data_ptr() + length, _PIECE):
                    end = min(begin + _PIECE, source.data_ptr() + length)
                    moves.append((begin + address, begin, end - begin))
            elif length:
                place = target[at : at + length].view(source.dtype).view(source.shape)
                place.copy_(source, non_blocking=bool(accelerated))
    _move(moves)
    for device in accelerated:
        torch.cuda.current_stream(device).synchronize()


def _move(moves: Deque[Tuple[int, int, int]]) -> None:
    """Copy with several threads. Each takes the next piece until none is left, so a slow thread delays only its piece.

    torch's own threads divide the work in advance and then wait for the slowest of them.
    """

    def work() -> None:
        while True:
            try:
                target, source, length = moves.popleft()
            except IndexError:
                return
            ctypes.memmove(target, source, length)

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = [threading.Thread(target=work) for _ in range(min(cpus, _THREADS, len(moves) // 8) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()


def _is_plain(source: Any) -> bool:
    """Whether its values are contiguous bytes in CPU memory."""
    lazy = source.is_conj() or source.is_neg()
    return bool(source.device.type == "cpu" and source.is_contiguous() and not lazy)


def _bytes(source: Any) -> Any:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)


def _pin(memory: Memory) -> None:
    """Pin the memory for the GPU's own copies. Where the driver refuses, the copy is slower."""
    if memory.pinned is not None or memory.map is None:
        return
    address = torch.frombuffer(memory.map, dtype=torch.uint8).data_ptr()
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, memory.size, 0)) == 0:
        memory.pinned = lambda: cudart.cudaHostUnregister(address)
    else:
        memory.pinned = lambda: None


class _Pickler(pickle.Pickler):
    """Pickles like `torch.save`: storages are referred to by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: List[Any] = []
        self._known: Dict[int, int] = {}
        self._dtypes: Dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype, count = value._untyped_storage, value.dtype, value._size()
            kind = getattr(torch, value._pickle_storage_type())
        elif torch.is_storage(value):
            storage, dtype, count = value, torch.uint8, value.nbytes()
            kind = torch.serialization.normalize_storage_type(type(value))
        else:
            return None
        if storage.device.type == "meta":
            raise ValueError("a tensor on the meta device has no values to save")
        if self._dtypes.setdefault(storage._cdata, dtype) != dtype:
            raise RuntimeError("two tensors use the same memory with different types; torch cannot save that")
        key = self._known.setdefault(storage._cdata, len(self.storages))
        if key == len(self.storages):
            self.storages.append(storage)
        location = torch.serialization.location_tag(storage)
        return ("storage", kind, str(key), location, count)
