"""Serves the kernel bench's page (web/bench/kernels/index.html), checks the products it posts, and takes its figures.

The page runs in a bare headless Chromium (a DevTools client would slow it down) and gets everything from here: our own
modules, the peers from node_modules, the operands. A product is posted here and judged against float64 before its
maker is timed. A development tool, on 127.0.0.1, for as long as one bench runs.

    GET  /operands?n=&dtype=           A, then B^T, then their scales (int8)
    POST /product?n=&dtype=&factors=   a product's bytes; answers {"error": largest error over largest element}
    POST /progress                     a line for standard error
    POST /figures                      what was measured, or {"error": why not}
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit

from backend.bench.kernels.operands import error, operands
from backend.chromium import Chromium

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"node_modules": ROOT / "node_modules", "build": ROOT / "build", "": ROOT / "web"}
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".json": "application/json",
}


class KernelsPage:
    """Use as a context manager; `measure(plan)` opens the page and waits for its figures."""

    def __init__(self, overrides: dict[str, bytes] | None = None) -> None:
        """`overrides`: what to serve instead at a path, for tests."""
        self.overrides = overrides or {}
        self.figures: queue.Queue[dict[str, Any]] = queue.Queue()
        self.last_words = "the page was not opened"
        self._started = time.monotonic()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it is served."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def measure(self, plan: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the page measured by `plan` (see web/bench/kernels/page.js). Raises RuntimeError where it could not."""
        with Chromium(f"{self.address}/bench/kernels/index.html?{urlencode({'plan': json.dumps(plan)})}", webgpu=True):
            try:
                figures = self.figures.get(timeout=seconds)
            except queue.Empty:
                raise RuntimeError(f"no figures after {seconds:.0f} s; last words: {self.last_words}") from None
        if "error" in figures:
            raise RuntimeError(f"the bench's page failed: {figures['error']}; before that: {self.last_words}")
        return figures

    def progress(self, text: str) -> None:
        """A line on standard error, with the seconds since the start."""
        self.last_words = text
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(page: KernelsPage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a browser that is closed leaves connections behind
                super().handle()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/operands":
                query = parse_qs(url.query)
                pair = operands(int(query["n"][0]), query["dtype"][0])
                body = b"".join([one.data for one in pair] + [one.scales for one in pair])
                self._answer(200, body, "application/octet-stream")
                return
            found = page.overrides.get(url.path) or _file(url.path)
            if found is None:
                self._answer(404, b"", "text/plain")
            else:
                self._answer(200, found, TYPES.get(Path(url.path).suffix, "application/octet-stream"))

        def do_POST(self) -> None:
            url = urlsplit(self.path)
            if self.headers.get("Origin") != page.address:  # a page of somebody else's in another browser
                self._answer(403, b"", "text/plain")
                return
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer: dict[str, Any] = {}
            if url.path == "/product":
                query = parse_qs(url.query)
                found = error(int(query["n"][0]), query["dtype"][0], int(query["factors"][0]), body)
                answer = {"error": min(found, sys.float_info.max)}  # JSON has no infinity
            elif url.path == "/progress":
                page.progress(body.decode())
            else:
                page.figures.put(json.loads(body))
            self._answer(200, json.dumps(answer).encode(), "application/json")

        def _answer(self, status: int, body: bytes, mime: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", mime)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: standard error is the bench's."""

    return Handler


def _file(path: str) -> bytes | None:
    """/node_modules/… and /build/… lie at the root, the rest under web/. None for what is missing or lies elsewhere."""
    first, _, rest = path.lstrip("/").partition("/")
    folder, inside = (FOLDERS[first], rest) if first in FOLDERS and first else (FOLDERS[""], path.lstrip("/"))
    found = (folder / inside).resolve()
    return found.read_bytes() if found.is_file() and found.is_relative_to(folder.resolve()) else None
