"""Resources of a container, from Kubernetes' form to that of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.spec import quantities
from stoker.spec.interop.ledger import At, Ledger, Level
from stoker.spec.problems import show

GPUS = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi")
_SIMPLE = {"cpu": "cpu", "memory": "memory", "ephemeral-storage": "disk"}
_EXPONENT = re.compile(r"[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{1,2}")


def resources(value: Any, path: At, ledger: Ledger, *, cluster: bool) -> dict[str, Any]:
    """Resources of one container. In a job the request equals the limit; a note says where they differ."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        ledger.mistake(path, f"is {show(value)}, not a mapping")
        return {}
    limits, requests = (_part(value, name, path, ledger) for name in ("limits", "requests"))
    for key in value:
        if key not in ("limits", "requests"):
            ledger.note((*path, key), value[key], "GPUs are asked for by `nvidia.com/gpu`")
    found: dict[str, Any] = {}
    for key, ours in _SIMPLE.items():
        where = (*path, "limits" if key in limits else "requests", key)
        if key not in limits and key not in requests:
            continue
        amount = _amount(key, limits.get(key, requests.get(key)), where, ledger)
        if amount is None:
            continue
        if ours == "disk" and not cluster:
            ledger.note(
                where, limits.get(key, requests.get(key)), "scratch disk is not limited here", Level.SAID
            )
            continue
        found[ours] = amount
        _note_difference(key, limits, requests, path, ledger)
    for key in [*limits, *(key for key in requests if key not in limits)]:
        where = (*path, "limits" if key in limits else "requests", key)
        if key in GPUS:
            count = ledger.checked(where, quantities.count, limits.get(key, requests.get(key)))
            found["gpu"] = found.get("gpu", 0) + (count or 0)
        elif key not in _SIMPLE:
            ledger.note(where, limits.get(key, requests.get(key)), _unknown(key))
    return found


def _part(value: Mapping[str, Any], name: str, path: At, ledger: Ledger) -> Mapping[str, Any]:
    found = value.get(name)
    if found is not None and not isinstance(found, Mapping):
        ledger.mistake((*path, name), f"is {show(found)}, not a mapping")
    return found if isinstance(found, Mapping) else {}


def _amount(key: str, value: Any, where: At, ledger: Ledger) -> Any:
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if value in (0, "0"):
        return None
    if key == "cpu":
        return ledger.checked(where, quantities.cpu, value)
    if isinstance(value, str) and value.endswith("m"):
        value = _milli(value)
    return ledger.checked(where, quantities.memory, value)


def _milli(value: str) -> Any:
    """Kubernetes' notation for fractions of a byte; rounded up to whole bytes."""
    digits = value[:-1]
    return -(-int(digits) // 1000) if digits.isdigit() and len(digits) < 18 else value


def _note_difference(
    key: str, limits: Mapping[str, Any], requests: Mapping[str, Any], path: At, ledger: Ledger
) -> None:
    if key in limits and key in requests and str(limits[key]) != str(requests[key]):
        why = f"as much as the limit is reserved: {limits[key]}"
        ledger.note((*path, "requests", key), requests[key], why, Level.SAID)
    elif key not in limits:
        ledger.note((*path, "requests", key), requests[key], "is also the limit here", Level.SAID)


def _unknown(key: str) -> str:
    if "mig-" in key:
        return "parts of GPUs are chosen by a pool with a `gpu_profile`: `--set pool=NAME`"
    if "rdma" in key or "/hca" in key or key.startswith("vpc.amazonaws.com/efa"):
        return "such devices are a setting of the cluster (`rdma`)"
    return "is not a resource that is known here"
