"""Finds what is new in the mirrored files, or waits for it.

The journal must never be ahead: a server that sees an entry of it must also see all log lines and metrics written
before it. So the length of the journal is read first. Then everything that other files have gained is sent, and the
journal up to that length goes with the last part. If that takes several answers, the client returns the `mark` of the
first one, so that a log that grows as fast as it is read delays nothing.

Only whole lines are sent, because a line that did not fit on the disk is removed again; `final` sends everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from stoker.linux import inotify
from stoker.linux.descriptors import Closing
from stoker.task import courier_protocol, layout
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import open_beneath

ANSWER = 4 << 20
"""The most bytes of deltas in one answer."""
LONGEST_WAIT = 30.0
CHECK_SECONDS = 1.0
"""Seconds after which the files are checked even without an inotify event."""
BATCH_SECONDS = 0.02
"""Seconds between a change and the check: more changes may come with it."""
LONG_LINE = 1 << 20
"""A piece of a line of this length is sent before the end of the line is written."""
ENTRIES = 20_000
"""The most entries of a directory that are read."""
FILES = 1000
"""The most metrics files, and segments of the log, that are mirrored."""

_EVENTS = (
    inotify.IN_MODIFY
    | inotify.IN_CREATE
    | inotify.IN_MOVED_TO
    | inotify.IN_MOVED_FROM
    | inotify.IN_DELETE
    | inotify.IN_ONLYDIR
    | inotify.IN_DONT_FOLLOW
)


class ClientGone(Exception):
    """The client does not wait any more."""


class Mark(NamedTuple):
    journal: int
    files: Dict[str, int]


class SyncRequest(NamedTuple):
    """The client's state and request."""

    have: Dict[str, Tuple[int, str]]
    """path -> size and the tag of its last bytes. Size -1: no more of this file is wanted."""
    records: Dict[str, str]
    """path -> tag of its content."""
    wait: float
    final: bool
    mark: Optional[Mark]

    @classmethod
    def parse(cls, raw: Dict[str, Any]) -> SyncRequest:
        have, records, mark = raw.get("have"), raw.get("records"), raw.get("mark")
        wait = raw.get("wait")
        if not isinstance(have, dict) or not isinstance(records, dict) or type(wait) not in (int, float):
            raise courier_protocol.Malformed("a sync without have, records and wait")
        return cls(
            {path: _held(value) for path, value in have.items()},
            {path: courier_protocol.text(value) for path, value in records.items()},
            min(max(float(wait or 0), 0.0), LONGEST_WAIT),
            raw.get("final") is True,
            _mark(mark) if mark is not None else None,
        )


class SyncAnswer:
    """One answer under construction."""

    def __init__(self) -> None:
        self.deltas: List[Tuple[str, int, int]] = []
        self.resets: List[str] = []
        self.records: List[Tuple[str, str, int]] = []
        self.gone: List[str] = []
        self.data: List[courier_protocol.Bytes] = []
        self.left = ANSWER
        self.behind: Dict[str, int] = {}
        """Files that continue after this answer, and up to which size."""
        self.mark: Optional[Mark] = None

    def __bool__(self) -> bool:
        return bool(self.deltas or self.resets or self.records or self.gone)

    def add(self, path: str, offset: int, data: courier_protocol.Bytes) -> None:
        self.deltas.append((path, offset, len(data)))
        self.data.append(data)
        self.left -= len(data)

    def header(self) -> Dict[str, Any]:
        mark = None if self.mark is None else {"journal": self.mark.journal, "files": self.mark.files}
        return {
            "deltas": self.deltas,
            "resets": self.resets,
            "records": self.records,
            "gone": self.gone,
            "mark": mark,
        }


