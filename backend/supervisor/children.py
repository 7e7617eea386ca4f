"""A child process of the supervisor: started in a session of its own, watched, ended with all it started.

The idea: every child gets the read end of the supervisor's pipe (see backend/parent.py) and its own process group, so
that it ends when the supervisor dies and takes its own children along when it is stopped. What it prints either goes to
the supervisor's standard error or through a `Log`: a bounded file and its last lines in memory, for a job's reason of
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.parent import PARENT_FD, die_with_parent

LOG_BYTES_MAX = 4 << 20  # then the file is set aside as *.old.log and a new one begins
LOG_LINES_KEPT = 12
LOG_LINE_BYTES_MAX = 2000
RESTART_FIRST_S = 0.1
RESTART_S_MAX = 10.0


class ParentPipe:
    """The pipe whose end tells children that this process is gone. Kept open for as long as the process lives."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Only for a supervisor that goes on living after it ended its children (tests)."""
        os.close(self.read_fd)
        os.close(self._write_fd)


class Log:
    """What a child prints: appended to a file of bounded size; `tail` holds the last lines."""

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._tail: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._partial = b""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def tail(self) -> str:
        """The last lines printed, joined."""
        last = self._partial.decode(errors="replace").strip()
        return "\n".join([*self._tail, *([last] if last else [])])

    def feed(self, data: bytes) -> None:
        """Takes what the child printed. A full disk loses the line, not the child."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-LOG_LINE_BYTES_MAX:]
        self._tail.extend(line[:LOG_LINE_BYTES_MAX].decode(errors="replace").rstrip() for line in lines if line.strip())
        with contextlib.suppress(OSError):
            with self._path.open("ab") as file:
                file.write(data)
                size = file.tell()
            if size > self._bytes_max:
                self._path.replace(self._path.with_suffix(".old.log"))


class Child:
    """One run of one process. `name` is for logs."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Log | None) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._copying = asyncio.create_task(self._copy_output()) if log is not None else None

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        pipe: ParentPipe,
        *,
        pass_fds: Sequence[int] = (),
        death_signal: signal.Signals | None = None,
        log: Log | None = None,
        cwd: Path | None = None,
    ) -> Child:
        """Starts `argv`. With `death_signal` the kernel ends it with the supervisor, since it does not watch the pipe.
        Raises OSError where the program cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**env, PARENT_FD: str(pipe.read_fd)},
            pass_fds=(pipe.read_fd, *pass_fds),
            preexec_fn=die_with_parent(os.getpid(), death_signal) if death_signal is not None else None,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if log is not None else sys.stderr.fileno(),
            stderr=asyncio.subprocess.STDOUT if log is not None else None,
            cwd=cwd,
        )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self.process.pid

    async def wait(self) -> int:
        """The exit status, once it has ended and its output is in the log."""
        status = await self.process.wait()
        if self._copying is not None:
            # A grandchild may hold the pipe open after the child's end: it is not waited for.
            await asyncio.wait([self._copying], timeout=1.0)
        return status

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL after `grace_s`; then whatever is left of its group. Returns the exit status."""
        if self.process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
        self._signal(signal.SIGKILL)
        status = await self.wait()
        if self._copying is not None:
            self._copying.cancel()
        return status

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sign)

    async def _copy_output(self) -> None:
        assert self.process.stdout is not None
        assert self.log is not None
        while data := await self.process.stdout.read(1 << 16):
            self.log.feed(data)


def restart_delay_s(failures: int) -> float:
    """How long to wait before the start after `failures` failures in a row."""
    return min(RESTART_S_MAX, RESTART_FIRST_S * 2.0 ** min(failures - 1, 32))


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"
