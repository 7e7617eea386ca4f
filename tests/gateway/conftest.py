"""A gateway for tests: in this process behind Starlette's client, or as the supervisor would start it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from starlette.testclient import TestClient
from websockets.sync.client import ClientConnection, connect

from backend.gateway.app import create_app
from backend.settings import Settings
from backend.stores.database import Database
from backend.stores.devices import DeviceStore
from backend.stores.jobs import Job, JobSpec, JobStore
from backend.stores.ledger import Ledger
from backend.switchboard.messages import SwitchMessage, ToAllocator, ToCoordinator
from backend.switchboard.streams import ALLOCATOR_STREAM, coordinator_stream, gateway_stream
from tileweave.protocol import Hello, Message, Profile, decode, encode

TOKEN = "a-token-for-tests-only"
DEADLINE_S = 20.0
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def make_settings(valkey) -> Iterator[Callable[..., Settings]]:
    directory = Path(tempfile.mkdtemp(prefix="tw-gw-"))
    made: list[Settings] = []

    def make(**values: Any) -> Settings:
        settings = Settings(data_dir=directory, redis_url=valkey.url, admin_token=TOKEN, **values)
        made.append(settings)
        return settings

    yield make
    for settings in made:
        shutil.rmtree(settings.run_dir, ignore_errors=True)
    shutil.rmtree(directory)


@dataclass
class World:
    """What the gateway shares with the rest of the server."""

    settings: Settings
    database: Database
    redis: Any

    @property
    def jobs(self) -> JobStore:
        return JobStore(self.database)

    @property
    def devices(self) -> DeviceStore:
        return DeviceStore(self.database)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.database)

    def running_job(self, **values: Any) -> Job:
        spec = JobSpec(**{"kind": "train", "name": "test", "recipe": "gpt-bytes", "steps": 10, **values})
        job = self.jobs.create(spec, time.time())
        self.jobs.begin_epoch(job.id, time.time())
        return job

    def told(self, stream: str, kind: Any) -> list[Any]:
        """All messages that were sent to a stream nobody reads."""
        decoder = msgspec.msgpack.Decoder(list[kind])
        return [message for _, entry in self.redis.xrange(stream) for message in decoder.decode(entry[b"m"])]

    def told_allocator(self) -> list[Any]:
        return self.told(ALLOCATOR_STREAM, ToAllocator)

    def told_coordinator(self, job: str) -> list[Any]:
        return self.told(coordinator_stream(job), ToCoordinator)

    def tell_gateway(self, *messages: SwitchMessage, gateway: str = "0") -> None:
        self.redis.xadd(gateway_stream(gateway), {b"m": msgspec.msgpack.encode(list(messages))})

    @staticmethod
    def wait_until(what: str, condition: Callable[[], Any]) -> Any:
        """The condition's first true value; fails after DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        return value

    def wait_told(self, job: str, kind: type) -> Any:
        def look() -> Any:
            return next((message for message in self.told_coordinator(job) if isinstance(message, kind)), None)

        return self.wait_until(f"{kind.__name__} to job {job}", look)


@pytest.fixture
def make_world(make_settings) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make(**values: Any) -> World:
            settings = make_settings(**values)
            database = Database(settings.database_path)
            stack.callback(database.close)
            return World(settings, database, stack.enter_context(Redis.from_url(settings.redis_url)))

        yield make


@pytest.fixture
def make_client(make_world) -> Iterator[Callable[..., tuple[TestClient, World]]]:
    """A client of an application in this process, and its world."""
    with ExitStack() as stack:

        def make(**values: Any) -> tuple[TestClient, World]:
            world = make_world(**values)
            app = create_app(world.settings)
            return stack.enter_context(TestClient(app, client=("127.0.0.1", 50000), follow_redirects=False)), world

        yield make


@dataclass
class Served:
    """A gateway process and its world."""

    world: World
    port: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        environment = os.environ | self.world.settings.environment() | {"TILEWEAVE_ADMIN_TOKEN": TOKEN}
        argv = [sys.executable, "-m", "backend.gateway", "--index", "0", "--fd", str(self.listener.fileno())]
        self.process = subprocess.Popen(argv, env=environment, pass_fds=[self.listener.fileno()])

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def socket(self, **options: Any) -> ClientConnection:
        url = f"ws://127.0.0.1:{self.port}/ws/device"
        options = {"compression": None, "max_size": None, "open_timeout": DEADLINE_S, "close_timeout": 0.2, **options}
        return self.stack.enter_context(connect(url, **options))

    def device(self, **hello: Any) -> Peer:
        return self.device_on(self.socket(), **hello)

    def device_on(self, socket: ClientConnection, **hello: Any) -> Peer:
        return Peer(socket, **hello)


class Peer:
    """A device on the other side of the socket, which does only what a test tells it to."""

    def __init__(self, socket: ClientConnection, **hello: Any) -> None:
        self.socket = socket
        self.send(Hello(**{"client": "test", "profile": Profile(kernel="test", flops=1e9), **hello}))
        self.welcome = self.expect("Welcome")

    def send(self, message: Message, payload: bytes = b"") -> None:
        self.socket.send(encode(message, payload))

    def receive(self) -> tuple[Message, bytes]:
        frame = self.socket.recv(DEADLINE_S)
        assert isinstance(frame, bytes)
        message, payload = decode(frame)
        return message, bytes(payload)

    def expect(self, name: str) -> Any:
        """The next message of this name; only PINGs and PANELs may come before it."""
        while True:
            message, _ = self.receive()
            if type(message).__name__ == name:
                return message
            assert type(message).__name__ in ("Ping", "Panel"), f"got {message}, expected {name}"


@pytest.fixture
def make_served(make_world) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(**values: Any) -> Served:
        world = make_world(**values)
        listener = socket.create_server(("127.0.0.1", 0))
        served = Served(world, listener.getsockname()[1], listener)
        made.append(served)
        served.start()
        return served

    yield make
    for served in made:
        if served.process is not None:
            served.process.kill()
            served.process.wait()
        served.stack.close()
        served.listener.close()
