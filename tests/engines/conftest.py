"""Chromium with WebGPU, and a site for it: the product's own static files with the product's own headers, plus /suite.

The site is the gateway's middleware and static files under uvicorn, in a thread; the suite's page and modules come from
this folder and are served by nothing else. Each test file has a browser of its own, so that Playwright ends with it.
Left out: the rest of the gateway, and any timing (Playwright slows a page down).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, Playwright, sync_playwright
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from backend.chromium import find
from backend.gateway.numbers import Numbers
from backend.gateway.pages import Static, web_root
from backend.gateway.security import Guard
from backend.settings import Settings

HERE = Path(__file__).parent
DEADLINE_S = 20.0
FLAGS = [
    "--enable-unsafe-webgpu",  # without it this machine's software adapter is hidden
    "--js-flags=--expose-gc",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Site:
    url: str

    @property
    def suite(self) -> str:
        return f"{self.url}/suite/suite.html"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The served files; tests of a single engine may open pages of their own in this folder under /suite/."""
    app = Starlette(
        routes=[
            Mount("/static", Static(directory=web_root() / "static")),
            Mount("/suite", Static(directory=HERE, follow_symlink=False)),
        ],
        middleware=[Middleware(Guard, settings=Settings(), numbers=Numbers("suite"))],
    )
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the site did not start"
            thread.join(0.01)
        yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}")
        server.should_exit = True
        thread.join(DEADLINE_S)


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


def launch(playwright: Playwright, *extra: str) -> Browser:
    """Headless Chromium; a machine without one fails here, with the way to get it."""
    executable = find()
    assert executable, "no Chromium found (Debian: apt-get install chromium)"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *sandbox, *extra])


@pytest.fixture(scope="module")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    browser = launch(playwright)
    yield browser
    browser.close()


class Suite:
    """One engine in one page. `call` runs an order of suite.js there and gives its answer; what it throws is raised."""

    def __init__(self, page: Page, kernel: str, address: str, options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.goto(address)
        self.opened: dict[str, Any] = self.call("open", kernel=kernel, **options)

    def call(self, do: str, **values: Any) -> Any:
        return self.page.evaluate("order => window.suite(order)", {"do": do, **values})

    def check(self, do: str, **values: Any) -> None:
        """An order whose answer is what was wrong, or "": the assertion names engine and order, which reproduce it."""
        wrong = self.call(do, **values)
        assert wrong == "", f"{self.kernel}: {wrong}\nby {do} {json.dumps(values)}"


@pytest.fixture(scope="module")
def open_suite(chromium: Browser, site: Site) -> Callable[..., AbstractContextManager[Suite]]:
    """`with open_suite(kernel, bytes_max=…, where=…)`: a page with that engine in its Worker, or in its "window"."""

    @contextmanager
    def opened(kernel: str, where: str = "worker", **options: Any) -> Iterator[Suite]:
        page = chromium.new_page()
        try:
            suite = Suite(page, kernel, f"{site.suite}?{where}", options)
            yield suite
            assert suite.complaints == []
        finally:
            page.close()

    return opened
