"""A running job as its watchers see it: one loop for each watched job, however many pages watch.

The idea: the loop reads the store and the live hash twice a second and sends the job's JSON when it has changed; steps
and samples come over pub/sub as the coordinator publishes them. Each watcher has a short queue that loses its oldest
event when the page reads too slowly, since the next event says more. The last event of a job is its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from backend.stores.jobs import ENDED
from backend.switchboard.streams import Switchboard, SwitchboardError

POLL_S = 0.5
FORWARDED = ("step", "sample", "gemm", "lease_lost")

log = structlog.get_logger("gateway")
Event = tuple[str, dict[str, Any]]
Render = Callable[[str], Awaitable[dict[str, Any] | None]]


class Watcher:
    """One page's queue. `get` gives None after the job's last event."""

    def __init__(self, events_max: int) -> None:
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue(events_max)

    def put(self, event: Event | None) -> None:
        """Adds an event, losing the oldest where the queue is full."""
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(event)

    async def get(self) -> Event | None:
        """The next event."""
        return await self._queue.get()


class TooManyWatchers(Exception):
    """No more event streams now."""


class Live:
    """All watchers of this gateway. `render` gives a job's JSON, None for no such job."""

    def __init__(
        self, switchboard: Switchboard, render: Render, streams_max: int, per_address_max: int, events_max: int
    ) -> None:
        self._switchboard = switchboard
        self._render = render
        self._streams_max = streams_max
        self._per_address_max = per_address_max
        self._events_max = events_max
        self._watchers: dict[str, set[Watcher]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._addresses: Counter[str] = Counter()

    @asynccontextmanager
    async def watch(self, job: str, address: str) -> AsyncGenerator[Watcher, None]:
        """A queue of the job's events from now on. Raises TooManyWatchers."""
        if sum(self._addresses.values()) >= self._streams_max or self._addresses[address] >= self._per_address_max:
            raise TooManyWatchers
        self._addresses[address] += 1
        watcher = Watcher(self._events_max)
        watchers = self._watchers.setdefault(job, set())
        watchers.add(watcher)
        polled = job in self._tasks
        if not polled:
            self._tasks[job] = [asyncio.create_task(self._poll(job)), asyncio.create_task(self._forward(job))]
        try:
            if polled and (first := await self._render(job)) is not None:
                watcher.put(("job", first))  # others have been told already
            yield watcher
        finally:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
            watchers.discard(watcher)
            if not watchers:
                self._stop(job)

    def close(self) -> None:
        """Ends all loops."""
        for job in list(self._tasks):
            for watcher in self._watchers.get(job, ()):
                watcher.put(None)
            self._stop(job)

    def _stop(self, job: str) -> None:
        self._watchers.pop(job, None)
        for task in self._tasks.pop(job, []):
            task.cancel()

    def _tell(self, job: str, event: Event | None) -> None:
        for watcher in self._watchers.get(job, ()):
            watcher.put(event)

    async def _poll(self, job: str) -> None:
        last: dict[str, Any] | None = None
        while True:
            now = await self._render(job)
            if now is None:
                break
            # Clocks alone are not a change.
            facts = {name: value for name, value in now.items() if name not in ("elapsed_s", "eta_s")}
            if facts != last:
                last = facts
                self._tell(job, ("job", now))
            if now["state"] in ENDED:
                break
            await asyncio.sleep(POLL_S)
        self._tell(job, None)

    async def _forward(self, job: str) -> None:
        with suppress(SwitchboardError):  # the polled job event goes on; pages fetch the steps they miss
            async for event, data in self._switchboard.subscribe_live(job):
                if event in FORWARDED:
                    self._tell(job, (event, data))
