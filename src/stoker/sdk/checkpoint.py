"""Saving and finding checkpoints: `stoker.checkpoint.save(...)`, `stoker.checkpoint.load()`.

Saving is atomic: a checkpoint is complete and on the disk, or not there at all, whatever is killed. Stoker keeps it from the
moment `save` returns, and restores it when the run continues elsewhere. Outside Stoker the same calls work in
`./checkpoints`.

>>> save("step-1.json", '{"weights": [1, 2]}', step=1)
'checkpoints/step-1.json'
>>> load()
b'{"weights": [1, 2]}'
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

from stoker.sdk import async_save, run_info
from stoker.sdk.atomic import Data, place
from stoker.task import formats, layout

__all__ = [
    "directory",
    "latest",
    "load",
    "load_sharded",
    "load_torch",
    "save",
    "save_sharded",
    "save_torch",
    "wait",
]

_UNFINISHED = re.compile(r"^\.|\.(tmp|part|partial|incomplete|lock)$|\.orbax-checkpoint-tmp|_temp$|^tmp[-_]")
_TF_PART = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_POINTERS = ("checkpoint", "latest")
_saved: List[str] = []
"""The last checkpoint of this process; it is newer than the one that the run was resumed from."""


def directory() -> Path:
    """The directory for checkpoints: `STOKER_CHECKPOINT_DIR`, or `./checkpoints` outside Stoker.

    >>> directory().name
    'checkpoints'
    """
    return Path(os.environ.get("STOKER_CHECKPOINT_DIR") or "checkpoints")


def save(
    name: str,
    data: Data,
    *,
    step: Optional[int] = None,
    metrics: Optional[Mapping[str, Any]] = None,
    keep: Optional[int] = None,
) -> str:
    """Save a checkpoint under a name in the checkpoint directory, and return its path.

    `data` is bytes, text, a dict of files (for a directory), a `Path` to copy, or a function that is called with a path and
    writes a file or a directory there: `save("model.keras", model.save)`.
    `step` and `metrics` are kept with it (`checkpoint: {best: ...}` in the job file selects by a metric).
    With `keep`, only that many local checkpoints stay, the newest, of those whose names differ only in their numbers. What
    Stoker keeps is set in the job file. Raises OSError when it cannot be written; an older one of that name stays then.

    >>> save("last.bin", b"weights")
    'checkpoints/last.bin'
    >>> save("step-2", {"model.bin": b"weights", "info.json": "{}"}, step=2, metrics={"loss": 0.5})
    'checkpoints/step-2'
    """
    check(name, keep)
    if not async_save.saver().busy:
        wait()  # A save that is still in progress must not replace this newer one.
    return put(name, data, step=step, metrics=metrics, keep=keep)


def wait() -> None:
    """Wait until the asynchronous save in progress is on the disk. Raises its error.

    >>> wait()
    """
    async_save.saver().wait()


def load(name: Optional[str] = None) -> Union[bytes, Path, None]:
    """The named checkpoint, or the one to resume from: bytes of a file, the path of a directory; None if there is none.

    >>> load("no-such-checkpoint") is None
    True
    """
    path = latest() if name is None else directory() / name
    if path is None or not path.exists():
        return None
    return path if path.is_dir() else path.read_bytes()


def latest() -> Optional[Path]:
    """The checkpoint to resume from: the one that Stoker restored, or a newer one; None at a first start.

    >>> latest() is None or latest().parent == directory()
    True
    """
    saver = async_save.saver()
    saver.settle()
    resumed = os.environ.get("STOKER_RESUME_FROM")
    if resumed and not _saved and saver.last is None:
        return Path(resumed)
    newest = max(_entries(), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return None
    return newest.with_name(_TF_PART.sub("", newest.name))


def save_torch(
    state: Any,
    name: Optional[str] = None,
    *,
    step: Optional[int] = None,
    metrics: Optional[Mapping[str, Any]] = None,
    keep: Optional[int] = None,
    asynchronous: bool = False,
) -> str:
    """`torch.save` of a state (a dict of state dicts), atomically. The name is `step-N.pt`, or `last.pt` without a step.

    stoker.checkpoint.save_torch({"model": model.state_dict(), "epoch": epoch}, step=epoch, keep=3)

    With `asynchronous` the call returns when the state has been copied, and another process writes the same file. The next
    save waits for one that is being written. An error is raised by the next save or by `wait()`. At its end the training
    waits for the last save. It needs memory for one copy of the state.
    """
    import torch  # not every environment has it

    if name is None:
        name = "last.pt" if step is None else f"step-{step}.pt"
    # A signal handler that interrupted a save cannot use the memory of that save.
    if not asynchronous or async_save.saver().busy:
        return save(name, lambda path: torch.save(state, path), step=step, metrics=metrics, keep=keep)
    from stoker.sdk.torch_state import Archive  # imports torch

    check(name, keep)
    snapshot = Archive(state)
    request = {**_request(name, step, metrics, keep), "files": {"": [["zip", snapshot.records]]}}
    async_save.saver().save(snapshot, request)
    return str(directory() / name)


def save_sharded(
    state: Dict[str, Any],
    name: Optional[str] = None,
    *,
    step: Optional[int] = None,
    metrics: Optional[Mapping[str, Any]] = None,
    keep: Optional[int] = None,
    asynchronous: bool = True,
) -> str:
    """Save a state of which every rank has a part (FSDP, tensor parallel: DTensors). Every rank calls it with the same name.
    The name is `step-N`, or `last` without a step: a directory in the format of torch.distributed.checkpoint.

    model_state, optimizer_state = get_state_dict(model, optimizer)  # of torch.distributed.checkpoint.state_dict
    stoker.checkpoint.save_sharded({"model": model_state, "optimizer": optimizer_state, "step": step}, step=step)

    One rank writes what several have in common. `asynchronous` is as for `save_torch`; an error on one rank is raised on
    all ranks by the next save.
    """
    from stoker.sdk.torch_shards import Shard  # imports torch

    if name is None:
        name = "last" if step is None else f"step-{step}"
    check(name, keep)
    saver = async_save.saver()
    if saver.busy:
        raise RuntimeError("save_sharded was called by a signal handler while this process was saving")
    saver.settle()
    shard = Shard(state, str(directory().absolute()), saver.take_error())
    saver.save(shard, {**_request(name, step, metrics, keep), "files": shard.files, "part_of": shard.part_of})
    if not asynchronous:
        wait()
    return str(directory() / name)


def load_torch(name: Optional[str] = None, *, map_location: Any = "cpu", weights_only: bool = True) -> Any:
    """Load what `save_torch` saved, to the CPU unless `map_location` says otherwise; None if there is none.

    state = stoker.checkpoint.load_torch()
    if state is not None:
        model.load_state_dict(state["model"])
    """
    data = load(name)
    if data is None:
        return None
    import torch  # not every environment has it

    if isinstance(data, Path):
        raise IsADirectoryError(f"{data} is a directory; torch.load reads files")
    return torch.load(io.BytesIO(data), map_location=map_location, weights_only=weights_only)


def load_sharded(state: Dict[str, Any], name: Optional[str] = None) -> bool:
    """Fill a state with what `save_sharded` saved, with any number of ranks; False if there is none. Every rank calls it.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    if stoker.checkpoint.load_sharded(state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    """
    async_save.saver().settle()
    path = latest() if name is None else directory() / name
    if path is None or not path.exists():
        return False
    from stoker.sdk.torch_shards import fill  # imports torch

    fill(state, str(path))
    return True


def check(name: str, keep: Optional[int]) -> None:
    """Raises ValueError for a name that would not count as a checkpoint."""
    if not name or "/" in name or "\0" in name or _UNFINISHED.search(name):
        raise ValueError(
            f"not a name for a checkpoint: {name!r}; use one without '/' that neither begins with '.' nor ends in '.tmp'"
        )
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint has to be kept")


def put(
    name: str,
    data: Data,
    *,
    step: Optional[int],
    metrics: Optional[Mapping[str, Any]],
    keep: Optional[int],
) -> str:
    """Save as `save` does, without its checks; also called by the writer process."""
    path = place(str(directory()), name, data, lambda: announce(name, step, metrics))
    _saved[:] = [path]
    if keep is not None:
        prune(name, keep)
    return path


def _request(
    name: str, step: Optional[int], metrics: Optional[Mapping[str, Any]], keep: Optional[int]
) -> Dict[str, Any]:
    """The request to the writer: plain values, as they are now."""
    return {"name": name, "step": _step(step), "metrics": _numbers(metrics or {}), "keep": keep}


def announce(name: str, step: Optional[int], metrics: Optional[Mapping[str, Any]]) -> None:
    """Tell Stoker that a checkpoint is complete. If that fails it still counts, because it was renamed into place."""
    task = run_info.task_directory()
    if task is None:
        return
    line: Dict[str, Any] = {"name": name, "step": _step(step), "generation": run_info.generation()}
    line["metrics"] = _numbers(metrics or {})
    path = os.path.join(task, layout.COMMITS)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            formats.append_line(fd, line)
        finally:
            os.close(fd)
    except OSError as exc:
        run_info.warn("commit", f"checkpoint: step and metrics of {name} cannot be noted ({exc})")


def _step(step: Any) -> Optional[int]:
    try:
        return None if step is None else int(step)
    except (TypeError, ValueError):
        run_info.warn("checkpoint step", f"checkpoint: step={step!r} is not a whole number; left out")
        return None


def _numbers(metrics: Mapping[str, Any]) -> Dict[str, float]:
    found: Dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as exc:
            run_info.warn(
                f"metric {name}", f"checkpoint: metric {name} is left out, it is not one number ({exc})"
            )
            continue
        if math.isfinite(number):
            found[str(name)] = number
    return found


def _entries() -> List[Path]:
    try:
        found = [path for path in directory().iterdir() if not _UNFINISHED.search(path.name)]
    except FileNotFoundError:
        return []
    # Scripts call whole directories so too; those are checkpoints.
    return [path for path in found if (path.name not in _POINTERS and path.exists()) or path.is_dir()]


def prune(name: str, keep: int) -> None:
    """Delete older checkpoints whose names differ from this one only in their numbers. The newest `keep` stay."""
    family = re.sub(r"\d+", "#", name)
    alike = [path for path in _entries() if re.sub(r"\d+", "#", path.name) == family]
    alike.sort(key=lambda path: (path.name == name, path.stat().st_mtime_ns), reverse=True)
    for path in alike[keep:]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            try:
                path.unlink()
            except OSError as exc:
                run_info.warn("prune", f"checkpoint: {path.name} cannot be deleted ({exc})")
