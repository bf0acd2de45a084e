"""Utilization and memory of a task's GPUs, read from NVML through ctypes.

NVML can block for a long time when a GPU is faulty, and the launcher must not block. So a thread reads the values, and the
launcher uses the newest ones.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Dict, List, Optional, Sequence


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuUsage:
    """Never raises and never blocks; without NVML or GPUs there are no values."""

    def __init__(self, ids: Optional[Sequence[str]], every: float) -> None:
        """`ids` None: all that are visible here."""
        self.ids = None if ids is None else list(ids)
        self.every = every
        self.latest: List[Dict[str, Any]] = []
        """[{"id", "use" (percent), "memory" (bytes)}]"""
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def begin(self) -> None:
        if (self.ids is None or self.ids) and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpus", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() != 0:
            return
        ids = _all(library) if self.ids is None else self.ids
        handles = {
            name: handle for name, handle in ((name, _handle(library, name)) for name in ids) if handle
        }
        while handles and not self._stop.is_set():
            self.latest = [_query(library, name, handle) for name, handle in handles.items()]
            self._stop.wait(self.every)


def _all(library: Any) -> List[str]:
    """Every GPU that NVML shows; in a container, those that were assigned to it."""
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        handle, name = _handle(library, str(index)), ctypes.create_string_buffer(96)
        if handle is not None and library.nvmlDeviceGetUUID(handle, name, ctypes.c_uint(len(name))) == 0:
            found.append(name.value.decode("ascii", "replace"))
    return found


def _handle(library: Any, name: str) -> Optional[ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    if name.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return None if failed else handle


def _query(library: Any, name: str, handle: ctypes.c_void_p) -> Dict[str, Any]:
    found: Dict[str, Any] = {"id": name}
    use, memory = _Utilization(), _Memory()
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
        found["use"] = use.gpu
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
        found["memory"] = memory.used
    return found
