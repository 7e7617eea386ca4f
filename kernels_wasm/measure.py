"""Measures the WASM kernel against tfjs-backend-wasm in headless Chromium: `python kernels_wasm/measure.py`.

Chromium is a bare subprocess, because a DevTools client slows what it watches; the page (`web/bench/kernels.html`)
posts its own figures to the little server here. Prints one JSON object. Needs `npm ci` and the built kernel.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120
CHROMIUM_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Handler(SimpleHTTPRequestHandler):
    """Serves web/ and node_modules/, and takes the page's figures."""

    figures: queue.Queue[dict[str, Any]] = queue.Queue()
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}  # noqa: RUF012

    def translate_path(self, path: str) -> str:
        """/node_modules stays at the root; everything else lies under web/."""
        inside = path if path.startswith("/node_modules/") else "/web" + path
        return super().translate_path(inside)

    def do_POST(self) -> None:
        """The page's figures."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.figures.put(json.loads(body))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: standard output is the figures' alone."""


def measure(chromium: str) -> dict[str, Any]:
    """Open the bench page once and return what it measured; raises queue.Empty after TIMEOUT_S without figures."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(ROOT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/bench/kernels.html"
    with tempfile.TemporaryDirectory(prefix="tileweave-bench-", ignore_cleanup_errors=True) as profile:
        command = [chromium, *CHROMIUM_FLAGS, f"--user-data-dir={profile}", url]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return Handler.figures.get(timeout=TIMEOUT_S)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()


def main() -> int:
    """Print the figures, with the ratio that matters; exit 1 when the page failed."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if chromium is None:
        print("no Chromium found: install one (Debian: apt install chromium)", file=sys.stderr)
        return 1
    figures = measure(chromium)
    for row in figures.get("rows", []):
        row["ratio"] = row["tileweave_gflops"] / row["tfjs_gflops"]
    print(json.dumps(figures, indent=2))
    return 1 if "error" in figures else 0


if __name__ == "__main__":
    sys.exit(main())
