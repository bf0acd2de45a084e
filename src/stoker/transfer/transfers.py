"""The journeys between a task directory and the blobs.

Each may be cut short anywhere and started again. What is carried away is hashed on the way: a checkpoint must
have the hashes its launcher journalled, or it is refused; where it journalled none, ours is noted before the file is
taken out of the directory, for whoever has to start again. The directory may be near or far (see
stoker.task.directory); to and from a far one every byte is verified at its end, and what has arrived is not sent again.
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
"""Caps on what one task may hand over. A sparse file counts with the size it claims."""
Rename = Callable[[str], str]
"""From the name of a file or directory to another."""
APART_NAMED = 20
"""Paths that are named of those that went apart."""


def bring_code(blobs: BlobStore, digest: str, task_dir: TaskDir) -> None:
    """Place a code tree as the task's working directory. Once it is there it is left alone: the directory
    appears complete or not at all, and from then on it is the task's."""
    if isinstance(task_dir, RemoteAccess):
        task_dir.place(blobs.tree(digest).canonical(), layout.CODE, blobs.open)
        return
    if task_dir.list(layout.CODE):
        return
    root = open_beneath(task_dir.root, "")
    try:
        blobs.place_at(digest, root, layout.CODE)
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

    Files already taken by an earlier try count. The staging directory is removed at the end. `part`: it is in another
    task's part of the volume that this one shares (see `stoker.task.directory.SharingTaskDir`), and stays until that goes.
    `pause`: see `stoker.linux.idle_throttle`. `rename`: what its files are called in the tree.
    """
    tree = _manifest(staged, far=isinstance(task_dir, RemoteAccess))
    directory = layout.staged(_number(staged))
    if part is not None:
        directory = f"{part.path}/{directory}"
    if isinstance(task_dir, RemoteAccess):
        _fetch_checkpoint(task_dir, directory, tree, blobs, pause)
    else:
        near = _near(task_dir)
        # Read once, and only when something has been taken before: each file that is gone needs one line of it.
        sums = functools.cache(lambda: _sums(near))
        unhashed = {str(raw["path"]) for raw in staged.files if not raw["sha256"]}
        # What takes long first: of the rest, others may have the same, and let it go meanwhile.
        by_size = sorted(tree.files, key=lambda file: file.size, reverse=True)
        tree = Tree.of(
            [
                _carry_file(
                    near,
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
    """Copy what is in the output directory into the blobs: (digest of the tree, files, bytes).

    The files stay where they are, so that a second try finds the same. Links that stay inside are kept; other
    links, devices, pipes and sockets are not outputs. A name that is not UTF-8 is kept with escapes. `known`: the
    outputs that were brought; what is unchanged in a far directory is not fetched again.
    """
    if isinstance(task_dir, RemoteAccess):
        files = outputs.fetch(task_dir, blobs, max_entries, max_bytes, known)
    else:
        files = outputs.copy(_near(task_dir), blobs, max_entries, max_bytes)
    tree = Tree.of(files)
    if tree.files:
        blobs.sync()
    return blobs.put_tree(tree), len(tree.files), tree.size


def merge_outputs(
    blobs: BlobStore, carried: Mapping[int, str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The outputs of several tasks as the run's: {"digest", "files", "bytes"}, and "apart" with the paths of which they
    wrote different bytes.

    `carried`: digests from `carry_outputs`, by the tasks' places in the order of the ranks. `before`: the run's outputs
    that were brought to each with `outputs_for`, if any were.
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
    """The tree to bring to the task in this place: its own of what differs."""
    digest = str(outputs["digest"])
    return for_task(blobs, digest, place) if outputs.get("apart") else digest


def bring_outputs(blobs: BlobStore, digest: str, task_dir: TaskDir) -> None:
    """What earlier attempts of the run left as outputs is there again for the next one to add to."""
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
    """Make this generation's checkpoint directory hold exactly this checkpoint, every byte verified on the way
    (BlobDamaged, and no directory, if one is not as it was). `rename`: what its files are called there."""
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


def _near(task_dir: TaskDir) -> LocalTaskDir:
    if not isinstance(task_dir, LocalTaskDir):
        raise TypeError(f"a task directory that is neither near nor far: {task_dir!r}")
    return task_dir


def _number(staged: StagedCheckpoint) -> int:
    if type(staged.number) is not int or not 0 <= staged.number < 10**9:
        raise SpecError(f"the journal names a checkpoint {str(staged.number)[:40]!r}, which is not a number")
    return staged.number


def _manifest(staged: StagedCheckpoint, *, far: bool) -> Tree:
    """The journal's list as a tree. The journal lies in the task's directory: every field is checked. From afar nothing
    comes without its hash."""
    if not isinstance(staged.files, list) or not staged.files:
        raise SpecError(f"the journal lists no files for checkpoint {staged.number}")
    if len(staged.files) > CHECKPOINT_FILES:
        raise TooLarge(
            f"checkpoint {staged.number} has {len(staged.files)} files, over the cap of {CHECKPOINT_FILES}"
        )
    tree = Tree.of([_declared(raw, far) for raw in staged.files])
    return tree.validate(max_files=CHECKPOINT_FILES, max_bytes=None)


def _declared(raw: Any, far: bool) -> TreeFile:
    if not isinstance(raw, dict):
        raise SpecError("the journal lists a checkpoint file that is not an object")
    path, size, mode = raw.get("path"), raw.get("size"), raw.get("mode", 0o644)
    if not isinstance(path, str) or type(size) is not int or type(mode) is not int:
        raise SpecError("the journal lists a checkpoint file without a path, size or mode")
    digest = raw.get("sha256")
    if digest == "" and not far:
        # Not known yet. For now it is one that no other file has.
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
    """The file as it is in the blobs. `sums`: hashes of what was taken before; None: its launcher has said its hash."""
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
    """Hashes of what was taken out of this directory before. As much the task's own words as its journal is."""
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
    """Take a name out of the directory; what cannot be removed is left for whoever removes the whole."""
    with contextlib.suppress(OSError):
        if isinstance(task_dir, RemoteAccess):
            task_dir.discard(f"{directory}/{name}")
            return
        fd = open_beneath(task_dir.root, directory)
        try:
            remove_at(fd, name)
        finally:
            os.close(fd)
