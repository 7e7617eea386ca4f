"""A volunteer whose browser has WebGPU (a software adapter here): tiles on it, and its loss in mid-session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from backend.chromium import find
from tileweave.protocol.messages import Fail, Need

pytestmark = pytest.mark.browser
Device = Any
WebServer = Any
FLAGS = ["--no-sandbox", "--enable-unsafe-webgpu", "--disable-quic", "--disable-background-networking"]


@pytest.fixture
def gpu_browser(browser: Browser) -> Iterator[Browser]:
    """A browser of this test's own: its GPU process is going to die."""
    executable = find()
    assert executable
    launched = browser.browser_type.launch(executable_path=executable, args=FLAGS)
    yield launched
    launched.close()


@pytest.fixture
def context(gpu_browser: Browser) -> Iterator[BrowserContext]:
    made = gpu_browser.new_context()
    yield made
    made.close()


def kill_gpu_process(browser: Browser) -> None:
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    (pid,) = [process["id"] for process in processes if process["type"] == "GPU"]
    os.kill(pid, signal.SIGKILL)


def start(page: Page, server: WebServer, kernel: str) -> Device:
    page.goto(f"{server.url}/?kernel={kernel}&threads=2")
    page.get_by_role("button", name="Start computing").click()
    return server.device()


class Work:
    """Tiles of one product; panels are sent when they are asked for."""

    def __init__(self, device: Device) -> None:
        random = np.random.default_rng(1)
        self.device = device
        sides = {"a": 90, "b": 120}
        self.panels = {name: random.standard_normal((rows, 70), dtype=np.float32) for name, rows in sides.items()}
        self.leases = 0

    async def send_panels(self) -> None:
        for name, matrix in self.panels.items():
            await self.device.panel(name, matrix)

    async def tile(self) -> None:
        """A tile to its right product, as a server would see it through: lost panels again, a failed lease again."""
        await self.lease()
        result = asyncio.create_task(self.device.result())
        serving = asyncio.create_task(self.serve())
        await asyncio.wait([result, serving], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        message, floats = await result
        assert message.lease == self.leases
        await self.device.ack(self.leases)
        a, b = (self.panels[name].astype(np.float64) for name in "ab")
        assert np.abs(floats.reshape(90, 120) - a @ b.T).max() < 1e-4

    async def lease(self) -> None:
        self.leases += 1
        await self.device.lease(self.leases, 90, 120, 70, "a", "b")

    async def serve(self) -> None:
        while True:
            message = await self.device.messages.get()
            if isinstance(message, Need):
                await self.device.panel(message.panel, self.panels[message.panel])
            elif isinstance(message, Fail):
                assert message.code == "memory", message
                await self.lease()


def test_tiles_on_the_gpu_by_one_worker(page: Page, server: WebServer) -> None:
    device = start(page, server, "webgpu")
    assert device.hello.profile.kernel == "webgpu"
    assert device.hello.profile.workers == 1, "threads are for the processor"
    work = Work(device)
    server.run(work.send_panels())
    for _ in range(4):
        server.run(work.tile())
    assert page.evaluate("JSON.parse(localStorage.tileweave).choices.webgpu"), "the tuner's choice is kept"


def test_both_kinds_are_measured_and_a_software_gpu_loses(page: Page, server: WebServer) -> None:
    page.goto(server.url)
    software = page.evaluate("async () => (await navigator.gpu.requestAdapter()).info.isFallbackAdapter")
    page.get_by_role("button", name="Start computing").click()
    kernel = server.device().hello.profile.kernel
    assert kernel.startswith("wasm-") if software else kernel in ("webgpu", "wasm-relaxed", "wasm-strict")
    page.get_by_text("what else was tried").click()
    expect(page.locator("#trials-list")).to_contain_text("WebAssembly" if kernel == "webgpu" else "WebGPU: ")
    expect(page.locator("#trials-list")).to_contain_text("GFLOP/s")


def test_the_gpu_dies_twice_and_the_device_goes_on(page: Page, server: WebServer, gpu_browser: Browser) -> None:
    device = start(page, server, "webgpu")
    work = Work(device)
    server.run(work.send_panels())
    server.run(work.tile())
    for _ in range(2):
        kill_gpu_process(gpu_browser)
        server.run(work.tile())
    server.run(work.tile())
    expect(page.locator("#kernel")).to_contain_text("WebAssembly")
    expect(page.locator("#trials-list")).to_contain_text("WebGPU: not used")
    assert server.hellos == 1, "the connection never noticed"
