"""`tileweave demo` as a person runs it: whatever ends it, no process is left, and a second one is told of the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend.swarm import descendants, free_port

END_S_MAX = 60.0


def start(data_dir: Path) -> subprocess.Popen[str]:
    """The demo with its output in a pipe, on a machine without a browser."""
    environment = os.environ | {
        "PATH": "/nowhere",
        "TILEWEAVE_DATA_DIR": str(data_dir),
        "TILEWEAVE_PORT": str(free_port()),
    }
    command = [sys.executable, "-m", "backend.cli", "demo"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def demo(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that trains."""
    with start(data_dir) as process:
        seen: list[int] = []
        try:
            said = read_until(process, "step ")
            assert "No Chromium found" in said
            seen = [child.pid for child in descendants(process.pid)]
            yield process
        finally:
            process.kill()
            for pid in filter(lives, seen):
                os.kill(pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What the demo says up to the line that holds `words`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"the demo ended without {words!r}: {said}")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_though_another_follows(tmp_path: Path, first: signal.Signals) -> None:
    with demo(tmp_path) as process:
        children = [child.pid for child in descendants(process.pid)]
        process.send_signal(first)
        read_until(process, "Stopping")
        process.send_signal(signal.SIGINT)
        assert "Stopped" in process.communicate(timeout=END_S_MAX)[0]
        assert process.returncode == 130
        assert children
        assert not [pid for pid in children if lives(pid)]


def test_a_second_demo_says_which_process_is_in_its_way(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        server = next(child.pid for child in descendants(process.pid) if "serve" in child.command)
        with start(tmp_path) as second:
            said = second.communicate(timeout=END_S_MAX)[0]
        assert second.returncode == 1
        assert f"another server (process {server}) uses the data directory {tmp_path}" in said
