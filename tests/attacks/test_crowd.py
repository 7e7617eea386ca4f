"""A real job among a hostile crowd: devices that lie, hoard, flood, replay and squat, and come back when thrown out.

They speak the real protocol to the real server beside one honest volunteer. The job must end with plain torch's losses,
and what is credited must be what was computed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from backend.bench.parity import largest_difference, plain_losses
from backend.recipes import GptBytesConfig
from backend.swarm import Swarm, wait_for
from tileweave.protocol import (
    Ack,
    Bye,
    Drop,
    Hello,
    Lease,
    Message,
    Panel,
    Ping,
    Pong,
    Profile,
    Reassembly,
    Result,
    Revoke,
    Welcome,
    chunks,
    decode,
    encode,
)

CONFIG = GptBytesConfig(layers=2, width=64, heads=2, context=64, batch=8, lr=1e-3, sample_tokens=0)
STEPS = 2
ANSWER_S_MAX = 20.0
PARITY = 5e-6


class ThrownOut(Exception):
    """The server said BYE."""


class Attacker:
    """One connection that claims to be the fastest device in the world. Keeps the panels it is sent."""

    def __init__(self, swarm: Swarm, leases: tuple[int, ...] = ()) -> None:
        url = f"ws://127.0.0.1:{swarm.port}/ws/device"
        self._stack = ExitStack()
        self.socket = self._stack.enter_context(
            connect(url, compression=None, max_size=None, close_timeout=1, ping_interval=None)
        )
        self.panels: dict[str, np.ndarray] = {}
        self._arriving: dict[str, Reassembly] = {}
        profile = Profile(kernel="wasm", flops=1e13, memory_bytes=2**33, workers=8)
        try:
            self.send(Hello(client="hostile", profile=profile, leases=list(leases)))
            self.receive(Welcome)
        except BaseException:
            self._stack.close()
            raise

    def send(self, message: Message, payload: bytes = b"") -> None:
        self.socket.send(encode(message, payload))

    def receive(self, *wanted: type[Message]) -> Message:
        """The next message of these types; PINGs are answered on the way. Raises ThrownOut at a BYE."""
        while True:
            frame = self.socket.recv(ANSWER_S_MAX)
            assert isinstance(frame, bytes)
            message, payload = decode(frame)
            match message:
                case Ping():
                    self.send(Pong(nonce=message.nonce))
                case Bye():
                    raise ThrownOut(message.reason)
                case Panel():
                    part = self._arriving.setdefault(message.panel, Reassembly(message.size))
                    if part.add(message.offset, message.size, payload):
                        self.panels[message.panel] = np.frombuffer(part.data, np.float32)
                        del self._arriving[message.panel]
                case Drop():
                    for panel in message.panels:
                        self.panels.pop(panel, None)
                case _:
                    pass
            if isinstance(message, wanted):
                return message

    def lease(self) -> Lease:
        message = self.receive(Lease)
        assert isinstance(message, Lease)
        return message

    def product(self, lease: Lease) -> bytes:
        (term,) = lease.terms
        a = self.panels[term.a].reshape(lease.batch, lease.m, term.k)
        b = self.panels[term.b].reshape(lease.batch, lease.n, term.k)
        return np.matmul(a, b.transpose(0, 2, 1)).tobytes()

    def answer(self, lease: Lease, data: bytes) -> None:
        for offset, length in chunks(len(data)):
            result = Result(lease=lease.lease, job=lease.job, seconds=1e-9, offset=offset, size=len(data))
            self.send(result, data[offset : offset + length])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def lie(swarm: Swarm, seen: Counter[str]) -> None:
    """Zeros instead of the product, under a new name each time."""
    with Attacker(swarm) as device:
        lease = device.lease()
        device.answer(lease, bytes(4 * lease.batch * lease.m * lease.n))
        seen["lies"] += 1
        device.receive(Ack)


def hoard(swarm: Swarm, seen: Counter[str]) -> None:
    """Takes a lease, answers PINGs, and nothing else, until it is taken away; then comes back."""
    with Attacker(swarm) as device:
        device.lease()
        seen["hoarded"] += 1
        device.receive(Revoke)


def replay(swarm: Swarm, seen: Counter[str]) -> None:
    """One honest result, sent again and again, and once more as the answer to another lease."""
    with Attacker(swarm) as device:
        lease = device.lease()
        product = device.product(lease)
        for _ in range(5):
            device.answer(lease, product)
            seen["replays"] += 1
        other = device.lease()
        device.answer(other, product)
        device.receive(Ack)


def squat(swarm: Swarm, seen: Counter[str]) -> None:
    """Claims the largest result there may be for a lease it never had, and sends it a byte at a time."""
    job = swarm.client.jobs()[0]["id"]
    with Attacker(swarm, leases=(1,)) as device:
        for offset in itertools.count():
            device.send(Result(lease=1, job=job, seconds=0.1, offset=offset, size=64 << 20), b"x")
            seen["claims"] += 1
            device.receive(Ping)


def flood(swarm: Swarm, seen: Counter[str]) -> None:
    """Complete results of one byte for leases nobody gave, as fast as the socket takes them."""
    job = swarm.client.jobs()[0]["id"]
    with Attacker(swarm) as device:
        for lease in itertools.count():
            device.send(Result(lease=lease, job=job, seconds=0.0, offset=0, size=1), b"x")
            seen["floods"] += 1


Attack = Callable[[Swarm, Counter[str]], None]
CROWD: tuple[Attack, ...] = (lie, hoard, replay, squat, squat, flood)


def persist(attack: Attack, swarm: Swarm, seen: Counter[str], over: threading.Event) -> None:
    """Attacks until the test is over, again after each end of the connection."""
    while not over.is_set():
        try:
            attack(swarm, seen)
        except (ConnectionClosed, ThrownOut, OSError, TimeoutError, KeyError) as error:
            seen[type(error).__name__] += 1
            over.wait(0.05)


def all_devices(swarm: Swarm) -> list[dict[str, Any]]:
    """Page by page: a crowd under ever new names is longer than one."""
    pages = iter(lambda: swarm.client.devices(offset=len(devices)), [])
    devices: list[dict[str, Any]] = []
    for page in pages:
        devices += page
    return devices


def test_a_job_among_a_hostile_crowd_ends_with_the_losses_of_plain_torch() -> None:
    over, seen = threading.Event(), Counter[str]()
    with Swarm() as swarm:
        swarm.add_native("honest")
        swarm.wait_devices(1)
        job = swarm.client.submit_train("gpt-bytes", CONFIG.model_dump(), steps=STEPS)["id"]
        crowd = [threading.Thread(target=persist, args=(attack, swarm, seen, over)) for attack in CROWD]
        for thread in crowd:
            thread.start()
        try:
            wait_for("the job's end", lambda: swarm.client.job(job)["state"] not in ("queued", "running"), 200)
        finally:
            over.set()
            ended = swarm.client.job(job)
        rows = swarm.client.metrics(job)
        devices = all_devices(swarm)
        for thread in crowd:
            thread.join(ANSWER_S_MAX + 5)
    assert ended["state"] == "succeeded", ended["reason"]
    assert largest_difference(plain_losses(STEPS, CONFIG), rows) <= PARITY
    assert {"lies", "hoarded", "claims", "floods"} <= set(seen), f"not every attack took place: {seen}"
    # Every tile of every step was credited once, to whoever computed it, and nothing else was.
    assert sum(device["flop"] for device in devices) == sum(row["flop_offloaded"] for row in rows)
    assert [device["rejects"] for device in devices if device["name"] == "honest"] == [0]
