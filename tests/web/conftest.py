"""A browser, and a small server that speaks the real protocol to it and serves the real pages with made-up figures.

The server runs in a thread of its own, so that tests can use Playwright's blocking interface. It sends the security
headers of the real one. Playwright slows sockets down several times, so nothing here is about speed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from backend.chromium import find
from backend.gateway.security import HEADERS
from tileweave.protocol import Reassembly, chunks, decode, encode
from tileweave.protocol.messages import (
    Ack,
    Hello,
    Lease,
    Limits,
    Message,
    Panel,
    Ping,
    Pong,
    Result,
    Term,
    Welcome,
)

WEB = Path(__file__).resolve().parents[2] / "web"
DEADLINE_S = 60.0
MIME = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".whl": "application/octet-stream",
    ".zip": "application/zip",
}
# What Chromium itself writes to a page's console when a server or its GPU process goes away.
CHROMIUMS_OWN = ("ERR_CONNECTION_REFUSED", "A valid external Instance reference no longer exists")
LIMITS = Limits(
    frame_bytes_max=1 << 20,
    panel_bytes_max=64 << 20,
    result_bytes_max=64 << 20,
    leases_max=8,
    ping_s=1.0,
    silence_s_max=8.0,
)
T = TypeVar("T")


class Device:
    """One connection of a browser, after WELCOME."""

    def __init__(self, socket: ServerConnection, hello: Hello, limits: Limits) -> None:
        self.socket = socket
        self.hello = hello
        self.limits = limits
        self.results: asyncio.Queue[tuple[Result, np.ndarray]] = asyncio.Queue()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.pongs = 0
        self._parts: dict[int, Reassembly] = {}

    async def send(self, message: Message) -> None:
        await self.socket.send(encode(message))

    async def panel(self, name: str, matrix: np.ndarray) -> None:
        """Send `matrix` (rows x k, float32) as a panel."""
        data = memoryview(matrix.tobytes())
        rows, k = matrix.shape
        for offset, length in chunks(len(data), self.limits.frame_bytes_max):
            head = Panel(panel=name, rows=rows, columns=k, offset=offset, size=len(data))
            await self.socket.send(encode(head, data[offset : offset + length]))

    async def lease(self, lease: int, m: int, n: int, k: int, a: str, b: str, batch: int = 1) -> None:
        await self.send(
            Lease(lease=lease, job="job-1", batch=batch, m=m, n=n, terms=[Term(k=k, a=a, b=b)], deadline_s=60)
        )

    async def ack(self, lease: int, flop: int = 0) -> None:
        await self.send(Ack(lease=lease, job="job-1", verdict="accepted", flop=flop))

    async def result(self) -> tuple[Result, np.ndarray]:
        """The next complete result: its last chunk's message and all its floats."""
        return await asyncio.wait_for(self.results.get(), DEADLINE_S)

    async def message(self, kind: type[T]) -> T:
        """The next message of that kind; others before it are thrown away."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self.messages.get()
                if isinstance(message, kind):
                    return message

    async def listen(self) -> None:
        try:
            async for frame in self.socket:
                assert isinstance(frame, bytes)
                message, payload = decode(frame)
                if isinstance(message, Ping):
                    await self.send(Pong(nonce=message.nonce))
                elif isinstance(message, Pong):
                    self.pongs += 1
                elif isinstance(message, Result):
                    part = self._parts.setdefault(message.lease, Reassembly(64 << 20))
                    if part.add(message.offset, message.size, payload):
                        del self._parts[message.lease]
                        self.results.put_nowait((message, np.frombuffer(bytes(part.data), np.float32)))
                else:
                    self.messages.put_nowait(message)
        except ConnectionClosed:
            pass
        finally:
            self.closed.set()


class WebServer:
    """Pages, canned REST answers and `/ws/device` on one port."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.pings = True
        self.api: dict[str, Any] = {}  # path -> JSON, or text for a stream of events
        self.admin = False
        self.recipes: list[dict[str, Any]] = []
        self.overrides: dict[str, bytes] = {}  # static path -> what to serve in its place
        self.devices: asyncio.Queue[Device] = asyncio.Queue()
        self.hellos = 0
        self.loop = asyncio.new_event_loop()
        self.templates = Environment(
            loader=FileSystemLoader(WEB / "templates"), autoescape=True, undefined=StrictUndefined
        )
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Server = self.run(self._start())
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        self.url = f"http://localhost:{self.port}"

    async def _start(self) -> Server:
        return await serve(
            self._device,
            "localhost",
            0,
            process_request=self._respond,
            compression=None,
            max_size=1 << 20,
            ping_interval=None,
        )

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine in the server's thread and wait for it."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, 4 * DEADLINE_S)

        future: Future[T] = asyncio.run_coroutine_threadsafe(bounded(), self.loop)
        return future.result(5 * DEADLINE_S)

    def device(self) -> Device:
        """The next device that connected and was welcomed."""
        return self.run(asyncio.wait_for(self.devices.get(), DEADLINE_S))

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            await self._server.wait_closed()

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _device(self, socket: ServerConnection) -> None:
        frame = await asyncio.wait_for(socket.recv(), DEADLINE_S)
        assert isinstance(frame, bytes)
        hello, _ = decode(frame)
        assert isinstance(hello, Hello)
        self.hellos += 1
        device = Device(socket, hello, self.limits)
        secret = None if hello.device else "a-secret-of-a-device"
        name = hello.name or "Quiet Otter"
        await device.send(Welcome(device=hello.device or "dev-1", name=name, limits=self.limits, secret=secret))
        self.devices.put_nowait(device)
        pinging = asyncio.create_task(self._ping(device))
        try:
            await device.listen()
        finally:
            pinging.cancel()

    async def _ping(self, device: Device) -> None:
        nonce = 0
        while self.pings:
            nonce += 1
            await device.send(Ping(nonce=nonce))
            await asyncio.sleep(self.limits.ping_s)

    def _respond(self, connection: ServerConnection, request: Request) -> Response | None:
        path = urlsplit(request.path).path
        if path == "/ws/device":
            return None
        if path.startswith("/static/"):
            return self._static(path)
        if path.startswith("/api/v1"):
            answer = self.api.get(path.removeprefix("/api/v1"))
            if answer is None:
                return answer_of(HTTPStatus.NOT_FOUND, b'{"detail":"nothing here"}', "application/json")
            if isinstance(answer, str):
                return answer_of(HTTPStatus.OK, answer.encode(), "text/event-stream")
            return answer_of(HTTPStatus.OK, json.dumps(answer).encode(), "application/json")
        return self._page(path)

    def _static(self, path: str) -> Response:
        file = WEB / path.lstrip("/")
        if path not in self.overrides and not file.is_file():
            return answer_of(HTTPStatus.NOT_FOUND, b"", "text/plain")
        return answer_of(HTTPStatus.OK, self.overrides.get(path) or file.read_bytes(), MIME[file.suffix])

    def _page(self, path: str) -> Response:
        config: dict[str, Any] = {"api": "/api/v1"}
        kind, _, number = path.strip("/").partition("/")
        names = {"": "volunteer", "leaderboard": "leaderboard", "jobs": "job", "devices": "device", "admin": "admin"}
        if kind == "":
            config["socket"] = "/ws/device"
        elif kind in ("jobs", "devices"):
            config[kind.removesuffix("s")] = number
        elif kind == "admin":
            config["recipes"] = self.recipes
        name = names.get(kind, "error")
        html = self.templates.get_template(f"{name}.html").render(
            title=name.title(),
            config=json.dumps(config),
            admin=self.admin,
            csrf="csrf" if self.admin else "",
            error="" if name == "admin" else "There is no page at this address.",
        )
        return answer_of(HTTPStatus.OK, html.encode(), "text/html; charset=utf-8")


