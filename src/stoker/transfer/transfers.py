"""Transfers between task directories and the blobs.

Each may be interrupted anywhere and repeated. Files are hashed on the way: a checkpoint must have the hashes that its
launcher journalled, or it is refused. If the launcher journalled no hash, the server notes its own before it removes the
file from the directory, for a repetition. The directory may be local or remote (see `stoker.task.directory`). To and
from a remote one, every byte is verified on arrival, and bytes that have arrived are not sent again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker.blobs import BlobStore
from stoker.blobs.place import remove_at
from stoker.errors import BlobDamaged, NotFound, SpecError, TooLarge
from stoker.linux.idle_throttle import Pause, none
from stoker.spec.tree import Tree, TreeFile, check_digest
from stoker.task import layout
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir
from stoker.task.safe_open import open_beneath
from stoker.transfer import outputs
from stoker.transfer.fetch import FetchedFiles, Fetcher, store
from stoker.transfer.merge import for_task, merge
from stoker.transfer.outputs import check_room, plain_mode

CHECKPOINT_FILES = 100_000
OUTPUT_ENTRIES = 200_000
OUTPUT_BYTES = 256 << 30
"""Limits of what one task may hand over. A sparse file counts with its apparent size."""
Rename = Callable[[str], str]
"""Maps the name of a file or directory to another."""
APART_NAMED = 20
"""Paths with different bytes that are listed, at most."""


def bring_code(blobs: BlobStore, digest: str, task_dir: TaskDir, *, replace: bool = False) -> None:
    """Place a tree as the task's working folder, unless it is there. The folder appears complete or not at all. `replace`: also
    in place of one that is there."""
    if isinstance(task_dir, RemoteAccess):
        task_dir.place(blobs.tree(digest).canonical(), layout.CODE, blobs.open, replace=replace)
        return
    parent, name = _local(task_dir).folder
    if not replace and LocalTaskDir(parent).list(name):
        return
    root = open_beneath(parent, "")
    try:
        blobs.place_at(digest, root, name, replace=replace)
    finally:
        os.close(root)


def carry_checkpoint(
    task_dir: TaskDir,
    staged: StagedCheckpoint,
    blobs: BlobStore,
    *,
    part: layout.SharedPart | None = None,
    pause: Pause = none,
    rename: Rename | None = None,
) -> tuple[str, int]:
    """Take a staged checkpoint into the blobs: (digest of its tree, bytes).

    Files that an earlier try took count. The staging directory is removed at the end. `part`: the checkpoint is in
    another task's part of a shared volume (see `stoker.task.directory.SharingTaskDir`), and is not removed.
    `pause`: see `stoker.linux.idle_throttle`. `rename`: gives the names of the files in the tree.
    """
    tree = _manifest(staged, remote=isinstance(task_dir, RemoteAccess))
    directory = layout.staged(_number(staged))
    if part is not None:
        directory = f"{part.path}/{directory}"
    if isinstance(task_dir, RemoteAccess):
        _fetch_checkpoint(task_dir, directory, tree, blobs, pause)
    else:
        local = _local(task_dir)
        # Read once, and only if an earlier try took files: each missing file needs one line of it.
        sums = functools.cache(lambda: _sums(local))
        unhashed = {str(raw["path"]) for raw in staged.files if not raw["sha256"]}
        # Big files first: meanwhile the others may lose further names and writers, and need no copy then.
        by_size = sorted(tree.files, key=lambda file: file.size, reverse=True)
        tree = Tree.of(
            [
                _carry_file(
                    local,
                    f"{directory}/{file.path}",
                    file,
                    sums if file.path in unhashed else None,
                    blobs,
                    pause,
                )
                for file in by_size
            ]
        )
        if missing := blobs.missing({file.sha256 for file in tree.files}):
            raise NotFound(f"of checkpoint {staged.number}, {len(missing)} files are not stored any more")
    digest = blobs.put_tree(tree if rename is None else tree.renamed(rename))
    if part is None:
        _remove(task_dir, layout.STAGED, directory.rpartition("/")[2])
    return digest, tree.size


def carry_outputs(
    task_dir: TaskDir,
    blobs: BlobStore,
    *,
    max_entries: int = OUTPUT_ENTRIES,
    max_bytes: int = OUTPUT_BYTES,
    known: str | None = None,
) -> tuple[str, int, int]:
    """Copy the output directory into the blobs: (digest of the tree, files, bytes).

    The files stay, so that a second try finds the same. Links that stay inside are kept; other links, devices, pipes and
    sockets are not outputs. A name that is not UTF-8 is kept with escapes. `known`: the outputs that were brought before;
    files of them that are unchanged in a remote directory are not fetched.
    """
    if isinstance(task_dir, RemoteAccess):
        files = outputs.fetch(task_dir, blobs, max_entries, max_bytes, known)
    else:
        files = outputs.copy(_local(task_dir), blobs, max_entries, max_bytes)
    tree = Tree.of(files)
    if tree.files:
        blobs.sync()
    return blobs.put_tree(tree), len(tree.files), tree.size


def merge_outputs(
    blobs: BlobStore, carried: Mapping[int, str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merge the outputs of several tasks into the run's: {"digest", "files", "bytes"}, and "apart" with the paths at
    which they wrote different bytes.

    `carried`: digests from `carry_outputs`, by the tasks' positions in the order of ranks. `before`: the run's outputs
    that were brought to each task with `outputs_for`, if any.
    """
    base = blobs.tree(before["digest"]) if before else Tree()
    trees = [(place, blobs.tree(digest)) for place, digest in sorted(carried.items())]
    merged = merge(trees, base, parted=bool(before and before.get("apart")))
    found: dict[str, Any] = {
        "digest": blobs.put_tree(merged.tree),
        "files": len(merged.tree.files),
        "bytes": merged.tree.size,
    }
    if merged.apart:
        found["apart"] = list(merged.apart[:APART_NAMED])
    return found


