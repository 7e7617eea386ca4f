"""A server that speaks the protocol over real sockets, as a test tells it to, and a clock that a test turns by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve

from tileweave.protocol import (
    FRAME_BYTES_MAX,
    Lease,
    Limits,
    Message,
    Panel,
    Reassembly,
    Result,
    Term,
    Welcome,
    chunks,
    decode,
    encode,
)

DEADLINE_S = 20.0  # a condition that has not come by then never will
M = TypeVar("M")

LIMITS = Limits(
    frame_bytes_max=FRAME_BYTES_MAX,
    panel_bytes_max=64 << 20,
    result_bytes_max=64 << 20,
    leases_max=8,
    ping_s=2.0,
    silence_s_max=6.0,
)


class HandClock:
    """Stands still until `advance`; or, in `run`, jumps to the next sleeper whenever every task waits."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time_s + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        self.time_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self.time_s:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)

    async def run(self, work: Awaitable[M]) -> M:
        """The result of `work`, whose only waiting is on this clock and on tasks of this loop."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done():
                assert self._sleepers, "every task waits, and none for the clock"
                self.advance(max(0.0, self._sleepers[0][0] - self.time_s))
        return task.result()

    async def turn_until(self, work: Awaitable[M], step_s: float = 0.25) -> M:
        """Turns the clock while real sockets do their part, until `work` is done."""
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(DEADLINE_S):
            while not task.done():
                self.advance(step_s)
                await asyncio.wait([task], timeout=0.002)
        return task.result()


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.seen: list[Message] = []

    async def expect(self, kind: type[M]) -> M:
        """The next message of that kind; others before it are kept in `seen`."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message, _ = await self.receive()
                if isinstance(message, kind):
                    return message

    async def receive(self) -> tuple[Message, memoryview]:
        frame = await self.connection.recv()
        assert isinstance(frame, bytes)
        message, payload = decode(frame)
        self.seen.append(message)
        return message, payload

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        await self.connection.send(encode(message, payload))

    async def welcome(self, limits: Limits = LIMITS, secret: str | None = None) -> None:
        await self.send(Welcome(device="d-1", name="quiet-otter", limits=limits, secret=secret))

    async def panel(self, panel: str, rows: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Sends a panel of (rows, k) float32."""
        data = memoryview(np.ascontiguousarray(rows)).cast("B")
        for offset, length in chunks(len(data)):
            head = Panel(panel=panel, rows=rows.shape[0], columns=rows.shape[1], offset=offset, size=len(data))
            await self.send(head, data[offset : offset + length])

    async def result(self) -> tuple[int, bytes]:
        """(lease, bytes) of the next whole result."""
        whole = Reassembly(LIMITS.result_bytes_max)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message, payload = await self.receive()
                if isinstance(message, Result) and whole.add(message.offset, message.size, payload):
                    return message.lease, bytes(whole.data)


def tile(lease: int, m: int, n: int, k: int, batch: int = 1, a: str = "a", b: str = "b") -> Lease:
    return Lease(lease=lease, job="job-1", batch=batch, m=m, n=n, terms=[Term(k=k, a=a, b=b)], deadline_s=60.0)


class TestServer:
    """Listens on a free port; every connection waits in `peers` until a test takes it."""

    __test__ = False

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.url = ""
        self._server: Server | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[TestServer]:
        over = asyncio.Event()

        async def handle(connection: ServerConnection) -> None:
            assert connection.request is not None and connection.request.path == "/ws/device"
            self.peers.put_nowait(Peer(connection))
            waits = [asyncio.ensure_future(over.wait()), asyncio.ensure_future(connection.wait_closed())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

        options = {"compression": None, "max_size": FRAME_BYTES_MAX, "ping_interval": None, "close_timeout": 0.2}
        async with serve(handle, "127.0.0.1", 0, **options) as server:  # type: ignore[arg-type]
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            try:
                yield self
            finally:
                over.set()

    async def peer(self) -> Peer:
        async with asyncio.timeout(DEADLINE_S):
            return await self.peers.get()


@pytest.fixture
def hand_clock() -> HandClock:
    return HandClock()


@pytest.fixture
def in_server() -> Callable[[Callable[[TestServer], Awaitable[None]]], None]:
    """Runs a coroutine function against a listening TestServer."""

    def run(test: Callable[[TestServer], Awaitable[None]]) -> None:
        async def main() -> None:
            async with TestServer().listening() as server:
                await test(server)

        asyncio.run(main())

    return run


@pytest.fixture
def make_tile() -> Callable[..., Lease]:
    return tile
