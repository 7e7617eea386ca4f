"""The volunteer on real sockets, against a test server that speaks the protocol."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileweave.protocol import Ack, Bye, Drop, Fail, Hello, Need, Ping, Pong, Result, Status, encode
from tileweave.volunteer.clock import Clock, SystemClock
from tileweave.volunteer.compute import Kernel, multiply_numpy
from tileweave.volunteer.emulate import Emulation
from tileweave.volunteer.errors import OptionError, VolunteerEnded
from tileweave.volunteer.identity import identity_path, load_identity
from tileweave.volunteer.net import VolunteerOptions, VolunteerState, run_volunteer, websocket_url

InServer = Callable[[Callable[[Any], Awaitable[None]]], None]
NUMPY = Kernel("native-numpy", multiply_numpy, 1e9)
FAST = Emulation()
MEMORY = 256 << 20


class Run:
    """A volunteer at work in this loop."""

    def __init__(self, options: VolunteerOptions, clock: Clock, kernel: Kernel) -> None:
        self.states: list[VolunteerState] = []
        self._changed = asyncio.Event()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(
            run_volunteer(
                options, self._note, stop=self.stop, clock=clock, rng=random.Random(7), kernel=kernel
            )
        )  # fmt: skip

    def _note(self, state: VolunteerState) -> None:
        self.states.append(state)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> VolunteerState:
        self.stop.set()
        async with asyncio.timeout(20):
            await self.task
        assert self.states[-1].phase == "ended"
        return self.states[-1]


@asynccontextmanager
async def volunteering(
    server: Any,
    clock: Clock | None = None,
    kernel: Kernel = NUMPY,
    emulation: Emulation = FAST,
    identity: Path | None = None,
    workers: int = 1,
) -> AsyncIterator[Run]:
    options = VolunteerOptions(server.url, "otter", workers, emulation, identity, MEMORY)
    run = Run(options, clock or SystemClock(), kernel)
    try:
        yield run
    finally:
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


def operands(m: int, n: int, k: int, batch: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(m * n * k)
    return rng.random((batch * m, k), np.float32), rng.random((batch * n, k), np.float32)


def test_joins_computes_and_says_goodbye(in_server: InServer, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, workers=2) as run:
            peer = await server.peer()
            hello = await peer.expect(Hello)
            assert (hello.name, hello.profile.kernel, hello.profile.workers) == ("otter", "native-numpy", 2)
            assert hello.device is hello.secret is None
            await peer.welcome(secret="s" * 16)
            assert (await peer.expect(Status)).state == "ready"
            a, b = operands(40, 30, 50, batch=3)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(1, 40, 30, 50, batch=3))
            lease, data = await peer.result()
            product = np.frombuffer(data, np.float32).reshape(3, 40, 30)
            expected = np.matmul(a.reshape(3, 40, 50), b.reshape(3, 30, 50).transpose(0, 2, 1))
            assert lease == 1
            np.testing.assert_allclose(product, expected, rtol=1e-5)
            await peer.send(Ack(lease=1, job="job-1", verdict="accepted", flop=2 * 3 * 40 * 30 * 50))
            await peer.send(Ping(nonce=9))
            await peer.expect(Pong)
            last = await run.end()
            assert await peer.expect(Bye) == Bye(code="done", reason="stopped")
            assert (last.device, last.name, last.flop) == ("d-1", "quiet-otter", 360_000)
            assert last.verdicts == {"accepted": 1}
            assert last.bytes_up > len(data) and last.bytes_down > a.nbytes + b.nbytes

    in_server(test)


def test_large_panels_and_results_go_in_chunks(in_server: InServer, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server):
            peer = await server.peer()
            await peer.welcome()
            a, b = operands(1000, 900, 600)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(5, 1000, 900, 600))
            _, data = await peer.result()
            np.testing.assert_allclose(np.frombuffer(data, np.float32).reshape(1000, 900), a @ b.T, rtol=1e-4)
            assert sum(isinstance(message, Result) for message in peer.seen) == 4

    in_server(test)


def test_ping_is_answered_while_every_worker_computes(in_server: InServer, make_tile: Any) -> None:
    entered, release = threading.Semaphore(0), threading.Event()

    def stuck(a: Any, b: Any) -> Any:
        entered.release()
        assert release.wait(20)
        return multiply_numpy(a, b)

    async def test(server: Any) -> None:
        async with volunteering(server, kernel=Kernel("stuck", stuck, 1e9), workers=2):
            peer = await server.peer()
            await peer.welcome()
            a, b = operands(4, 4, 4)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(1, 4, 4, 4))
            await peer.send(make_tile(2, 4, 4, 4))
            for _ in range(2):
                assert await asyncio.to_thread(entered.acquire, timeout=20)
            await peer.send(Ping(nonce=42))
            assert (await peer.expect(Pong)).nonce == 42
            assert not any(isinstance(message, Result) for message in peer.seen)
            release.set()
            assert {(await peer.result())[0], (await peer.result())[0]} == {1, 2}

    try:
        in_server(test)
    finally:
        release.set()


def test_a_server_that_falls_silent_is_left_and_found_again(in_server: InServer, hand_clock: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, clock=hand_clock):
            peer = await server.peer()
            await peer.welcome(secret="s" * 16)
            await peer.expect(Status)
            hand_clock.advance(5.9)  # silence_s_max is 6
            await peer.send(Ping(nonce=1))
            await peer.expect(Pong)
            hand_clock.advance(5.9)
            await peer.send(Ping(nonce=2))
            await peer.expect(Pong)
            assert server.peers.empty()
            again = await hand_clock.turn_until(server.peers.get())  # the socket is open, but nobody speaks
            hello = await again.expect(Hello)
            assert (hello.device, hello.secret) == ("d-1", "s" * 16)

    in_server(test)


def test_a_server_that_stops_reading_is_left_too(in_server: InServer, hand_clock: Any, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, clock=hand_clock) as run:
            peer = await server.peer()
            await peer.expect(Hello)
            await peer.welcome()
            peer.connection.transport.pause_reading()
            a, b = operands(3000, 3000, 8)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(1, 3000, 3000, 8))  # 36 MB of result into a socket that takes none
            await run.until(lambda: run.states[-1].unanswered > 0)
            again = await hand_clock.turn_until(server.peers.get())
            assert (await again.expect(Hello)).leases == [1]

    in_server(test)


def test_a_result_without_an_ack_is_sent_again(in_server: InServer, hand_clock: Any, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, clock=hand_clock):
            peer = await server.peer()
            await peer.welcome()
            a, b = operands(16, 16, 16)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(7, 16, 16, 16))
            first = await peer.result()
            await peer.connection.close()
            peer = await hand_clock.turn_until(server.peer())
            assert (await peer.expect(Hello)).leases == [7]
            await peer.welcome()
            assert await peer.result() == first
            await peer.send(Ack(lease=7, job="job-1", verdict="accepted"))
            await peer.send(Ping(nonce=1))
            await peer.expect(Pong)
            await peer.connection.close()
            peer = await hand_clock.turn_until(server.peer())
            assert (await peer.expect(Hello)).leases == []

    in_server(test)


def test_dropped_panels_are_asked_for_again(in_server: InServer, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server):
            peer = await server.peer()
            await peer.welcome()
            a, b = operands(8, 8, 8)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(Drop(panels=["a"]))
            await peer.send(make_tile(3, 8, 8, 8))
            assert await peer.expect(Need) == Need(panel="a", lease=3)
            await peer.panel("a", a)
            assert (await peer.result())[0] == 3

    in_server(test)


def test_a_kernel_that_fails_gives_the_tile_back(in_server: InServer, make_tile: Any) -> None:
    def broken(a: Any, b: Any) -> Any:
        raise MemoryError if a.shape[1] == 4 else ArithmeticError("no such luck")

    async def test(server: Any) -> None:
        async with volunteering(server, kernel=Kernel("broken", broken, 1e9)):
            peer = await server.peer()
            await peer.welcome()
            await peer.panel("a", operands(4, 4, 4)[0])
            await peer.panel("b", operands(8, 8, 4)[0])
            await peer.send(make_tile(1, 4, 4, 4, b="a"))
            await peer.send(make_tile(2, 8, 8, 4, a="b"))
            assert (await peer.expect(Fail)).code == "memory"
            fail = await peer.expect(Fail)
            assert (fail.lease, fail.code, fail.message) == (2, "kernel", "ArithmeticError: no such luck")

    in_server(test)


def test_a_server_that_breaks_the_protocol_is_told_and_tried_again(in_server: InServer, hand_clock: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, clock=hand_clock):
            peer = await server.peer()
            await peer.connection.send(encode(Status(state="ready")))
            assert (await peer.expect(Bye)).code == "protocol"
            peer = await hand_clock.turn_until(server.peer())
            await peer.expect(Hello)
            await peer.connection.send("text")
            assert "binary frames" in (await peer.expect(Bye)).reason
            await hand_clock.turn_until(server.peer())

    in_server(test)


@pytest.mark.parametrize(
    ("code", "says"), [("reload", "update tileweave"), ("replaced", "--identity none"), ("refused", "enough of you")]
)
def test_some_goodbyes_are_final(in_server: InServer, code: Any, says: str) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server) as run:
            peer = await server.peer()
            await peer.send(Bye(code=code, reason="enough of you"))
            with pytest.raises(VolunteerEnded, match=says):
                async with asyncio.timeout(20):
                    await run.task
            assert run.states[-1].phase == "ended"

    in_server(test)


def test_a_server_of_another_version_is_not_tried_again(in_server: InServer) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server) as run:
            peer = await server.peer()
            bye = bytearray(encode(Bye(code="reload")))
            bye[2] = 1
            await peer.connection.send(bytes(bye))
            with pytest.raises(VolunteerEnded, match=r"protocol version 1, expected 2.*update"):
                async with asyncio.timeout(20):
                    await run.task

    in_server(test)


def test_it_comes_back_no_sooner_than_the_server_asks(in_server: InServer, hand_clock: Any) -> None:
    async def test(server: Any) -> None:
        async with volunteering(server, clock=hand_clock) as run:
            peer = await server.peer()
            await peer.send(Bye(code="busy", reason="full house", retry_s=45.0))
            await run.until(lambda: run.states[-1].phase == "waiting")
            assert run.states[-1].detail == "full house"
            waits_from_s = hand_clock.now_s()
            await hand_clock.turn_until(server.peer())
            assert hand_clock.now_s() - waits_from_s >= 45.0
            assert [slept for slept in hand_clock.slept if 45.25 <= slept <= 45.5]

    in_server(test)


def test_back_off_grows_with_jitter_and_is_bounded(hand_clock: Any) -> None:
    class Nowhere:
        url = "http://127.0.0.1:9"  # discard: nothing listens

    async def main() -> None:
        async with volunteering(Nowhere, clock=hand_clock) as run:
            attempts = run.until(lambda: sum(state.phase == "waiting" for state in run.states) > 12)
            await hand_clock.turn_until(attempts, step_s=30.0)
            bounds = [min(30.0, 0.5 * 2**failure) for failure in range(12)]
            assert all(bound / 2 <= wait <= bound for bound, wait in zip(bounds, hand_clock.slept, strict=False))
            assert len(set(hand_clock.slept)) == len(hand_clock.slept)
            assert "Connect" in run.states[-1].detail or "refused" in run.states[-1].detail
            await run.end()

    asyncio.run(main())


def test_identity_is_kept_for_its_owner_alone(in_server: InServer, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "volunteer.json"

    async def test(server: Any) -> None:
        async with volunteering(server, identity=path) as run:
            peer = await server.peer()
            await peer.welcome(secret="first-secret-of-it")
            await peer.expect(Status)
            await peer.send(Ping(nonce=1))
            await peer.expect(Pong)
            await run.end()
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path]
        async with volunteering(server, identity=path):
            hello = await (await server.peer()).expect(Hello)
            assert (hello.device, hello.secret) == ("d-1", "first-secret-of-it")

    in_server(test)


def test_a_file_that_is_no_identity_is_named(tmp_path: Path) -> None:
    path = tmp_path / "volunteer.json"
    assert load_identity(path) is None
    path.write_text("[]")
    with pytest.raises(OptionError, match="delete it to join as a new device"):
        load_identity(path)
    assert identity_path("http://[::1]:8000/x").name == "volunteer-[--1]-8000.json"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "ws://host:8000/ws/device"),
        ("https://host/", "wss://host/ws/device"),
        ("http://host/under/", "ws://host/under/ws/device"),
    ],
)
def test_the_device_socket_of_a_server(url: str, expected: str) -> None:
    assert websocket_url(url) == expected


@pytest.mark.parametrize("url", ["host:8000", "ws://host", "", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="expected http://host:port"):
        websocket_url(url)


def test_emulated_speed_and_lies(in_server: InServer, hand_clock: Any, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        emulation = Emulation(gflops=0.001, lie=1.0)
        async with volunteering(server, clock=hand_clock, emulation=emulation):
            peer = await server.peer()
            assert (await peer.expect(Hello)).profile.flops == 1e6
            await peer.welcome()
            a, b = operands(50, 50, 50)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(1, 50, 50, 50))  # 0.25 MFLOP at 1 MFLOP/s
            _, data = await hand_clock.turn_until(peer.result(), step_s=0.01)
            (result,) = [message for message in peer.seen if isinstance(message, Result)]
            assert result.seconds == pytest.approx(0.25)
            assert any(slept == pytest.approx(0.25, abs=0.02) for slept in hand_clock.slept)
            wrong = ~np.isclose(np.frombuffer(data, np.float32).reshape(50, 50), a @ b.T, rtol=1e-4)
            assert wrong.sum() == 1

    in_server(test)


def test_an_emulated_link_carries_a_whole_tile(in_server: InServer, make_tile: Any) -> None:
    async def test(server: Any) -> None:
        emulation = Emulation(down_mbit=1000.0, up_mbit=1000.0, rtt_ms=2.0)
        async with volunteering(server, emulation=emulation) as run:
            peer = await server.peer()
            await peer.welcome()
            a, b = operands(100, 100, 50)
            await peer.panel("a", a)
            await peer.panel("b", b)
            await peer.send(make_tile(1, 100, 100, 50))
            _, data = await peer.result()
            np.testing.assert_allclose(np.frombuffer(data, np.float32).reshape(100, 100), a @ b.T, rtol=1e-4)
            await run.end()
            assert (await peer.expect(Bye)).code == "done"

    in_server(test)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_cleanly_on_a_signal(in_server: InServer, tmp_path: Path, number: signal.Signals) -> None:
    async def test(server: Any) -> None:
        program = "import sys; from tileweave.volunteer.main import volunteer_main as v; sys.exit(v(*sys.argv[1:3], 1))"
        environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, server.url, "cli-otter", env=environment, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            peer = await server.peers.get()
        assert (await peer.expect(Hello)).name == "cli-otter"
        await peer.welcome(secret="s" * 16)
        await peer.expect(Status)
        process.send_signal(number)
        assert (await peer.expect(Bye)).code == "done"
        async with asyncio.timeout(20):
            _, errors = await process.communicate()
        assert process.returncode == 0
        assert b"quiet-otter" in errors and b"ended" in errors
        assert list((tmp_path / ".local/share/tileweave").glob("volunteer-127.0.0.1-*.json"))

    in_server(test)


def test_the_command_refuses_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tileweave.volunteer.main import volunteer_main

    assert volunteer_main("localhost:8000", identity="none") == 2
    assert volunteer_main("http://localhost:8000", emulate="lie=2", identity="none") == 2
    (tmp_path / "broken").write_text("{")
    assert volunteer_main("http://localhost:8000", identity=str(tmp_path / "broken")) == 2
    errors = capsys.readouterr().err
    assert "expected http://host:port" in errors
    assert "lie=2, expected 0 to 1" in errors
    assert "delete it to join as a new device" in errors
