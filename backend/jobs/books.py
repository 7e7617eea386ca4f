"""The coordinator's one writer: commits to SQLite and copies verified tiles into C, in batches, in one thread.

The idea: whatever the event loop hands over during one commit becomes the next batch, so that a burst of tiles costs a
few transactions. Order is kept: a step closes after the tiles before it, and the job ends after all else. The commit
comes first and the copy second; both may be repeated. The answers go back to the event loop in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from backend.coordinator.events import Store
from backend.jobs.maps import Maps
from backend.jobs.products import Product
from backend.stores.ledger import Grant, Ledger
from tileweave.conversions import floats
from tileweave.protocol.elements import ResultDtype, result_bytes
from tileweave.script.wire import Region

BATCH_MAX = 1024


class Books:
    """The store thread of one job's epoch. `product(gemm)` takes the tiles, whose elements are `dtype`."""

    def __init__(
        self,
        ledger: Ledger,
        job: str,
        epoch: int,
        slots: Maps,
        product: Callable[[int], Product | None],
        dtype: ResultDtype,
    ) -> None:
        self._ledger = ledger
        self._job = job
        self._epoch = epoch
        self._slots = slots
        self._product = product
        self._dtype: ResultDtype = dtype
        self._thread = ThreadPoolExecutor(1, "books")
        self._queue: asyncio.Queue[tuple[Store, Callable[[bool], None]] | Callable[[], object]] = asyncio.Queue()

    def store(self, effect: Store, stored: Callable[[bool], None]) -> None:
        """Commit and assemble a tile; `stored(credited)` is called on the event loop."""
        self._queue.put_nowait((effect, stored))

    async def call(self, work: Callable[[], object]) -> None:
        """Runs `work` in the store thread after all that was handed over before; returns when it is done. Raises what
        it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def settle(error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            try:
                work()
            except Exception as error:
                loop.call_soon_threadsafe(settle, error)
            else:
                loop.call_soon_threadsafe(settle, None)

        self._queue.put_nowait(run)
        await done

    async def serve(self) -> None:
        """Runs until cancelled. A tile that cannot be stored raises, and ends the coordinator: its job starts again."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                batch = [await self._queue.get()]
                while not self._queue.empty() and len(batch) < BATCH_MAX:
                    batch.append(self._queue.get_nowait())
                for is_call, group in groupby(batch, key=callable):
                    if is_call:
                        for work in group:
                            assert callable(work)
                            await loop.run_in_executor(self._thread, work)
                    else:
                        tiles = [item for item in group if isinstance(item, tuple)]
                        answers = await loop.run_in_executor(self._thread, self._commit, [tile for tile, _ in tiles])
                        for (_, stored), credited in zip(tiles, answers, strict=True):
                            stored(credited)
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _commit(self, tiles: Sequence[Store]) -> list[bool]:
        grants = [Grant(tile.device, tile.step, tile.gemm, tile.rect, tile.flop, tile.seconds) for tile in tiles]
        answers = self._ledger.commit(self._job, self._epoch, grants, time.time())
        for tile in tiles:
            product = self._product(tile.gemm)
            if product is not None:  # None: the GEMM ended meanwhile, and C may hold something else by now
                slot, count = tile.slot, tile.rect.elements
                region = Region(path=slot.path, offset=slot.offset, size=slot.size)
                data = self._slots.bytes(region, result_bytes(count, self._dtype))
                product.put(floats(data, count, self._dtype), tile.rect)
        return answers