class Sync:
    """Answers sync requests. May be used from any thread; keeps no state between two requests."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._local = LocalTaskDir(directory)

    def wait(self, request: SyncRequest, client: Optional[int] = None) -> SyncAnswer:
        """What is new, as soon as there is something; empty after `request.wait` seconds. `client`: a descriptor that
        becomes readable when the client has disconnected; then Gone is raised."""
        end = time.monotonic() + request.wait
        with _Watch(self._directory, client) as watch:
            if request.wait:
                watch.begin()
            answer = self._look(request, check=True)
            while not answer and answer.mark is None and request.mark is None:
                left = end - time.monotonic()
                if left <= 0:
                    break
                watch.wait(min(left, CHECK_SECONDS))
                answer = self._look(request, check=False)
            return answer

    def _look(self, request: SyncRequest, *, check: bool) -> SyncAnswer:
        """`check`: also verify that files which have not grown are unchanged."""
        answer = SyncAnswer()
        before = self._size(layout.JOURNAL) if request.mark is None else request.mark.journal
        files = self._growing() if request.mark is None else dict(request.mark.files)
        for path in sorted(files, key=_by_urgency):
            self._add_growth(answer, request, path, files[path], check)
        if request.mark is None:
            answer.gone = [path for path in request.have if path not in files and not self._exists(path)]
        if not answer.behind:
            self._add_growth(answer, request, layout.JOURNAL, before, check)
        if answer.behind:
            files_behind = {path: size for path, size in answer.behind.items() if path != layout.JOURNAL}
            answer.mark = Mark(before, files_behind)
        else:
            self._records(answer, request)
        return answer

    def _growing(self) -> Dict[str, int]:
        """Sizes of the growing files, without the journal."""
        found: Dict[str, int] = {}
        for folder in (layout.LOG, layout.METRICS):
            found.update(self._sizes(folder))
        size = self._size(layout.SAMPLES)
        if size:
            found[layout.SAMPLES] = size
        return found

    def _sizes(self, folder: str) -> Dict[str, int]:
        try:
            fd = open_beneath(self._directory, folder)
        except (FileNotFoundError, UnsafePath):
            return {}
        with Closing(fd):
            names = [name for name in _names(fd) if courier_protocol.grows(f"{folder}/{name}")]
            found = {}
            for name in sorted(names, key=_by_number, reverse=True)[:FILES]:
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found[f"{folder}/{name}"] = info.st_size
            return found

    def _add_growth(
        self, answer: SyncAnswer, request: SyncRequest, path: str, size: int, check: bool
    ) -> None:
        """Add what is new of a file up to `size`, as far as the answer has room."""
        held, tail = request.have.get(path, (0, ""))
        if held < 0 or (held == size and not check):
            return
        try:
            fd = self._local.open(path)
        except (FileNotFoundError, UnsafePath, PermissionError):
            return
        with Closing(fd):
            if held and not _continues(fd, held, tail):
                answer.resets.append(path)
                held = 0
            self._send(answer, path, fd, held, size, whole=not request.final)

    def _send(self, answer: SyncAnswer, path: str, fd: int, held: int, size: int, *, whole: bool) -> None:
        if held >= size:
            return
        if answer.left <= 0:
            answer.behind[path] = size
            return
        data = os.pread(fd, min(size - held, answer.left), held)
        reached = not data or held + len(data) >= size
        end = len(data)
        if whole:
            newline = data.rfind(b"\n") + 1
            if newline or (reached and len(data) < LONG_LINE):
                end = newline
        if end:
            answer.add(path, held, memoryview(data)[:end])
        if not reached:
            answer.behind[path] = size

    def _records(self, answer: SyncAnswer, request: SyncRequest) -> None:
        for path in courier_protocol.RECORDS:
            try:
                data = self._local.read(path, 0, courier_protocol.LARGEST_RECORD)
            except OSError:
                data = b""  # user code replaced it with something else
            known = request.records.get(path)
            if not data:
                if known is not None:
                    answer.gone.append(path)
            elif courier_protocol.tag(data) != known:
                answer.records.append((path, courier_protocol.tag(data), len(data)))
                answer.data.append(data)

    def _size(self, path: str) -> int:
        try:
            return self._local.size(path)
        except OSError:
            return 0

    def _exists(self, path: str) -> bool:
        """Whether a file exists: one beyond the limit of mirrored files is not gone."""
        try:
            os.close(self._local.open(path))
        except OSError:
            return False
        return True


class _Watch:
    """Waits for a change. If the kernel has no inotify watches left, only for the given time."""

    def __init__(self, directory: str, client: Optional[int]) -> None:
        self._directory = directory
        self._client = client
        self._inotify: Optional[inotify.Inotify] = None

    def begin(self) -> None:
        """From now on no change is missed."""
        with contextlib.suppress(OSError):
            self._inotify = inotify.Inotify()
            for folder in ("", layout.LOG, layout.METRICS):
                self._inotify.add(os.path.join(self._directory, folder), _EVENTS)

    def wait(self, seconds: float) -> None:
        poll = select.poll()
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        if self._client is not None:
            poll.register(self._client, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(int(seconds * 1000))]
        if self._client is not None and self._client in ready:
            raise ClientGone
        if ready and self._inotify is not None:
            time.sleep(BATCH_SECONDS)
            self._inotify.read()

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._inotify is not None:
            self._inotify.close()


def _held(value: Any) -> Tuple[int, str]:
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int:
        raise courier_protocol.Malformed("a sync with an invalid size or tag")
    return value[0], courier_protocol.text(value[1])


def _mark(value: Any) -> Mark:
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(courier_protocol.grows(path) for path in files):
        raise courier_protocol.Malformed("an invalid mark")
    return Mark(
        courier_protocol.number(value.get("journal")),
        {path: courier_protocol.number(size) for path, size in files.items()},
    )


def _names(fd: int) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for count, entry in enumerate(entries):
            if count >= ENTRIES:
                return
            yield entry.name


def _by_number(name: str) -> Tuple[int, str]:
    """Sort key: names begin with the number of the segment or of the generation."""
    digits = name.split(".")[0].split("-")[0]
    return (int(digits) if digits.isdigit() and len(digits) < 19 else -1), name


def _by_urgency(path: str) -> Tuple[bool, str]:
    """Sort key: metrics are small and more urgent than the log."""
    return not path.startswith(layout.METRICS), path


def _continues(fd: int, held: int, tail: str) -> bool:
    """Whether the content that the client has is still the beginning of this file."""
    begin = max(0, held - courier_protocol.TAIL)
    try:
        data = os.pread(fd, held - begin, begin)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.EOVERFLOW):
            return False
        raise
    return len(data) == held - begin and courier_protocol.tag(data) == tail
