"""The remote task directory: reads come from the mirror, everything else goes to the courier."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from stoker.engine.kubernetes.courier_client.blocking_calls import BlockingCalls, Pauses
from stoker.engine.kubernetes.courier_client.client import Courier, CourierGone, CourierLost
from stoker.engine.kubernetes.courier_client.mirror import Mirror
from stoker.engine.kubernetes.courier_client.upload import Uploader
from stoker.task import courier_protocol, formats, layout
from stoker.task.local_directory import LocalTaskDir

SMALL = 64 << 10
"""Bytes of an answer up to which it is written to the mirror in the event loop's thread."""
_WRITERS = ThreadPoolExecutor(2, thread_name_prefix="mirror")
"""For larger ones. Not the loop's own threads: all of those may be waiting for what is written here."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PARTS = 100_000
_JOURNAL = 1 << 30
"""The most parts on a shared volume, and bytes of the journal of one, that are accepted."""


class RemoteTaskDir:
    """Implements stoker.task.directory.SharingTaskDir. One per task and server: keep it, do not create one per call.

    Reads come from the mirror and may be done in any thread. Everything else blocks and is called from worker threads,
    never from the loop's. A courier that does not answer is tried again for `patience` seconds, then CourierLost.
    """

    def __init__(
        self,
        courier: Courier,
        mirror: Mirror,
        loop: asyncio.AbstractEventLoop,
        *,
        patience: float = 60.0,
        shares: bool = False,
    ) -> None:
        """`shares`: its checkpoints are on a volume together with those of other tasks."""
        self.shares = shares
        self.shared_folder: str | None = None
        self._courier = courier
        self._mirror = mirror
        self._calls = BlockingCalls(courier, loop, patience)
        self._local = LocalTaskDir(str(mirror.root))

    @property
    def turns(self) -> None:
        return None

    def abandon(self, reason: str) -> None:
        """The pod is proven gone: from now on calls to its courier fail at once (CourierGone). What has arrived can
        still be read."""
        self._calls.gone = reason

    # -- from the mirror -------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        return self._local.root

    def exists(self) -> bool:
        """Whether reads can be relied on: the mirror has been up to date since this object was created, or it has
        the order. False before the courier's first answer."""
        return self._mirror.synced or self._local.order() is not None

    def info(self) -> formats.TaskInfo | None:
        return self._local.info()

    def order(self) -> formats.Order | None:
        return self._local.order()

    def status(self) -> formats.Status | None:
        return self._local.status()

    def journal(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        return self._local.journal(offset)

    def lines(self, path: str, offset: int, limit: int = 4 << 20) -> tuple[list[dict[str, Any]], int]:
        return self._local.lines(path, offset, limit)

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        return self._local.read(path, offset, limit)

    def size(self, path: str) -> int:
        return self._local.size(path)

    # -- through the courier ---------------------------------------------------------------------------------

    def write_order(self, order: formats.Order) -> None:
        value = order.to_json()
        answer, _ = self._calls.call(courier_protocol.ORDER, {"order": value})
        if "stale" in answer:
            raise OSError(
                errno.ESTALE, f"order {order.seq} comes after {str(answer['stale'])[:20]}", self.root
            )
        self._mirror.record(layout.ORDER, json.dumps(value, separators=(",", ":")).encode())

    def write_secrets(self, values: Mapping[str, str]) -> None:
        """Not needed: they are in the pod's Secret, which exists before the pod."""

    def forget_secrets(self) -> None:
        """Not needed: they are deleted with the pod's Secret."""

    def place(
        self, manifest: bytes, path: str, blob: Callable[[str], BinaryIO], *, replace: bool = False
    ) -> None:
        Uploader(self._calls, manifest, path, blob, replace=replace).run()

    def walk(self, path: str, *, max_entries: int, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after, seen = "", 0
        while True:
            page = self._calls.job(
                courier_protocol.WALK,
                {"path": path, "after": after, "max_entries": max_entries - seen, "skip": list(skip)},
            )
            entries = page.get("entries")
            seen += _number(page.get("seen"))
            if not isinstance(entries, list) or len(found) + len(entries) > max_entries or seen > max_entries:
                raise ValueError(f"more than {max_entries} entries")
            found += [_entry(raw) for raw in entries]
            if page.get("after") is None:
                return found
            if page["after"] == after or not isinstance(page["after"], str):
                raise CourierLost("it lists the same entries again")
            after = page["after"]

    def fetch(self, path: str, offset: int, limit: int) -> bytes:
        pieces: list[bytes] = []
        while limit > 0:
            wanted = min(limit, courier_protocol.RANGE)
            _, data = self._calls.call(
                courier_protocol.READ, {"path": path, "offset": offset, "limit": wanted}
            )
            if len(data) > wanted:
                raise CourierLost(f"it sent {len(data)} bytes instead of {wanted}")
            pieces.append(bytes(data))
            offset, limit = offset + len(data), limit - len(data)
            if len(data) < wanted:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def discard(self, path: str) -> None:
        self._calls.call(courier_protocol.DISCARD, {"path": path})

    def settle(self, generation: int) -> None:
        self._calls.job(courier_protocol.SETTLE, {"generation": generation})
        if not self.catch_up(self._calls.patience):
            raise CourierLost("the settled files have not arrived")

    def parts(self) -> tuple[list[layout.SharedPart], list[str]]:
        if not self.shares:
            return [], []
        answer, _ = self._calls.call(courier_protocol.PARTS, {})
        try:
            names = courier_protocol.strings(answer.get("names"), _PARTS)
        except courier_protocol.Malformed as exc:
            raise CourierLost(f"invalid answer: {exc}") from exc
        parts = [part for part in map(layout.part_of, names) if part is not None]
        return parts, [name for name in names if layout.is_run(name)]

    def salvage(
        self, part: layout.SharedPart, generation: int, carried: Sequence[int]
    ) -> list[dict[str, Any]]:
        asked = {"part": part.name, "generation": generation, "carried": sorted(carried)}
        try:
            self._calls.job(courier_protocol.SALVAGE, asked)
        except (CourierLost, CourierGone, FileNotFoundError):
            raise
        except OSError as exc:
            # A retry would meet the same error, so it must not look like a courier that does not answer.
            raise OSError(errno.ENOTRECOVERABLE, exc.strerror or str(exc), part.path) from exc
        return [entry for entry in self._journal_of(part) if entry.get("generation") == generation]

    def _journal_of(self, part: layout.SharedPart) -> Iterator[dict[str, Any]]:
        rest, at = b"", 0
        while data := self.fetch(f"{part.path}/{layout.JOURNAL}", at, courier_protocol.RANGE):
            at += len(data)
            lines, used = formats.split_lines(rest + data)
            yield from formats.parse_lines(lines)
            rest = (rest + data)[used:]
            if at > _JOURNAL:
                raise CourierLost(f"the journal of {part.name} is too long")

    def catch_up(self, timeout: float) -> bool:
        pauses = Pauses(timeout)
        end = time.monotonic() + timeout
        mark: Any = None
        while True:
            left = max(0.1, end - time.monotonic())
            try:
                _, mark = self._calls.wait(self.sync(wait=0.0, final=True, mark=mark, timeout=left), left + 1)
            except CourierGone:
                return False
            except (OSError, ValueError):
                mark = None
                if not pauses.pause():
                    return False
                continue
            if mark is None or time.monotonic() >= end:
                return mark is None

    # -- helpers ---------------------------------------------------------------------------------------------

    async def sync(
        self, *, wait: float, final: bool = False, mark: Any = None, timeout: float = 20.0
    ) -> tuple[bool, Any]:
        """Bring what is new into the mirror. Returns whether there was anything, and the mark to continue with (None:
        that was all). Called in the loop. Raises CourierLost, Malformed, OSError."""
        request = self._mirror.request(wait=wait, final=final, mark=mark)
        header, data = await self._courier.call(courier_protocol.SYNC, request, timeout=wait + timeout)
        if len(data) <= SMALL:
            changed = self._mirror.apply(header, data)
        else:
            loop = asyncio.get_running_loop()
            changed = await loop.run_in_executor(_WRITERS, self._mirror.apply, header, data)
        return changed, header.get("mark")

    def list(self, path: str = "") -> list[str]:
        return self._local.list(path)


def _number(value: Any) -> int:
    try:
        return courier_protocol.number(value)
    except courier_protocol.Malformed as exc:
        raise CourierLost(f"invalid answer: {exc}") from exc


def _entry(raw: Any) -> dict[str, Any]:
    """The courier's entry for a file or link, with its shape checked."""
    if not isinstance(raw, dict):
        raise CourierLost("it lists an entry that is not a file")
    try:
        path = courier_protocol.text(raw.get("path"))
        if "link" in raw:
            return {"path": path, "link": courier_protocol.text(raw["link"])}
        size, mode = (
            courier_protocol.number(raw.get("size")),
            courier_protocol.number(raw.get("mode"), 0o177777),
        )
        digest = courier_protocol.text(raw.get("sha256"), 64)
    except courier_protocol.Malformed as exc:
        raise CourierLost(f"it lists an entry that is not a file: {exc}") from exc
    if _DIGEST.fullmatch(digest) is None:
        raise CourierLost("it lists a file without a hash")
    mtime = raw.get("mtime")  # a courier of an earlier version does not send it
    known = float(mtime) if isinstance(mtime, (int, float)) else 0.0
    return {"path": path, "size": size, "mode": mode, "sha256": digest, "mtime": known}