def outputs_for(blobs: BlobStore, outputs: Mapping[str, Any], place: int) -> str:
    """The tree to bring to the task at this position: with its own files where tasks differ."""
    digest = str(outputs["digest"])
    return for_task(blobs, digest, place) if outputs.get("apart") else digest


def bring_outputs(blobs: BlobStore, digest: str, task_dir: TaskDir) -> None:
    """Place the outputs of earlier attempts, so that the next attempt can add to them."""
    if isinstance(task_dir, RemoteAccess):
        task_dir.place(blobs.tree(digest).canonical(), layout.OUTPUT, blobs.open, replace=True)
        return
    root = open_beneath(task_dir.root, "")
    try:
        blobs.place_at(digest, root, layout.OUTPUT, replace=True)
    finally:
        os.close(root)


def restore_checkpoint(
    blobs: BlobStore, digest: str, task_dir: TaskDir, generation: int, *, rename: Rename | None = None
) -> None:
    """Make this generation's checkpoint directory hold exactly this checkpoint, with every byte verified. BlobDamaged: a
    byte differs, and there is no directory. `rename`: gives the names of the files there."""
    if isinstance(task_dir, RemoteAccess):
        tree = blobs.tree(digest)
        manifest = (tree if rename is None else tree.renamed(rename)).canonical()
        task_dir.place(manifest, layout.checkpoints(int(generation)), blobs.open, replace=True)
        return
    parent = open_beneath(task_dir.root, layout.CHECKPOINTS, create=True)
    try:
        blobs.place_at(digest, parent, str(int(generation)), verify=True, replace=True, rename=rename)
    finally:
        os.close(parent)


def _local(task_dir: TaskDir) -> LocalTaskDir:
    if not isinstance(task_dir, LocalTaskDir):
        raise TypeError(f"a task directory that is neither local nor remote: {task_dir!r}")
    return task_dir


def _number(staged: StagedCheckpoint) -> int:
    if type(staged.number) is not int or not 0 <= staged.number < 10**9:
        raise SpecError(f"the journal names a checkpoint {str(staged.number)[:40]!r}, which is not a number")
    return staged.number


def _manifest(staged: StagedCheckpoint, *, remote: bool) -> Tree:
    """The journal's list as a tree. User code can write the journal, so every field is checked. In a remote directory
    every file needs a hash."""
    if not isinstance(staged.files, list) or not staged.files:
        raise SpecError(f"the journal lists no files for checkpoint {staged.number}")
    if len(staged.files) > CHECKPOINT_FILES:
        raise TooLarge(
            f"checkpoint {staged.number} has {len(staged.files)} files, over the cap of {CHECKPOINT_FILES}"
        )
    tree = Tree.of([_declared(raw, remote) for raw in staged.files])
    return tree.validate(max_files=CHECKPOINT_FILES, max_bytes=None)


