"""Emulated devices and links, on a clock that jumps: rates hold to a part in a thousand, delay does not serialise."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tileweave.volunteer.emulate import EmulatedSocket, Emulation, Lane, Liar, parse_emulation
from tileweave.volunteer.errors import OptionError


class Wire:
    """The far end of a socket: frames to receive, and those sent with the time they came."""

    def __init__(self, clock: Any, frames: list[bytes]) -> None:
        self.clock, self.frames = clock, frames
        self.sent: list[tuple[float, bytes]] = []
        self.closed = False

    async def send(self, frame: bytes, /) -> None:
        if self.closed:
            raise ConnectionResetError("gone")
        self.sent.append((self.clock.now_s(), frame))

    async def recv(self) -> bytes:
        if not self.frames:
            raise ConnectionResetError("gone")
        return self.frames.pop(0)

    async def close(self) -> None:
        self.closed = True


def test_parses_what_the_command_line_says() -> None:
    assert parse_emulation("gflops=20,down_mbit=100, up_mbit=20,rtt_ms=30") == Emulation(20.0, 100.0, 20.0, 30.0)
    assert parse_emulation("lie=0.2") == Emulation(lie=0.2)
    assert not parse_emulation("gflops=1").slows_link
    assert parse_emulation("rtt_ms=0").slows_link


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got '', expected key=number with key one of gflops, down_mbit, up_mbit, rtt_ms, lie"),
        ("speed=3", "got 'speed=3'"),
        ("gflops", "gflops='' is not a number"),
        ("gflops=fast", "gflops='fast' is not a number"),
        ("gflops=0", "gflops=0, expected 0.001 to 1e+06"),
        ("up_mbit=-1", "up_mbit=-1, expected"),
        ("rtt_ms=nan", "rtt_ms=nan, expected"),
        ("lie=1.5", "lie=1.5, expected 0 to 1"),
        ("lie=0.1,lie=0.2", "given twice"),
    ],
)
def test_says_what_was_got_and_expected(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=r"^--emulate: ") as caught:
        parse_emulation(text)
    assert says in str(caught.value)


def test_a_lane_carries_its_rate_and_then_delays() -> None:
    lane = Lane(mbit=8.0, delay_s=0.5)  # 1 MB/s
    assert lane.book(1_000_000, 10.0) == (11.0, 11.5)
    assert lane.book(500_000, 10.2) == (11.5, 12.0), (
        "the next frame starts when the lane is free, not when the first lands"
    )
    assert lane.book(1_000_000, 20.0) == (21.0, 21.5), "an idle lane saves nothing up"
    assert Lane(None, 0.25).book(10**9, 1.0) == (1.0, 1.25)


def test_download_holds_its_rate(hand_clock: Any) -> None:
    async def main() -> None:
        wire = Wire(hand_clock, [bytes(100_000)] * 125)
        socket = EmulatedSocket(wire, Emulation(down_mbit=100.0, rtt_ms=60.0), hand_clock)
        started_s = hand_clock.now_s()
        for _ in range(125):  # 12.5 MB at 12.5 MB/s
            assert len(await socket.recv()) == 100_000
        assert hand_clock.now_s() - started_s == pytest.approx(1.030, rel=1e-3)
        with pytest.raises(ConnectionResetError):
            await socket.recv()
        await socket.close()
        assert wire.closed

    asyncio.run(hand_clock.run(main()))


def test_upload_holds_its_rate_and_lands_before_the_socket_closes(hand_clock: Any) -> None:
    async def main() -> None:
        wire = Wire(hand_clock, [b"x"])
        socket = EmulatedSocket(wire, Emulation(up_mbit=20.0, rtt_ms=100.0), hand_clock)
        started_s = hand_clock.now_s()
        for number in range(50):  # 2.5 MB at 2.5 MB/s
            await socket.send(bytes([number]) * 50_000)
        assert hand_clock.now_s() - started_s == pytest.approx(1.0, rel=1e-3), (
            "sending waits for the rate, not for the flight"
        )
        await socket.close()
        assert [frame[0] for _, frame in wire.sent] == list(range(50))
        assert wire.sent[0][0] - started_s == pytest.approx(0.02 + 0.05, rel=1e-3)
        assert wire.sent[-1][0] - started_s == pytest.approx(1.0 + 0.05, rel=1e-3)

    asyncio.run(hand_clock.run(main()))


def test_the_round_trip_delays_and_does_not_serialise(hand_clock: Any) -> None:
    async def main() -> None:
        wire = Wire(hand_clock, [b"frame"] * 40)
        socket = EmulatedSocket(wire, Emulation(rtt_ms=500.0), hand_clock)
        started_s = hand_clock.now_s()
        for _ in range(40):
            await socket.recv()
        assert hand_clock.now_s() - started_s == pytest.approx(0.25)
        await socket.close()

    asyncio.run(hand_clock.run(main()))


def test_a_socket_that_dies_under_way_does_not_hang(hand_clock: Any) -> None:
    async def main() -> None:
        wire = Wire(hand_clock, [])
        socket = EmulatedSocket(wire, Emulation(up_mbit=1.0, rtt_ms=10.0), hand_clock)
        wire.closed = True
        await socket.send(b"lost")
        await socket.send(b"lost too")
        with pytest.raises(ConnectionResetError):
            await socket.recv()
        await socket.close()
        assert wire.sent == []

    asyncio.run(hand_clock.run(main()))


def test_speed_is_shared_by_the_workers() -> None:
    assert Emulation(gflops=2.0).compute_s(10**9, workers=1) == 0.5
    assert Emulation(gflops=2.0).compute_s(10**9, workers=4) == 2.0
    assert Emulation().compute_s(10**9, workers=4) == 0.0


def test_a_liar_spoils_its_share_the_same_way_every_time() -> None:
    def lies() -> list[bool]:
        liar = Liar(0.2)
        return [liar.spoil(np.ones((1, 4, 4), np.float32)) for _ in range(2000)]

    assert lies() == lies()
    assert 0.17 < sum(lies()) / 2000 < 0.23
    assert not any(Liar(0.0).spoil(np.ones((1, 2, 2), np.float32)) for _ in range(100))


def test_a_lie_is_one_wrong_element() -> None:
    honest = np.random.default_rng(3).normal(size=(2, 8, 8)).astype(np.float32)
    spoiled = honest.copy()
    assert Liar(1.0).spoil(spoiled)
    differs = honest != spoiled
    assert differs.sum() == 1
    assert abs(spoiled - honest)[differs] >= 1.0
