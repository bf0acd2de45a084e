"""A copy of the home, made while the server runs.

The copy of the database shows one moment. Blobs are copied before it and once more after it: a blob that it refers
to either existed before, or came in between and is too young to be collected. Tokens, secrets and task directories
are not copied: a backup must not give access, and tasks belong to this machine and this moment.

    backup.json   version, time, counts
    stoker.db     the database
    blobs/        objects and trees
    runs/         logs
    ledger.jsonl  config.toml  home-id
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.blobs import BlobStore
from stoker.blobs.files import Copier, naming_full_disks, sync_file_system
from stoker.errors import Refused
from stoker.linux.descriptors import Closing
from stoker.linux.process import start_time
from stoker.server.config_file import with_database
from stoker.settings import Home
from stoker.store import Store

FORMAT = 1


def create(home: Home, store: Store, blobs: BlobStore, path: str | None) -> dict[str, Any]:
    """Makes a backup at `path` (default: under backups/ of the home). It appears complete or not at all."""
    target = _target(home, path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with naming_full_disks(target.parent):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _clear(target)
            partial.mkdir(mode=0o700)
            description = _fill(home, store, blobs, partial)
            if target.is_dir():
                target.rmdir()
            partial.rename(target)
        except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError) as exc:
            raise _cannot(target, exc) from exc
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return {"path": str(target), **description}


def _cannot(target: Path, exc: OSError) -> Refused:
    where = exc.filename or str(target)
    return Refused(
        f"cannot write a backup to {str(target)[:200]!r}: {str(where)[:200]}: {(exc.strerror or str(exc)).lower()}",
        hint="Name a directory that you may write to, on a mounted disk.",
    )


def _clear(target: Path) -> None:
    """Removes partial backups of this name whose server was killed."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        pid = left.name.split(".")[-2]
        if pid.isdecimal() and start_time(int(pid)) is None:
            shutil.rmtree(left, ignore_errors=True)


def _target(home: Home, path: str | None) -> Path:
    if path is None:
        return home.backups / time.strftime("home-%Y%m%d-%H%M%S", time.gmtime())
    target = Path(path)
    if not target.is_absolute() or ".." in target.parts or "\0" in path:
        raise Refused(f"the path of a backup must be absolute: {path[:200]!r}")
    if (
        target.is_symlink()
        or (target.exists() and not target.is_dir())
        or (target.is_dir() and any(target.iterdir()))
    ):
        raise Refused(
            f"{path[:200]!r} exists already", hint="Name a directory that does not exist or is empty."
        )
    inside = target.is_relative_to(home.root)
    if inside and not (target.is_relative_to(home.backups) and target != home.backups):
        raise Refused(
            f"{path[:200]!r} lies inside the home",
            hint=f"Choose a path outside it, or beneath {home.backups}.",
        )
    return target


def _fill(home: Home, store: Store, blobs: BlobStore, partial: Path) -> dict[str, Any]:
    copier = Copier()
    for _ in range(2):
        for name in ("objects", "trees"):
            _mirror(blobs.root / name, partial / "blobs" / name, copier, again=False)
        if not (partial / "stoker.db").exists():
            store.backup(partial / "stoker.db")
    _mirror(home.runs, partial / "runs", copier, again=True)
    for path in (home.ledger, home.identity):
        with contextlib.suppress(FileNotFoundError):
            _copy(path, partial / path.name, copier)
    with contextlib.suppress(FileNotFoundError):
        # Without the database's URL, which holds a password. A file that cannot be edited safely is left out.
        settings = with_database(home.config.read_text(), None)
        if settings is not None:
            (partial / home.config.name).write_text(settings)
    files = [entry for entry in partial.rglob("*") if entry.is_file()]
    description = {
        "format": FORMAT,
        "version": __version__,
        "created_at": time.time(),
        "runs": store.total(),
        "files": len(files),
        "bytes": sum(entry.stat().st_size for entry in files),
    }
    (partial / "backup.json").write_text(json.dumps(description))
    sync_file_system(partial)
    return description


def _mirror(source: Path, target: Path, copier: Copier, *, again: bool) -> None:
    """Copies every regular file beneath `source`. Files that vanish meanwhile were deleted. `again`: copies those that
    exist too; blobs never change and need it not."""
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for directory, names, found in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir(exist_ok=True, mode=0o700)
        names[:] = [name for name in names if not (Path(directory) / name).is_symlink()]
        for name in found:
            if again or not (here / name).exists():
                with contextlib.suppress(FileNotFoundError):
                    _copy(Path(directory) / name, here / name, copier)


def _copy(source: Path, target: Path, copier: Copier) -> None:
    with Closing(os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        info = os.fstat(fd)
        with Closing(
            os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, info.st_mode & 0o777 | 0o600)
        ) as out:
            copier.copy(fd, out, info.st_size)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
