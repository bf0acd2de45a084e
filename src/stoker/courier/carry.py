"""The four journeys between a task directory and the blobs.

Each may be cut short anywhere and started again. What is carried away is hashed on the way: a checkpoint must
have the hashes its launcher journalled, or it is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

from stoker.blobs import BlobStore
from stoker.blobs.place import remove_at
from stoker.courier.walk import Found, open_beneath, walk
from stoker.errors import BlobDamaged, DiskFull, NotFound, SpecError, TooLarge
from stoker.spec.tree import Tree, TreeFile, check_digest, check_link, check_path
from stoker.task import layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.near import NearTaskDir, UnsafePath

CHECKPOINT_FILES = 100_000
OUTPUT_ENTRIES = 200_000
OUTPUT_BYTES = 256 << 30
"""Caps on what one task may hand over. A sparse file counts with the size it claims."""


MARGIN = 1 << 30
"""Bytes of the disk (or a twentieth of it, if that is less) that outputs leave free."""


def bring_code(blobs: BlobStore, digest: str, task_dir: NearTaskDir) -> None:
    """Place a code tree as the task's working directory. Once it is there it is left alone: the directory
    appears complete or not at all, and from then on it is the task's."""
    if task_dir.list(layout.CODE):
        return
    root = open_beneath(task_dir.root, "")
    try:
        blobs.place_at(digest, root, layout.CODE)
    finally:
        os.close(root)


def carry_checkpoint(task_dir: NearTaskDir, staged: StagedCheckpoint, blobs: BlobStore) -> tuple[str, int]:
    """Take a staged checkpoint into the blobs: (digest of its tree, bytes).

    Files already taken by an earlier try count. The staging directory is removed at the end.
    """
    tree = _manifest(staged)
    directory = layout.staged(_number(staged))
    for file in tree.files:
        _carry_file(task_dir, f"{directory}/{file.path}", file, blobs)
    digest = blobs.put_tree(tree)
    _remove(task_dir, layout.STAGED, directory.rpartition("/")[2])
    return digest, tree.size


def carry_outputs(
    task_dir: NearTaskDir,
    blobs: BlobStore,
    *,
    max_entries: int = OUTPUT_ENTRIES,
    max_bytes: int = OUTPUT_BYTES,
) -> tuple[str, int, int]:
    """Copy what is in the output directory into the blobs: (digest of the tree, files, bytes).

    The files stay where they are, so that a second try finds the same. Links that stay inside are kept; other
    links, devices, pipes and sockets are not outputs. A name that is not UTF-8 is kept with escapes.
    """
    try:
        root = open_beneath(task_dir.root, layout.OUTPUT)
    except (FileNotFoundError, UnsafePath):
        # No directory, or a link in its place: no outputs.
        return blobs.put_tree(Tree()), 0, 0
    try:
        found = list(walk(root, max_entries=max_entries))
    finally:
        os.close(root)
    total = sum(entry.size for entry in found)
    if total > max_bytes:
        raise _too_many_bytes(total, max_bytes, found)
    _check_room(blobs, total)
    files: dict[str, TreeFile] = {}
    left = max_bytes
    for entry in sorted(found, key=lambda entry: entry.path):
        file = _output(task_dir, entry, files, blobs, left)
        if file is not None:
            files[file.path] = file
            left -= file.size
    tree = Tree.of(_without_clashes(files))
    if tree.files:
        blobs.sync()
    return blobs.put_tree(tree), len(tree.files), tree.size


def bring_outputs(blobs: BlobStore, digest: str, task_dir: NearTaskDir) -> None:
    """What earlier attempts of the run left as outputs is there again for the next one to add to."""
    root = open_beneath(task_dir.root, "")
    try:
        blobs.place_at(digest, root, layout.OUTPUT, replace=True)
    finally:
        os.close(root)


def restore_checkpoint(blobs: BlobStore, digest: str, task_dir: NearTaskDir, generation: int) -> None:
    """Make this generation's checkpoint directory hold exactly this checkpoint, every byte verified on the way
    (BlobDamaged, and no directory, if one is not as it was)."""
    parent = open_beneath(task_dir.root, layout.CHECKPOINTS, create=True)
    try:
        blobs.place_at(digest, parent, str(int(generation)), verify=True, replace=True)
    finally:
        os.close(parent)


def _number(staged: StagedCheckpoint) -> int:
    if type(staged.number) is not int or not 0 <= staged.number < 10**9:
        raise SpecError(f"the journal names a checkpoint {str(staged.number)[:40]!r}, which is not a number")
    return staged.number


