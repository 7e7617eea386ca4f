"""A whole system on this machine: a server process and local volunteers. Used by the demo, the benches and the tests.

Everything here is started as a user would start it, in a process of its own, and talked to over REST only. Each child
is ended by pid; `Swarm` as a context manager leaves nothing running whatever happens inside.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TypeVar

from backend.chromium import Chromium
from backend.settings import Settings, load_or_create_token
from tileweave.rest import Client, RestError

T = TypeVar("T")
START_S_MAX = 60.0
STOP_S_MAX = 20.0
LAST_WORDS_BYTES = 1 << 16


def free_port() -> int:
    """A port of 127.0.0.1 nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, poll: Callable[[], T | None], seconds: float, every_s: float = 0.05) -> T:
    """Call `poll` until it returns something true and return that. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + seconds
    while True:
        value = poll()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the machine; `command` is its whole command line."""

    pid: int
    parent: int
    command: str


def descendants(root: int) -> list[Process]:
    """All processes below `root`, nearest first."""
    list_all = ["ps", "-ww", "-eo", "pid=,ppid=,args="]
    listing = subprocess.run(list_all, capture_output=True, text=True, check=True).stdout
    processes = []
    for line in listing.splitlines():
        pid, parent, command = line.split(None, 2)
        processes.append(Process(int(pid), int(parent), command))
    found: list[Process] = []
    level = {root}
    while level:
        below = [process for process in processes if process.parent in level]
        found += below
        level = {process.pid for process in below}
    return found


class NativeVolunteer:
    """`tileweave volunteer` as a child process with a throw-away identity."""

    def __init__(self, url: str, name: str, emulate: str | None = None) -> None:
        command = [sys.executable, "-m", "backend.cli", "volunteer", "--url", url, "--name", name]
        command += ["--workers", "1", "--identity", "none"]
        if emulate:
            command += ["--emulate", emulate]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def close(self) -> None:
        """End the process: politely, then not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Swarm:
    """A server on `data_dir` (a temporary one by default) and its local volunteers."""

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        entry: Sequence[str] = ("-m", "backend.cli", "serve"),
        log: IO[str] | None = None,
    ) -> None:
        self._stack = ExitStack()
        if data_dir is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tileweave-"))
            data_dir = Path(folder)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            **os.environ,
            "TILEWEAVE_DATA_DIR": str(data_dir),
            "TILEWEAVE_HOST": "127.0.0.1",
            "TILEWEAVE_PORT": str(self.port),
            **(environment or {}),
        }
        self.settings = Settings(data_dir=data_dir, port=self.port)
        self.token = load_or_create_token(self.settings)[0]
        self.log = log or (data_dir / "serve.log").open("a")
        self._entry = [sys.executable, *entry]
        self.client = self._stack.enter_context(Client(self.url, self.token))
        self._volunteers: list[Chromium | NativeVolunteer] = []
        self.process = self._spawn()  # last: whatever goes wrong before leaves no process

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches us alone, and we stop the parts in order.
        return subprocess.Popen(
            self._entry,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Return once the server answers /readyz. Raises RuntimeError where it ended instead."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self._last_words()} (the server's log is {self.log.name})")
            try:
                return self.client.ready()
            except RestError:
                return False

        wait_for("the server to be ready", ready, START_S_MAX)

    def _last_words(self) -> str:
        """Why the server ended, in its own words. The log may be that of another server too, with its lines last."""
        with Path(self.log.name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        words = [line for line in lines if line.startswith("tileweave serve: ")]
        return words[-1] if words else f"the server ended with code {self.process.returncode}"

    def restart_server(self) -> None:
        """Start the server again on the same data and port, after it was killed."""
        self.process.wait(STOP_S_MAX)
        self.process = self._spawn()
        self.wait_ready()

    def pids(self, role: str) -> list[int]:
        """Processes of the server whose command line holds `role`, e.g. "backend.gateway"."""
        return [process.pid for process in descendants(self.process.pid) if role in process.command]

    def add_browser(self, name: str, threads: int = 1) -> Chromium:
        """A volunteer in headless Chromium, with a throw-away identity."""
        return self.add_page(f"{self.url}/?autostart=1&throwaway=1&threads={threads}&name={name}")

    def add_page(self, url: str) -> Chromium:
        """A browser showing any page, ended with the swarm."""
        browser = Chromium(url)
        self._volunteers.append(browser)
        return browser

    def add_native(self, name: str, emulate: str | None = None, url: str | None = None) -> NativeVolunteer:
        """A native volunteer with one worker."""
        volunteer = NativeVolunteer(url or self.url, name, emulate)
        self._volunteers.append(volunteer)
        return volunteer

    def wait_devices(self, count: int, seconds: float = 60.0) -> None:
        """Return once `count` devices are online."""
        wait_for(
            f"{count} devices to come online",
            lambda: sum(device["online"] for device in self.client.devices()) >= count,
            seconds,
        )

    def close(self) -> None:
        """End the volunteers, then the server; kill it only if it does not stop by itself."""
        for volunteer in self._volunteers:
            volunteer.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                for process in descendants(self.process.pid):
                    os.kill(process.pid, signal.SIGKILL)
                self.process.kill()
                self.process.wait()
        self._stack.close()
        self.log.close()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
