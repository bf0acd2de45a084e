"""GPUs by NVML: which exist, and which must not be assigned now.

The driver is read through nvidia-ml-py, loaded on first use; a machine without a driver has no GPUs. A GPU that no
living task owns may still have memory in use, by a process that does not die or another user's job. Such a GPU counts
as unhealthy until its memory is free: a run on it would fail for lack of memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.engine.base import Gpu
from stoker.engine.local.host import processes
from stoker.task.units import readable_size

log = logging.getLogger(__name__)

HELD_BY_PROCESS = 64 << 20
"""Bytes: a context alone takes more, the driver's own use less."""
HELD_WITHOUT_PROCESS = 1 << 30
"""Bytes in use without a visible process from which a GPU counts as held: drivers and desktops keep some."""
MAJOR = 195
"""The major number of /dev/nvidiaN."""
USER_XIDS = frozenset({13, 31, 43, 45, 68, 69, 94, 109})
"""Xids that a program causes itself: the GPU is not faulty."""


@dataclass(frozen=True)
class Seen:
    """What NVML reports of one GPU."""

    id: str
    index: int
    model: str
    memory: int
    minor: int | None = None
    used: int = 0
    holders: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of compute processes."""
    graphics: int = 0
    """Bytes used by the desktop."""
    uncorrected: int = 0
    remap: str = ""
    xid: int | None = None
    lost: bool = False


class Gpus:
    """One per server. Calls into the driver take milliseconds: call it from a thread, one at a time."""

    def __init__(self, visible: str | None = None) -> None:
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._nvml: Any = None
        self._events: Any = None
        self._xids: dict[str, int] = {}
        self._minors: dict[str, int] | None = None
        self.problem = ""
        """Why there are none; empty if there are some, or if there is no driver."""

    def look(self, owned: set[str]) -> list[Gpu]:
        """Every GPU for runs. `owned`: ids assigned to living tasks; their memory may be in use."""
        return [gpu for seen, gpu in self.details(owned)]

    def details(self, owned: set[str]) -> list[tuple[Seen, Gpu]]:
        seen = self.read()
        return [(one, judge(one, owned)) for one in visible(seen, self._visible)]

    def denied(self, gpus: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """(major, minor) of all other GPUs' devices, for the devices cgroup."""
        if self._minors is None:
            self._minors = {one.id: one.minor for one in self.read() if one.minor is not None}
        kept = {self._minors[gpu] for gpu in gpus if gpu in self._minors}
        return tuple(sorted({(MAJOR, minor) for minor in self._minors.values() if minor not in kept}))

    def read(self) -> list[Seen]:
        nvml = self._load()
        if nvml is None:
            return []
        try:
            self._collect_xids(nvml)
            count = nvml.nvmlDeviceGetCount()
            return [one for index in range(count) for one in self._device(nvml, index)]
        except nvml.NVMLError as exc:
            self.problem = f"the NVIDIA driver does not answer: {exc}"
            self._nvml = None  # the driver may have been reloaded: load it again next time
            return []

    def _load(self) -> Any:
        if self._nvml is not None:
            return self._nvml
        try:
            import pynvml  # lazy: most machines without GPUs never need it
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            absent = getattr(pynvml, "NVML_ERROR_LIBRARY_NOT_FOUND", 12)
            if getattr(exc, "value", None) != absent:
                self.problem = f"the NVIDIA driver does not answer: {exc}"
            return None
        self.problem = ""
        self._nvml = pynvml
        self._listen(pynvml)
        return pynvml

    def _device(self, nvml: Any, index: int) -> Iterator[Seen]:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _mig(nvml, handle):
                yield from self._slices(nvml, handle, index)
            else:
                yield self._seen(nvml, handle, handle, index)
        except nvml.NVMLError as exc:
            yield Seen(f"GPU-{index}-lost", index, f"GPU {index} ({exc})", 0, lost=True)

    def _slices(self, nvml: Any, parent: Any, index: int) -> Iterator[Seen]:
        """MIG: each slice is a GPU of its own; the whole GPU cannot be used meanwhile."""
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, number)
            except nvml.NVMLError:
                continue  # no slice with this number
            yield self._seen(nvml, handle, parent, index)

    def _seen(self, nvml: Any, handle: Any, whole: Any, index: int) -> Seen:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        compute = _running(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
        graphics = _running(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
        return Seen(
            id=uuid,
            index=index,
            model=_text(nvml.nvmlDeviceGetName(handle)),
            memory=int(memory.total),
            minor=_ask(nvml, "nvmlDeviceGetMinorNumber", whole),
            used=_used(nvml, handle, memory),
            holders=tuple(compute),
            graphics=sum(size for pid, size in graphics if pid not in {holder for holder, _ in compute}),
            uncorrected=_ask(nvml, "nvmlDeviceGetTotalEccErrors", whole, 1, 0) or 0,
            remap=_remap(_ask(nvml, "nvmlDeviceGetRemappedRows", whole)),
            xid=self._xids.get(_text(nvml.nvmlDeviceGetUUID(whole))),
        )

    def _listen(self, nvml: Any) -> None:
        try:
            self._events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as exc:
            log.info("this driver does not report GPU faults: %s", exc)
            self._events = None

    def _collect_xids(self, nvml: Any) -> None:
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:
                return  # a timeout: nothing is waiting
            xid = int(event.eventData)
            if xid not in USER_XIDS:
                self._xids[_text(nvml.nvmlDeviceGetUUID(event.device))] = xid


def judge(seen: Seen, owned: set[str]) -> Gpu:
    """Whether the GPU may be assigned. Pure."""
    reason = _fault(seen) or ("" if seen.id in owned else _held(seen))
    return Gpu(seen.id, seen.index, seen.model, seen.memory, healthy=not reason, reason=reason)


def visible(seen: Sequence[Seen], setting: str | None) -> list[Seen]:
    """The GPUs that the server itself may see (its CUDA_VISIBLE_DEVICES: indexes, or prefixes of UUIDs). Pure."""
    if setting is None:
        return list(seen)
    found: list[Seen] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.isdecimal():
            matching = [one for one in seen if one.index == int(word)]
        else:
            matching = [one for one in seen if word and one.id.startswith(word)]
        if not matching:
            break  # as CUDA does: entries after an unknown one are ignored
        found.extend(one for one in matching if one not in found)
    return found


def _fault(seen: Seen) -> str:
    if seen.lost:
        return "it does not answer (fell off the bus?)"
    if seen.xid is not None:
        return f"Xid {seen.xid}"
    if seen.remap:
        return seen.remap
    if seen.uncorrected:
        return f"{seen.uncorrected} uncorrectable memory errors since the driver was loaded"
    return ""


def _held(seen: Seen) -> str:
    if seen.holders and seen.used >= HELD_BY_PROCESS:
        pid, size = max(seen.holders, key=lambda holder: holder[1])
        name = processes.read_text(f"/proc/{pid}/comm").strip()
        return f"{readable_size(size or seen.used)} still held by pid {pid}" + (f" ({name})" if name else "")
    free_of_desktop = seen.used - seen.graphics
    if not seen.holders and free_of_desktop >= HELD_WITHOUT_PROCESS:
        return f"{readable_size(free_of_desktop)} still held by no visible process"
    return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """None if this GPU or driver does not support it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _mig(nvml: Any, handle: Any) -> bool:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    return bool(mode and mode[0])


def _running(nvml: Any, name: str, handle: Any) -> list[tuple[int, int]]:
    found = _ask(nvml, name, handle) or []
    return [(int(one.pid), int(one.usedGpuMemory or 0)) for one in found]


def _used(nvml: Any, handle: Any, memory: Any) -> int:
    """Without the memory that the driver reserves for itself, if it reports that separately."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    detailed = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version) if version is not None else None
    return int((detailed or memory).used)


def _remap(rows: Any) -> str:
    """(corrected, uncorrected, pending, failed) of row remapping."""
    if not rows:
        return ""
    if rows[3]:
        return "bad memory rows could not be remapped"
    return "bad memory rows wait for a reset of the GPU" if rows[2] else ""