def answer_of(status: HTTPStatus, body: bytes, mime: str) -> Response:
    headers = Headers(HEADERS)
    headers["Content-Type"] = mime
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, body)


@pytest.fixture
def server() -> Iterator[WebServer]:
    """A server of this test's own; its API has no jobs."""
    made = WebServer()
    made.api["/jobs"] = {"jobs": [], "total": 0}
    made.api["/jobs/job-1"] = {"id": "job-1", "name": "Shakespeare", "recipe": "gpt-bytes", "kind": "train"}
    made.api["/devices/dev-1"] = {"id": "dev-1", "name": "Quiet Otter", "credit": 12.5}
    yield made
    made.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium; a machine without one fails here, with the way to get it."""
    executable = find()
    assert executable, "no Chromium found (Debian: apt-get install chromium)"
    flags = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=flags)
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context()
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, server: WebServer) -> Iterator[Page]:
    """A page; at the end it must have talked to its own server only, and have complained about nothing."""
    hosts: set[str] = set()
    complaints: list[str] = []
    context.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    made = context.new_page()
    made.set_default_timeout(DEADLINE_S * 1000)
    made.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).netloc))
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield made
    made.close()
    assert hosts <= {f"localhost:{server.port}"}, f"foreign hosts: {hosts}"
    assert [text for text in complaints if not any(own in text for own in CHROMIUMS_OWN)] == []
