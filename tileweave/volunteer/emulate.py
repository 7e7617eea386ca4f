"""Makes this machine behave like a slower one behind a slower link, and, for testing a server, like a liar.

    --emulate gflops=20,down_mbit=100,up_mbit=20,rtt_ms=30,lie=0.2

A link is one lane in each direction: a frame occupies the lane for its bytes over the rate, then flies for half the
round trip; the next frame may start while it flies, so a long round trip delays and does not serialise. The lane's
waiting is passed on to the socket, as a full modem's is. Speed: a tile that took less time than the emulated device
would have needed waits for the rest. `lie` is the share of results that are spoiled by one wrong element, chosen by a
fixed seed: it exists so that a server's checks and its quarantine can be seen at work.

Left out: loss and jitter (TCP turns them into rate and delay), and making anything faster than it is.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tileweave.volunteer.clock import Clock
from tileweave.volunteer.errors import OptionError

if TYPE_CHECKING:  # this module is imported before BLAS is told how many threads to use
    from numpy.typing import NDArray

CLOSE_S_MAX = 2.0  # to let frames in flight land before the socket is closed
LIE_SEED = 0

_RANGES = {
    "gflops": (1e-3, 1e6),
    "down_mbit": (1e-3, 1e6),
    "up_mbit": (1e-3, 1e6),
    "rtt_ms": (0.0, 60_000.0),
    "lie": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Emulation:
    """What to emulate; None leaves that part as it is."""

    gflops: float | None = None
    down_mbit: float | None = None
    up_mbit: float | None = None
    rtt_ms: float | None = None
    lie: float = 0.0

    @property
    def slows_link(self) -> bool:
        """Whether frames have to go through the emulated lanes."""
        return any(value is not None for value in (self.down_mbit, self.up_mbit, self.rtt_ms))

    def compute_s(self, flop: int, workers: int) -> float:
        """Seconds that `flop` take one of `workers` workers sharing the emulated speed; 0 when it is not emulated."""
        return 0.0 if self.gflops is None else flop / (self.gflops * 1e9 / workers)


def parse_emulation(text: str) -> Emulation:
    """Reads `gflops=20,down_mbit=100,…`. Raises OptionError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _RANGES:
            raise OptionError(
                f"--emulate: got {part.strip()!r}, expected key=number with key one of {', '.join(_RANGES)}"
            )
        low, high = _RANGES[key]
        try:
            number = float(value)
        except ValueError:
            raise OptionError(f"--emulate: {key}={value!r} is not a number") from None
        if not low <= number <= high:
            raise OptionError(f"--emulate: {key}={value}, expected {low:g} to {high:g}")
        if key in values:
            raise OptionError(f"--emulate: {key} is given twice")
        values[key] = number
    return Emulation(**values)


class Lane:
    """One direction of a link: `mbit` Mbit/s (None: unlimited) and `delay_s` of flight."""

    def __init__(self, mbit: float | None, delay_s: float) -> None:
        self._byte_s = 0.0 if mbit is None else 8 / (mbit * 1e6)
        self._delay_s = delay_s
        self._free_s = 0.0

    def book(self, size: int, now_s: float) -> tuple[float, float]:
        """(when the lane is free again, when the last of `size` bytes arrives), both on the clock of `now_s`."""
        self._free_s = max(self._free_s, now_s) + size * self._byte_s
        return self._free_s, self._free_s + self._delay_s


class Socket(Protocol):
    """What the volunteer needs of a websocket; raises OSError or the library's own error once it is closed."""

    async def send(self, frame: bytes, /) -> None:
        """Sends one frame, waiting while too much is on its way already."""

    async def recv(self) -> bytes:
        """The next frame."""

    async def close(self) -> None:
        """Closes the socket."""


class EmulatedSocket:
    """A socket behind two lanes."""

    def __init__(self, socket: Socket, emulation: Emulation, clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        delay_s = (emulation.rtt_ms or 0.0) / 2000
        self._down, self._up = Lane(emulation.down_mbit, delay_s), Lane(emulation.up_mbit, delay_s)
        self._arriving: asyncio.Queue[tuple[float, bytes | Exception]] = asyncio.Queue()
        self._leaving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._pumps = [asyncio.create_task(self._pump_down()), asyncio.create_task(self._pump_up())]

    async def send(self, frame: bytes, /) -> None:
        """Returns when the frame has left the lane; it arrives later. A closed socket shows in `recv`."""
        free_s, arrives_s = self._up.book(len(frame), self._clock.now_s())
        await self._until(free_s)
        self._leaving.put_nowait((arrives_s, frame))

    async def recv(self) -> bytes:
        """The next frame, when its last byte has come through the lane."""
        arrives_s, item = await self._arriving.get()
        await self._until(arrives_s)
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        """Lets what is in flight land, then closes the socket."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.join(), CLOSE_S_MAX)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._socket.close()

    async def _pump_down(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                free_s, arrives_s = self._down.book(len(frame), self._clock.now_s())
                await self._until(free_s)
                self._arriving.put_nowait((arrives_s, frame))
        except Exception as error:
            self._arriving.put_nowait((self._clock.now_s(), error))

    async def _pump_up(self) -> None:
        failed = False
        while True:
            arrives_s, frame = await self._leaving.get()
            await self._until(arrives_s)
            try:
                if not failed:
                    await self._socket.send(frame)
            except Exception:  # `recv` of the same socket raises it to the one who can act on it
                failed = True
            finally:
                self._leaving.task_done()

    async def _until(self, time_s: float) -> None:
        wait_s = time_s - self._clock.now_s()
        if wait_s > 0:
            await self._clock.sleep(wait_s)


class Liar:
    """Spoils a share of results, the same ones in every run."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._rng = random.Random(LIE_SEED)

    def spoil(self, product: NDArray[Any]) -> bool:
        """Perhaps makes one element of `product` wrong by more than any rounding. True when it did."""
        if self._rng.random() >= self._share:
            return False
        flat = product.reshape(-1)
        index = self._rng.randrange(flat.size)
        flat[index] += 1 + 2 * abs(flat[index])
        return True
