"""The GPU process of a real browser is killed, once and twice, while tiles are computed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import Playwright

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


def processes() -> dict[int, tuple[int, str]]:
    """Every process: its parent and its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(folder.name)] = parent, (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue  # it ended meanwhile
    return found


def gpu_process(mark: str) -> int | None:
    """The GPU process below the browser whose command line has `mark`."""
    table = processes()
    for pid, (parent, command) in table.items():
        if "--type=gpu-process" not in command:
            continue
        while parent in table:
            if mark in table[parent][1]:
                return pid
            parent = table[parent][0]
    return None


class Gpu:
    """A browser of this test's own, an open engine in it, and its GPU process."""

    def __init__(self, page: Any, mark: str) -> None:
        self.page = page
        self.mark = mark

    def call(self, do: str, **values: Any) -> Any:
        return self.page.evaluate("order => gpu(order)", {"do": do, **values})

    def kill(self) -> None:
        """Kill the GPU process and wait until it is gone."""
        deadline = time.monotonic() + DEADLINE_S
        while (pid := gpu_process(self.mark)) is None:
            assert time.monotonic() < deadline, "there is no GPU process"
        os.kill(pid, signal.SIGKILL)
        while gpu_process(self.mark) == pid:
            assert time.monotonic() < deadline, "the GPU process outlived SIGKILL"


@pytest.fixture
def gpu(playwright: Playwright, site: Any) -> Iterator[Gpu]:
    mark = f"--tileweave-test={uuid4()}"
    browser = playwright.chromium.launch(executable_path=find(), args=[*FLAGS, mark])
    page = browser.new_page()
    page.set_default_timeout(1000 * DEADLINE_S)
    page.goto(f"{site.url}/suite/webgpu_page.html")
    page.wait_for_function("() => Boolean(globalThis.gpu)")
    made = Gpu(page, mark)
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
