"""What this gateway tells the other processes: one queue, one sender, one stream entry for each stream and turn.

The idea: connections put single messages, the sender takes all that wait and sends them together, in order; under load
a hundred results cost one round trip. While Redis is away the queue fills and `put` waits, so that devices are simply
read more slowly and nothing is lost.
"""

from __future__ import annotations

import asyncio

import structlog

from backend.switchboard.messages import SwitchMessage
from backend.switchboard.streams import Switchboard, SwitchboardError

QUEUED_MAX = 10_000
BATCH_MAX = 512
RETRY_S = 1.0  # after the switchboard has given up its own retries, or Redis is full

log = structlog.get_logger("gateway")


class Courier:
    """Sends messages to streams in the order in which they were put."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._queue: asyncio.Queue[tuple[str, SwitchMessage]] = asyncio.Queue(QUEUED_MAX)

    async def put(self, stream: str, message: SwitchMessage) -> None:
        """Queues a message; waits while the queue is full."""
        await self._queue.put((stream, message))

    def offer(self, stream: str, message: SwitchMessage) -> None:
        """Queues a message that may be lost, since a later one says the same."""
        if not self._queue.full():
            self._queue.put_nowait((stream, message))

    async def run(self) -> None:
        """Sends for ever."""
        while True:
            batches: dict[str, list[SwitchMessage]] = {}
            stream, message = await self._queue.get()
            batches.setdefault(stream, []).append(message)
            count = 1
            while count < BATCH_MAX and not self._queue.empty():
                stream, message = self._queue.get_nowait()
                batches.setdefault(stream, []).append(message)
                count += 1
            await self._send(batches)
            for _ in range(count):
                self._queue.task_done()

    async def flush(self, seconds_max: float) -> None:
        """Waits until all that was put has been sent, at most so long."""
        try:
            async with asyncio.timeout(seconds_max):
                await self._queue.join()
        except TimeoutError:
            log.warning("messages left unsent", count=self._queue.qsize())

    async def _send(self, batches: dict[str, list[SwitchMessage]]) -> None:
        while True:
            try:
                await self._switchboard.send_many(batches)
            except SwitchboardError as error:
                log.error("cannot send to Redis, trying again", error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return