def _manifest(staged: StagedCheckpoint) -> Tree:
    """The journal's list as a tree. The journal lies in the task's directory: every field is checked."""
    if not isinstance(staged.files, list) or not staged.files:
        raise SpecError(f"the journal lists no files for checkpoint {staged.number}")
    if len(staged.files) > CHECKPOINT_FILES:
        raise TooLarge(
            f"checkpoint {staged.number} has {len(staged.files)} files, over the cap of {CHECKPOINT_FILES}"
        )
    tree = Tree.of([_declared(raw) for raw in staged.files])
    return tree.validate(max_files=CHECKPOINT_FILES, max_bytes=None)


def _declared(raw: Any) -> TreeFile:
    if not isinstance(raw, dict):
        raise SpecError("the journal lists a checkpoint file that is not an object")
    path, size, mode = raw.get("path"), raw.get("size"), raw.get("mode", 0o644)
    if not isinstance(path, str) or type(size) is not int or type(mode) is not int:
        raise SpecError("the journal lists a checkpoint file without a path, size or mode")
    return TreeFile(path, check_digest(raw.get("sha256")), size, _mode(mode))


def _carry_file(task_dir: NearTaskDir, path: str, file: TreeFile, blobs: BlobStore) -> None:
    try:
        fd = task_dir.open(path)
    except FileNotFoundError as exc:
        if not blobs.missing([file.sha256]) and blobs.size(file.sha256) == file.size:
            return
        raise NotFound(f"the staged checkpoint file {path!r} is gone and was not stored") from exc
    try:
        if os.fstat(fd).st_size != file.size:
            raise BlobDamaged(
                f"the staged file {path!r} does not have the {file.size} bytes its launcher saw"
            )
        try:
            blobs.put_fd(fd, digest=file.sha256, size=file.size, move=True, limit=file.size)
        except TooLarge as exc:
            raise BlobDamaged(f"the staged file {path!r} grew while it was carried") from exc
    finally:
        os.close(fd)
    directory, _, name = path.rpartition("/")
    _remove(task_dir, directory, name)


def _remove(task_dir: NearTaskDir, directory: str, name: str) -> None:
    """Take a name out of the directory; what cannot be removed is left for whoever removes the whole."""
    with contextlib.suppress(OSError):
        fd = open_beneath(task_dir.root, directory)
        try:
            remove_at(fd, name)
        finally:
            os.close(fd)


def _output(
    task_dir: NearTaskDir, entry: Found, taken: dict[str, TreeFile], blobs: BlobStore, left: int
) -> TreeFile | None:
    path = _printable(entry.path, taken)
    if path is None:
        return None
    if entry.link is not None:
        try:
            check_link(path, entry.link)
        except SpecError:
            return None
        return TreeFile(path, link=entry.link)
    try:
        fd = task_dir.open(f"{layout.OUTPUT}/{entry.path}")
    except (FileNotFoundError, UnsafePath):
        # Gone or swapped since it was seen: not an output.
        return None
    try:
        digest, size = blobs.put_fd(fd, durable=False, limit=left)
    finally:
        os.close(fd)
    return TreeFile(path, digest, size, _mode(entry.mode))


def _printable(path: str, taken: dict[str, TreeFile]) -> str | None:
    """The path as UTF-8, undecodable bytes escaped; None when no tree can hold it."""
    name = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    while name in taken:
        name += "~"
    try:
        check_path(name)
    except SpecError:
        return None
    return name


def _without_clashes(files: dict[str, TreeFile]) -> list[TreeFile]:
    """Escaping can make a file and a directory meet; the file yields."""
    parents: set[str] = set()
    for path in files:
        parent = path.rpartition("/")[0]
        while parent and parent not in parents:
            parents.add(parent)
            parent = parent.rpartition("/")[0]
    return [file for path, file in files.items() if path not in parents]


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def _check_room(blobs: BlobStore, total: int) -> None:
    """Refuse what cannot fit before it has filled the disk under everybody else: a sparse file costs its owner
    nothing and its copy all the room there is."""
    blobs.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    usage = shutil.disk_usage(blobs.root)
    room = usage.free - min(MARGIN, usage.total // 20)
    if total > max(room, 0):
        raise DiskFull(
            f"the outputs hold {total} bytes, and {usage.free} are free on the disk that holds {blobs.root}",
            hint="Make room, or write less.",
        )


def _too_many_bytes(total: int, cap: int, found: list[Found]) -> TooLarge:
    biggest = sorted(found, key=lambda entry: entry.size, reverse=True)[:3]
    names = ", ".join(f"{entry.path!r} ({entry.size} bytes)" for entry in biggest)
    return TooLarge(f"the outputs hold {total} bytes, over the cap of {cap}; the biggest: {names}")