def _declared(raw: Any, remote: bool) -> TreeFile:
    if not isinstance(raw, dict):
        raise SpecError("the journal lists a checkpoint file that is not an object")
    path, size, mode = raw.get("path"), raw.get("size"), raw.get("mode", 0o644)
    if not isinstance(path, str) or type(size) is not int or type(mode) is not int:
        raise SpecError("the journal lists a checkpoint file without a path, size or mode")
    digest = raw.get("sha256")
    if digest == "" and not remote:
        # Not known yet: a placeholder that no other file has.
        digest = hashlib.sha256(b"unhashed " + path.encode("utf-8", "surrogateescape")).hexdigest()
    return TreeFile(path, check_digest(digest), size, plain_mode(mode))


def _carry_file(
    task_dir: LocalTaskDir,
    path: str,
    file: TreeFile,
    sums: Callable[[], Mapping[str, str]] | None,
    blobs: BlobStore,
    pause: Pause,
) -> TreeFile:
    """Move a file into the blobs. `sums`: hashes that earlier tries noted; None: the launcher journalled its hash."""
    try:
        fd = task_dir.open(path)
    except FileNotFoundError as exc:
        if sums is not None:
            file = replace(file, sha256=check_digest(sums().get(path, file.sha256)))
        if not blobs.missing([file.sha256]) and blobs.size(file.sha256) == file.size:
            return file
        raise NotFound(f"the staged checkpoint file {path!r} is gone and was not stored") from exc
    try:
        if os.fstat(fd).st_size != file.size:
            raise BlobDamaged(
                f"the staged file {path!r} does not have the {file.size} bytes its launcher saw"
            )
        try:
            digest = file.sha256 if sums is None else None
            found, _ = blobs.put_fd(
                fd, digest=digest, size=file.size, move=True, limit=file.size, pause=pause
            )
        except TooLarge as exc:
            raise BlobDamaged(f"the staged file {path!r} grew while it was carried") from exc
    finally:
        os.close(fd)
    if sums is not None:
        task_dir.append(layout.SUMS, {"path": path, "sha256": found})
    directory, _, name = path.rpartition("/")
    _remove(task_dir, directory, name)
    return replace(file, sha256=found)


def _sums(task_dir: LocalTaskDir) -> dict[str, str]:
    """Hashes of files that were taken from this directory before. No more trusted than the journal."""
    found: dict[str, str] = {}
    offset = 0
    while True:
        lines, end = task_dir.lines(layout.SUMS, offset)
        if end == offset:
            return found
        found.update((str(line.get("path")), str(line.get("sha256"))) for line in lines)
        offset = end


def _fetch_checkpoint(
    task_dir: RemoteAccess, directory: str, tree: Tree, blobs: BlobStore, pause: Pause
) -> None:
    taken = FetchedFiles(task_dir)
    wanted = {file.sha256: file for file in tree.files}
    missing = [
        file
        for file in wanted.values()
        if (file.sha256, file.size) not in taken
        or blobs.missing([file.sha256])
        or blobs.size(file.sha256) != file.size
    ]
    check_room(blobs, sum(file.size for file in missing), "the checkpoint holds")
    with Fetcher(task_dir) as fetcher:
        for file in missing:
            path = f"{directory}/{file.path}"
            try:
                part = fetcher.fetch(path, file.sha256, file.size, pause)
            except FileNotFoundError as exc:
                raise NotFound(f"the staged checkpoint file {path!r} is gone and was not stored") from exc
            store(part, blobs, digest=file.sha256, size=file.size, durable=True, pause=pause)
            taken.add(file.sha256, file.size, durable=True)


def _remove(task_dir: TaskDir, directory: str, name: str) -> None:
    """Remove a name from the directory. What cannot be removed goes with the whole directory later."""
    with contextlib.suppress(OSError):
        if isinstance(task_dir, RemoteAccess):
            task_dir.discard(f"{directory}/{name}")
            return
        fd = open_beneath(task_dir.root, directory)
        try:
            remove_at(fd, name)
        finally:
            os.close(fd)
