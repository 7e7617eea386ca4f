"""Server-sent events of a job: what `live.py` queues for one watcher, as text; a heartbeat when nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from fastapi import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from backend.gateway.live import Live, TooManyWatchers, Watcher

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """The answer; watches for as long as it is being sent, however that ends."""

    def __init__(self, live: Live, job: str, address: str, heartbeat_s: float) -> None:
        super().__init__(_nothing(), media_type="text/event-stream", headers=HEADERS)
        self._live = live
        self._job = job
        self._address = address
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises HTTPException 503, before anything is sent, where too many watch already."""
        try:
            async with self._live.watch(self._job, self._address) as watcher:
                self.body_iterator = _lines(watcher, self._heartbeat_s)
                await super().__call__(scope, receive, send)
        except TooManyWatchers:
            raise HTTPException(503, "too many pages are watching; look again later", {"Retry-After": "10"}) from None


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


async def _lines(watcher: Watcher, heartbeat_s: float) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            async with asyncio.timeout(heartbeat_s):
                event = await watcher.get()
        except TimeoutError:
            yield b": nothing new\n\n"
            continue
        if event is None:
            return
        name, data = event
        # One line: JSON has no raw line breaks.
        yield b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
