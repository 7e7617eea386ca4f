"""Serves the peer's page (web/bench/peer.html) and tfjs from node_modules on a port of its own, and takes its figure.

A development tool: tfjs is a development dependency and no part of the product serves or loads it.
"""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "web" / "bench"
TFJS = ROOT / "node_modules" / "@tensorflow"
TYPES = {".html": "text/html", ".js": "text/javascript", ".wasm": "application/wasm"}


class PeerServer:
    """Use as a context manager; `url(...)` is the page, `figure()` waits for what it posts."""

    def __init__(self) -> None:
        if not TFJS.is_dir():
            raise FileNotFoundError(f"{TFJS} is missing: the peer comes from npm, run `make install` with npm present")
        self._figures: queue.Queue[dict[str, Any]] = queue.Queue()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        figures = self._figures

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = Path(urlsplit(self.path).path).name
                found = [
                    path
                    for folder in (PAGES, TFJS / "tfjs-core" / "dist", TFJS / "tfjs-backend-wasm" / "dist")
                    if (path := folder / name).is_file()
                ]
                if not found:
                    self.send_error(404)
                    return
                body = found[0].read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", TYPES.get(found[0].suffix, "application/octet-stream"))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                figures.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: standard error is the bench's."""

        return Handler

    def url(self, n: int, runs: int, following: str) -> str:
        """The page that times an n x n matmul `runs` times and then goes to `following`."""
        query = urlencode({"n": n, "runs": runs, "next": following})
        return f"http://127.0.0.1:{self._server.server_port}/peer.html?{query}"

    def figure(self, seconds: float) -> dict[str, Any]:
        """What the page posted: n, backend, seconds of each run. Raises queue.Empty after `seconds`."""
        return self._figures.get(timeout=seconds)

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
