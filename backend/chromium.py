"""Headless Chromium as a plain process: the local volunteers of the demo, the benches and the system tests.

A browser driven over DevTools moves socket bytes 8 to 10 times slower, so nothing here talks to it: it gets an address
on its command line and whatever it has to say it says to a server. It has a throw-away profile folder and its own
process group, and is killed with all of that group at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-crash-reporter",
    "--mute-audio",
    # A headless page counts as hidden or occluded; its Workers must not be slowed for it.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)

# On Linux a GPU is reached through Vulkan only, which Chromium must be told. Without a GPU there is a software adapter,
# with these flags as without; --use-angle=vulkan would take it away.
VULKAN_FLAGS = ("--enable-features=Vulkan", "--disable-vulkan-surface") if sys.platform == "linux" else ()
WEBGPU_FLAGS = ("--enable-unsafe-webgpu", *VULKAN_FLAGS)


def find() -> str | None:
    """Path of an installed Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser showing `url`. Use as a context manager."""

    def __init__(self, url: str, webgpu: bool = False) -> None:
        """`webgpu`: with whatever adapter there is, a software one too; by default none."""
        executable = find()
        if executable is None:
            raise FileNotFoundError(
                f"no browser found, looked for {', '.join(NAMES)} (Debian: apt-get install chromium)"
            )
        self._profile = Path(tempfile.mkdtemp(prefix="tileweave-chromium-"))
        # Chromium's sandbox refuses to run as root, where containers and CI usually are.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        gpu = WEBGPU_FLAGS if webgpu else ("--disable-gpu",)
        self.process = subprocess.Popen(
            [executable, *FLAGS, *gpu, *sandbox, f"--user-data-dir={self._profile}", url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process (and process group) of the browser."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the browser."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill the browser and delete its profile."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
