"""Group commit: changes of several runs share transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker.errors import StoreError
from stoker.store import Store
from stoker.store.rows import Change

Batch = list[tuple[Sequence[Change], "asyncio.Future[None]"]]


class Committer:
    """`commit` returns once the changes are durable, and raises what the store raised. Changes that arrive while a
    transaction is written share the next one: many small runs cost few transactions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Batch = []
        self._wake = asyncio.Event()

    async def commit(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, future))
        self._wake.set()
        await future

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, []
            if not batch:
                continue
            try:
                await asyncio.to_thread(
                    self._store.apply, [change for changes, _ in batch for change in changes]
                )
            except StoreError as exc:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(exc)
                raise
            except Exception:  # noqa: BLE001 - one run's rows cannot be stored: only that run fails
                await self._one_by_one(batch)
                continue
            for _, future in batch:
                if not future.done():
                    future.set_result(None)

    async def _one_by_one(self, batch: Batch) -> None:
        for changes, future in batch:
            try:
                await asyncio.to_thread(self._store.apply, list(changes))
            except StoreError:
                raise
            except Exception as exc:  # noqa: BLE001 - any error goes to the caller that waits
                if not future.done():
                    future.set_exception(exc)
            else:
                if not future.done():
                    future.set_result(None)
