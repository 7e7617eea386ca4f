"""A real Valkey for tests: the embedded one, started as `serve` starts it, in a short temporary directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from backend.supervisor.valkey import choose_redis, lock_for_start


class ValkeyServer:
    """One server that a test may kill and start again on the same data."""

    def __init__(self, directory: Path) -> None:
        self.choice = choose_redis(None, directory, directory / "run")
        self.url = self.choice.url
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *extra: str) -> None:
        lock = lock_for_start(self.choice)
        self.process = subprocess.Popen([*self.choice.argv(), *extra], pass_fds=(lock,), stdout=subprocess.DEVNULL)
        os.close(lock)
        deadline = time.monotonic() + 20.0
        with Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except (RedisError, OSError):
                    assert time.monotonic() < deadline, "Valkey did not start within 20 s"
                    assert self.process.poll() is None, f"Valkey ended with {self.process.returncode}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """A running Valkey; `.url` for redis-py."""
    directory = Path(tempfile.mkdtemp(prefix="tw-"))  # pytest's own paths are too long for a socket
    server = ValkeyServer(directory)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()
        shutil.rmtree(directory)
