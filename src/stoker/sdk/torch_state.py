"""A torch state as the records of one archive: the same that `torch.save` would write.

Everything but the numbers of the tensors is pickled at once; of the tensors the storages are noted, each once however
many tensors share it. Copying them is all that is left to do.
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

import torch  # this module is imported only by those who use it

from stoker.sdk import archive
from stoker.sdk.async_save import Memory

_PREFIX = "archive"
_PIECE = 8 << 20
"""Bytes that a thread copies at once."""
_THREADS = 8
"""More do not make memory faster."""
_PROTOCOL = 2


class Archive:
    """One state, about to be copied. Raises what pickling raises, as `torch.save` does."""

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
        """Where in the memory what goes: bytes and tensors."""
        at = start
        for name, source in parts:
            length = len(source) if isinstance(source, bytes) else source.nbytes()
            self.records.append((f"{_PREFIX}/{name}", at, length))
            self.sources.append((at, source if isinstance(source, bytes) else _bytes(source)))
            at += -(-length // archive.ALIGNMENT) * archive.ALIGNMENT
        self.size = at
        """Where the next one may begin."""

    def fill(self, memory: Memory) -> None:
        copy(self.sources, memory)


def copy(sources: List[Tuple[int, Any]], memory: Memory) -> None:
    """Copy tensors and bytes to their places; it is done when this returns."""
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
            elif length and _plain(source):
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
    """Each thread takes the next piece until there is none: one that is held up by others on its CPU holds up only
    its piece. torch's own threads share the work beforehand and then wait for the slowest of them."""

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


def _plain(source: Any) -> bool:
    """Whether its values are its bytes, one after the other."""
    lazy = source.is_conj() or source.is_neg()
    return bool(source.device.type == "cpu" and source.is_contiguous() and not lazy)


def _bytes(source: Any) -> Any:
    """A storage as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)


def _pin(memory: Memory) -> None:
    """Let the GPU write there by itself. Where that is refused the copy is slower, and as good."""
    if memory.pinned is not None or memory.map is None:
        return
    address = torch.frombuffer(memory.map, dtype=torch.uint8).data_ptr()
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, memory.size, 0)) == 0:
        memory.pinned = lambda: cudart.cudaHostUnregister(address)
    else:
        memory.pinned = lambda: None


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does: storages are named, not written."""

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
            raise RuntimeError("two tensors see the same memory as different types; torch cannot save that")
        key = self._known.setdefault(storage._cdata, len(self.storages))
        if key == len(self.storages):
            self.storages.append(storage)
        location = torch.serialization.location_tag(storage)
        return ("storage", kind, str(key), location, count)
