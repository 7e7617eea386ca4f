"""The volunteer at work: one socket after another around one session, and workers that outlive them.

Tasks: a reader (socket -> session), a writer (session -> socket), a watchdog, and `workers` loops that take tiles from
the session and run the kernel in threads. The event loop itself computes nothing, so the server's PING is answered
while every core multiplies; that PING, not the websocket's own, is the proof of life in both directions: a connection
on which the server has been silent for longer than WELCOME allows is dropped and made anew.

Left out: what to say (session.py) and signals (main.py). However a connection fails, `_again` decides what follows.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from tileweave import __version__
from tileweave.conversions import rounded
from tileweave.protocol import FRAME_BYTES_MAX, Bye, Hello, Profile, ProtocolError, VersionMismatch, encode
from tileweave.volunteer.clock import Clock, SystemClock
from tileweave.volunteer.compute import Kernel, compute, fastest_kernel, flop, installed_kernels
from tileweave.volunteer.emulate import EmulatedSocket, Emulation, Liar, Socket
from tileweave.volunteer.errors import OptionError, VolunteerEnded
from tileweave.volunteer.identity import Identity, load_identity, save_identity
from tileweave.volunteer.session import Session, Task

OPEN_S_MAX = 10.0
CLOSE_S_MAX = 1.0
WATCH_S = 1.0
RETRY_S_FIRST = 0.5
RETRY_S_MAX = 30.0
STEADY_S = 10.0  # a connection that lasted this long starts the back-off anew
MEMORY_SHARE = 0.25  # of the memory that is free now
MEMORY_BYTES_MIN = 64 << 20
FINAL = {"reload", "replaced", "refused"}  # BYE codes after which trying again is of no use


def available_memory_bytes() -> int:
    """The share of this machine's free memory that panels and results may take."""
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return max(MEMORY_BYTES_MIN, int(os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") * MEMORY_SHARE))


@dataclass(frozen=True, slots=True)
class VolunteerOptions:
    """How to volunteer. `identity`: the file to keep the device's identity in, None for a throw-away device."""

    url: str
    name: str = ""
    workers: int = 1
    emulation: Emulation = field(default_factory=Emulation)
    identity: Path | None = None
    memory_bytes: int = field(default_factory=available_memory_bytes)


@dataclass(frozen=True, slots=True)
class VolunteerState:
    """What a person wants to see. `phase`: connecting, connected, waiting (to try again) or ended; `note`: what the
    kernel's choice found."""

    phase: str
    detail: str
    device: str
    name: str
    kernel: str
    note: str
    waiting: int
    computing: int
    unanswered: int
    verdicts: dict[str, int]
    flop: int
    bytes_down: int
    bytes_up: int


def websocket_url(url: str) -> str:
    """`http(s)://host[:port]` -> the address of its device socket. Raises OptionError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"--url: got {url!r}, expected http://host:port or https://host")
    return f"{parts.scheme.replace('http', 'ws')}://{parts.netloc}{parts.path.rstrip('/')}/ws/device"


async def run_volunteer(
    options: VolunteerOptions,
    report: Callable[[VolunteerState], None],
    *,
    stop: asyncio.Event | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    kernel: Kernel | None = None,
) -> None:
    """Volunteers until `stop` is set, calling `report` at every change. Without `kernel` the fastest here is measured.

    Raises OptionError for unusable options and VolunteerEnded when the server wants no reconnect, or nothing here
    multiplies right.
    """
    url = websocket_url(options.url)
    pool = ThreadPoolExecutor(options.workers, thread_name_prefix="tile")
    try:
        if kernel is None:
            loop = asyncio.get_running_loop()
            kernel = await loop.run_in_executor(pool, lambda: fastest_kernel(installed_kernels()))
        volunteer = _Volunteer(options, url, report, kernel, pool, clock or SystemClock(), rng or random.Random())
        await volunteer.run(stop or asyncio.Event())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Volunteer:
    def __init__(
        self,
        options: VolunteerOptions,
        url: str,
        report: Callable[[VolunteerState], None],
        kernel: Kernel,
        pool: ThreadPoolExecutor,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._options, self._url, self._report = options, url, report
        self._kernel, self._pool, self._clock, self._rng = kernel, pool, clock, rng
        self._liar = Liar(options.emulation.lie)
        self._saved = load_identity(options.identity) if options.identity else None
        self._session = Session(_hello(options, kernel, self._saved), options.memory_bytes)
        self._frames = asyncio.Event()  # the session may have a frame to send
        self._tasks = asyncio.Event()  # the session may have a tile to compute
        self._bytes_down = self._bytes_up = 0
        self._phase, self._detail = "connecting", ""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, or until the server wants no reconnect (VolunteerEnded)."""
        workers = [self._worker() for _ in range(self._options.workers)]
        try:
            await _first(self._connections(stop), *workers)
        finally:
            self._show("ended", self._detail)

    # ---- connections -------------------------------------------------------------------------------------------------

    async def _connections(self, stop: asyncio.Event) -> None:
        failures = 0
        while not stop.is_set():
            self._show("connecting", self._detail)
            opened_s, detail = math.inf, "connection closed"
            try:
                socket = await self._open(stop)
                if socket is not None:
                    opened_s = self._clock.now_s()
                    await self._converse(socket, stop)
            except VersionMismatch as error:
                raise VolunteerEnded(f"the server speaks another protocol: {error}") from None
            except (OSError, WebSocketException, ProtocolError) as error:
                detail = str(error) or type(error).__name__
            if stop.is_set():
                return
            bye = self._session.bye if opened_s < math.inf else None
            failures = 1 if self._clock.now_s() - opened_s >= STEADY_S else failures + 1
            wait_s = self._again(bye, failures)
            self._show("waiting", bye.reason or bye.code if bye else detail)
            await _first(self._clock.sleep(wait_s), stop.wait())

    def _again(self, bye: Bye | None, failures: int) -> float:
        """Seconds to wait before the next connection. Raises VolunteerEnded when there should be none."""
        retry_s = bye.retry_s if bye else 0.0
        if bye and bye.code in FINAL and retry_s == 0:
            hint = {
                "reload": "this version is older than the server: update tileweave",
                "replaced": "another volunteer uses the same identity: start this one with --identity none",
                "refused": f"delete {self._options.identity} to join as a new device" if self._saved else "",
            }[bye.code]
            raise VolunteerEnded(": ".join(text for text in ("the server ended it", bye.reason, hint) if text))
        backoff_s = min(RETRY_S_MAX, RETRY_S_FIRST * 2.0 ** min(failures - 1, 16))
        return retry_s + backoff_s * (0.5 + self._rng.random() / 2)

    async def _open(self, stop: asyncio.Event) -> Socket | None:
        """A connected socket, or None when `stop` was set first."""
        opened: list[Socket] = []

        async def dial() -> None:
            connection = await connect(
                self._url, compression=None, max_size=FRAME_BYTES_MAX, ping_interval=None, open_timeout=OPEN_S_MAX,
                close_timeout=None, user_agent_header=f"tileweave/{__version__}",
            )  # fmt: skip
            opened.append(_Frames(connection))

        await _first(dial(), stop.wait())
        if opened and self._options.emulation.slows_link:
            return EmulatedSocket(opened[0], self._options.emulation, self._clock)
        return opened[0] if opened else None

    async def _converse(self, socket: Socket, stop: asyncio.Event) -> None:
        """One connection from HELLO to BYE, whoever ends it."""
        self._session.connected(self._clock.now_s())
        self._frames.set()
        try:
            await _first(self._reader(socket), self._writer(socket), self._watchdog(), stop.wait())
            if stop.is_set():
                await self._leave(socket, Bye(code="done", reason="stopped"))
        except ProtocolError as error:
            await self._leave(socket, Bye(code="protocol", reason=str(error)))
            raise
        finally:
            self._session.disconnected()
            await socket.close()

    async def _leave(self, socket: Socket, bye: Bye) -> None:
        """A last word, if the other side still reads."""
        with suppress(OSError, WebSocketException):
            await asyncio.wait_for(socket.send(encode(bye)), CLOSE_S_MAX)

    async def _reader(self, socket: Socket) -> None:
        while self._session.bye is None:
            frame = await socket.recv()
            self._bytes_down += len(frame)
            self._session.received(frame, self._clock.now_s())
            self._frames.set()
            self._tasks.set()
            self._keep_identity()
            self._show("connected" if self._session.limits else "connecting", "")

    async def _writer(self, socket: Socket) -> None:
        while True:
            frame = self._session.next_frame()
            if frame is None:
                self._frames.clear()
                await self._frames.wait()
            else:
                self._bytes_up += len(frame)
                await socket.send(frame)

    async def _watchdog(self) -> None:
        while (left_s := self._session.silence_left_s(self._clock.now_s())) > 0:
            await self._clock.sleep(min(left_s, WATCH_S))  # WELCOME may shorten the limit meanwhile
        raise TimeoutError("the server fell silent")

    # ---- work --------------------------------------------------------------------------------------------------------

    async def _worker(self) -> None:
        while True:
            task = self._session.next_task()
            if task is None:
                self._tasks.clear()
                await self._tasks.wait()
            else:
                await self._compute(task)
                self._frames.set()
                self._show(self._phase, self._detail)

    async def _compute(self, task: Task) -> None:
        started_s = self._clock.now_s()
        self._show(self._phase, self._detail)
        try:
            loop = asyncio.get_running_loop()
            product, seconds = await loop.run_in_executor(self._pool, compute, self._kernel, task)
        except MemoryError:
            self._session.failed(task, "memory", "no memory for the result")
        except Exception as error:  # whatever the kernel does, the server must hear of it
            self._session.failed(task, "kernel", f"{type(error).__name__}: {error}")
        else:
            self._liar.spoil(product)
            emulated_s = self._options.emulation.compute_s(flop(task), self._options.workers)
            rest_s = emulated_s - (self._clock.now_s() - started_s)
            if rest_s > 0:
                await self._clock.sleep(rest_s)
            result = memoryview(rounded(product, task.lease.dtype))
            self._session.computed(task, result, max(seconds, emulated_s))

    # ---- what others see ---------------------------------------------------------------------------------------------

    def _keep_identity(self) -> None:
        device, secret, _ = self._session.identity
        if self._options.identity is None or device is None or secret is None:
            return
        identity = Identity(device, secret)
        if identity != self._saved:
            save_identity(self._options.identity, identity)
            self._saved = identity

    def _show(self, phase: str, detail: str) -> None:
        self._phase, self._detail = phase, detail
        device, _, name = self._session.identity
        waiting, computing, unanswered = self._session.load
        tally = self._session.tally
        self._report(
            VolunteerState(
                phase, detail, device or "", name, self._kernel.name, self._kernel.note, waiting, computing, unanswered,
                dict(tally.verdicts), tally.flop, self._bytes_down, self._bytes_up,
            )
        )  # fmt: skip


class _Frames:
    """A websocket that carries binary frames only."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, frame: bytes, /) -> None:
        await self._connection.send(frame)

    async def recv(self) -> bytes:
        frame = await self._connection.recv()
        if isinstance(frame, str):
            raise ProtocolError("a text message, expected binary frames")
        return frame

    async def close(self) -> None:
        try:
            # The library's own close_timeout starts only once its write buffer has drained, which a peer that has
            # stopped reading never lets it.
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._connection.close()
        except TimeoutError:
            self._connection.transport.abort()
            await self._connection.wait_closed()


def _hello(options: VolunteerOptions, kernel: Kernel, identity: Identity | None) -> Hello:
    emulated = options.emulation.gflops
    return Hello(
        client=f"tileweave-volunteer/{__version__}",
        name=options.name,
        device=identity.device if identity else None,
        secret=identity.secret if identity else None,
        profile=Profile(
            kernel=kernel.name,
            flops=emulated * 1e9 if emulated else kernel.flops * options.workers,
            memory_bytes=options.memory_bytes,
            workers=options.workers,
            agent=f"{os.uname().sysname} {os.uname().machine}",
        ),
    )


async def _first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs all until the first ends, cancels the others, and raises what the first raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
