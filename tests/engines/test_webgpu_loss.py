"""The GPU process of a real browser is killed, once and twice, while tiles are computed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright

from backend.chromium import find

FLAGS = [
    "--enable-unsafe-webgpu",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
DEADLINE_S = 20.0
TILE = {"m": 70, "n": 33, "k": 90}


class Gpu:
    """A browser of this test's own, an open engine in it, and its GPU process."""

    def __init__(self, browser: Browser, page: Page) -> None:
        self.page = page
        self._session = browser.new_browser_cdp_session()

    def call(self, do: str, **values: Any) -> Any:
        return self.page.evaluate("order => gpu(order)", {"do": do, **values})

    def processes(self) -> list[int]:
        found = self._session.send("SystemInfo.getProcessInfo")["processInfo"]
        return [process["id"] for process in found if process["type"] == "GPU"]

    def kill(self) -> None:
        """Kill the GPU process and wait until it is gone."""
        deadline = time.monotonic() + DEADLINE_S
        while not (pids := self.processes()):
            assert time.monotonic() < deadline, "there is no GPU process"
        os.kill(pids[0], signal.SIGKILL)
        while pids[0] in self.processes():
            assert time.monotonic() < deadline, "the GPU process outlived SIGKILL"


@pytest.fixture
def gpu(playwright: Playwright, site: Any) -> Iterator[Gpu]:
    browser = playwright.chromium.launch(executable_path=find(), args=FLAGS)
    page = browser.new_page()
    page.set_default_timeout(1000 * DEADLINE_S)
    page.goto(f"{site.url}/suite/webgpu_page.html")
    page.wait_for_function("() => Boolean(globalThis.gpu)")
    made = Gpu(browser, page)
    made.call("open", names=["registers 8x8 4x1 step 1"])
    yield made
    browser.close()


def test_after_one_loss_the_engine_goes_on(gpu: Gpu) -> None:
    """The tile in flight fails as if memory had been short, its panels have to come again, and then all is well."""
    gpu.call("put", id="idle", floats=1000)
    gpu.call("begin")
    gpu.kill()
    assert gpu.call("ended") == "OutOfMemory"
    assert sorted(gpu.call("takeLost")) == ["a256x512.1", "b256x512.1", "idle"]
    assert gpu.call("tile", **TILE) == "right"
    assert gpu.call("memory")["bytes"] > 0


def test_after_two_losses_the_engine_is_gone(gpu: Gpu) -> None:
    """Chromium gives no adapter after a second crash within seconds: whoever asks is told so, and ever after."""
    gpu.call("begin")
    gpu.kill()
    assert gpu.call("ended") == "OutOfMemory"
    assert gpu.call("tile", **TILE) == "right"
    gpu.call("begin")
    gpu.kill()
    assert gpu.call("ended") == "EngineGone"
    assert gpu.call("tile", **TILE) == "EngineGone"
    gpu.call("put", id="late", floats=10)
    assert "late" in gpu.call("takeLost")
    assert gpu.call("memory") == {"bytes": 0, "used": 0}
