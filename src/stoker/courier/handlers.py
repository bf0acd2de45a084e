"""The courier's requests. The caller is authenticated; content that user code left in the directory is not trusted."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from stoker.courier import listing, recovery
from stoker.courier.buffers import Busy
from stoker.courier.jobs import Jobs
from stoker.courier.manifest import is_digest
from stoker.courier.placement import Incomplete, TreePlacement, split
from stoker.courier.shared_volume import SharedVolume
from stoker.courier.staging import Damaged, Piece, Staging
from stoker.courier.sync import ClientGone, Sync, SyncRequest
from stoker.linux.descriptors import Closing
from stoker.task import courier_protocol, formats, layout
from stoker.task.courier_protocol import Bytes, Malformed
from stoker.task.local_directory import LocalTaskDir, UnsafePath
from stoker.task.safe_open import TooMany, open_beneath

MOST_PIECES = 10_000
MOST_DIGESTS = 10_000
MOST_ENTRIES = 1_000_000
MOST_SKIPPED = 1000


class Reply(NamedTuple):
    header: Dict[str, Any]
    data: Sequence[Bytes] = ()
    status: int = 200


class Request(NamedTuple):
    """One request, while it is answered."""

    header: Dict[str, Any]
    data: memoryview
    lend: Callable[[int], memoryview]
    """Gives a buffer that is valid until the answer is sent."""
    client: Optional[int] = None
    """A descriptor that becomes readable when the client has disconnected."""


class Handlers:
    """May be used from any thread."""

    def __init__(self, directory: str, *, shared: Optional[str] = None, job_wait: float = 20.0) -> None:
        """`shared`: the volume for checkpoints that the tasks of one server share, if there is one."""
        self._directory = directory
        self._shared = SharedVolume(shared) if shared else None
        self._local = LocalTaskDir(directory)
        self._sync = Sync(directory)
        self._staging = Staging(directory, lasting=shared is not None)
        self._placing = TreePlacement(directory, self._staging)
        self._jobs = Jobs(wait=job_wait)
        self._order_lock = threading.Lock()
        self._newest_order = -1
        """The sequence number of the newest order. A delayed older order does not replace it."""
        self._verbs: Dict[str, Callable[[Request], Reply]] = {
            courier_protocol.SYNC: self._changes,
            courier_protocol.ORDER: self._order,
            courier_protocol.READ: self._read,
            courier_protocol.MISSING: self._missing,
            courier_protocol.BLOB: self._blob,
            courier_protocol.PLACE: self._place,
            courier_protocol.WALK: self._walk,
            courier_protocol.DISCARD: self._discard,
            courier_protocol.SETTLE: self._settle,
            courier_protocol.PARTS: self._parts,
            courier_protocol.SALVAGE: self._salvage,
        }

    def recover(self) -> None:
        self._staging.recover()

    def handle(self, path: str, call: Request) -> Reply:
        """The reply to a request. Raises nothing but Gone (see sync)."""
        verb = self._verbs.get(path)
        if verb is None:
            return Reply({"error": f"no such verb: {path[:40]}"}, status=404)
        try:
            return verb(call)
        except ClientGone:
            raise
        except Malformed as exc:
            return Reply({"error": str(exc)}, status=400)
        except TooMany as exc:
            return Reply({"error": str(exc)}, status=413)
        except Damaged as exc:
            return Reply({"error": str(exc), "damaged": True}, status=422)
        except Incomplete as exc:
            return Reply({"error": str(exc), "incomplete": True}, status=422)
        except Busy as exc:
            return Reply({"error": str(exc)}, status=503)
        except OSError as exc:
            unsafe = isinstance(exc, UnsafePath)
            text = exc.strerror or str(exc)
            return Reply({"error": text, "errno": exc.errno or errno.EIO, "unsafe": unsafe}, status=422)
        except Exception as exc:  # noqa: BLE001 - a bug in this program is reported to the server
            return Reply({"error": f"{type(exc).__name__}: {exc}"}, status=500)

    # -- short requests --------------------------------------------------------------------------------------

    def _changes(self, call: Request) -> Reply:
        answer = self._sync.wait(SyncRequest.parse(call.header), call.client)
        return Reply(answer.header(), answer.data)

    def _order(self, call: Request) -> Reply:
        raw = call.header.get("order")
        try:
            order = formats.Order.from_json(raw if isinstance(raw, dict) else {})
        except TypeError as exc:
            raise Malformed(f"not an order: {exc}") from exc
        with self._order_lock:
            if order.seq < self._newest_order:
                return Reply({"stale": self._newest_order})
            self._local.write_order(order)
            self._newest_order = order.seq
        return Reply({})

    def _read(self, call: Request) -> Reply:
        path = courier_protocol.text(call.header.get("path"))
        offset = courier_protocol.number(call.header.get("offset"))
        with Closing(self._open(path)) as fd:
            size = os.fstat(fd).st_size
            view = call.lend(
                min(
                    courier_protocol.number(call.header.get("limit")),
                    courier_protocol.RANGE,
                    max(0, size - offset),
                )
            )
            done = 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return Reply({"size": size}, [view[:done]])

    def _open(self, path: str) -> int:
        if self._shared is not None and path.startswith(f"{layout.SHARED}/"):
            return self._shared.open(path[len(layout.SHARED) + 1 :])
        return self._local.open(path)

    def _discard(self, call: Request) -> Reply:
        path = courier_protocol.text(call.header.get("path"))
        folder, name = split(path)
        if self._shared is not None and path.startswith(f"{layout.SHARED}/"):
            self._shared.discard(path[len(layout.SHARED) + 1 :])
            return Reply({})
        with contextlib.suppress(FileNotFoundError):
            parent = open_beneath(self._directory, folder)
            trash = self._staging.trash(path)
            with Closing(parent):
                trash.throw(parent, name)
            trash.empty()
        return Reply({})

    def _parts(self, call: Request) -> Reply:
        return Reply({"names": [] if self._shared is None else self._shared.names()})

    # -- content ---------------------------------------------------------------------------------------------

    def _missing(self, call: Request) -> Reply:
        path, manifest = _target(call)
        replace = call.header.get("replace") is True
        if self._placing.settled(path, manifest, replace=replace):
            return Reply({"settled": True})
        digests = [_digest(raw) for raw in courier_protocol.strings(call.header.get("digests"), MOST_DIGESTS)]
        complete, begun = self._staging.here(path, manifest, digests)
        return Reply({"settled": False, "complete": complete, "begun": begun})

    def _blob(self, call: Request) -> Reply:
        path, manifest = _target(call)
        split(path)
        if "verify" in call.header:
            digest, size = _digest(call.header["verify"]), courier_protocol.number(call.header.get("size"))
            return self._job(call, lambda: self._verified(path, manifest, digest, size))
        pieces = _pieces(call.header.get("pieces"))
        if sum(piece.length for piece in pieces) != len(call.data):
            raise Malformed("the lengths of the pieces do not match the data")
        complete, begun = self._staging.receive(path, manifest, pieces, call.data)
        return Reply({"complete": complete, "begun": begun})

    def _verified(self, path: str, manifest: str, digest: str, size: int) -> Dict[str, Any]:
        self._staging.verify(path, manifest, digest, size)
        return {}

    def _place(self, call: Request) -> Reply:
        path, manifest = _target(call)
        replace = call.header.get("replace") is True

        def work() -> Dict[str, Any]:
            self._placing.place(path, manifest, replace=replace)
            return {}

        return self._job(call, work)

    # -- long requests ---------------------------------------------------------------------------------------

    def _walk(self, call: Request) -> Reply:
        path, after = (
            courier_protocol.text(call.header.get("path")),
            courier_protocol.text(call.header.get("after")),
        )
        most = courier_protocol.number(call.header.get("max_entries"), MOST_ENTRIES)
        skip = frozenset(courier_protocol.strings(call.header.get("skip", []), MOST_SKIPPED))
        return self._job(call, lambda: listing.page(self._directory, path, after, most, skip))

    def _settle(self, call: Request) -> Reply:
        generation = courier_protocol.number(call.header.get("generation"))
        return self._job(call, lambda: recovery.settle(self._directory, generation))

    def _salvage(self, call: Request) -> Reply:
        generation, name = (
            courier_protocol.number(call.header.get("generation")),
            courier_protocol.text(call.header.get("part")),
        )
        carried = call.header.get("carried")
        if not isinstance(carried, list) or len(carried) > MOST_ENTRIES:
            raise Malformed("not a list of numbers, or too long")
        numbers = [courier_protocol.number(number, 10**9) for number in carried]
        if self._shared is None:
            raise FileNotFoundError(errno.ENOENT, "this pod has no shared volume", name)
        directory = self._shared.path(name)
        return self._job(call, lambda: recovery.salvage(directory, generation, numbers))

    def _job(self, call: Request, work: Callable[[], Dict[str, Any]]) -> Reply:
        result = self._jobs.result(courier_protocol.text(call.header.get("job"), 64), work)
        return Reply({"running": True}) if result is None else Reply({"running": False, **result})


def _target(call: Request) -> Tuple[str, str]:
    return courier_protocol.text(call.header.get("path")), _digest(call.header.get("manifest"))


def _digest(value: Any) -> str:
    if not is_digest(value):
        raise Malformed(f"not a SHA-256 digest: {str(value)[:80]!r}")
    return str(value)


def _pieces(value: Any) -> List[Piece]:
    if not isinstance(value, list) or len(value) > MOST_PIECES:
        raise Malformed("not a list of pieces, or too long")
    found = []
    for raw in value:
        if not isinstance(raw, list) or len(raw) != 4:
            raise Malformed("a piece is a digest, a size, an offset and a length")
        piece = Piece(
            _digest(raw[0]),
            courier_protocol.number(raw[1]),
            courier_protocol.number(raw[2]),
            courier_protocol.number(raw[3]),
        )
        if piece.offset + piece.length > piece.size:
            raise Malformed("a piece exceeds the size of its content")
        found.append(piece)
    return found
