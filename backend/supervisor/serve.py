"""`tileweave serve`: starts every process of the server, starts again what dies, and leaves none behind.

    supervisor (this process: allocator, job queue)
      +- valkey-server            embedded, unless TILEWEAVE_REDIS_URL names another
      +- gateway x N              on one listening socket that is bound here, once, and inherited
      +- coordinator + script     for each running job

The idea: any child may die at any instant and is started again with a growing delay; none may outlive this process,
however it ends (backend/parent.py). A stop goes from the outside in: gateways, then jobs, then Redis. Two servers never
share a data directory: the first holds a lock on it. Left out: restarting this process, which is a service manager's
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from backend.logs import configure_logging
from backend.settings import Settings, load_or_create_token
from backend.stores.database import Database
from backend.stores.jobs import Job, JobStore
from backend.supervisor.allocation import Allocation
from backend.supervisor.children import Child, ParentPipe, describe_exit, restart_delay_s
from backend.supervisor.jobs import JobQueue, JobRun
from backend.supervisor.rundir import sweep
from backend.supervisor.valkey import RedisChoice, ValkeyError, choose_redis, lock_for_start
from backend.switchboard.streams import Switchboard, SwitchboardError

BIND_S_MAX = 10.0  # a killed server's gateways need a moment to let go of the port
STEADY_S = 30.0  # a child that ran for this long starts with a clean slate
GATEWAY_STOP_S_MAX = 8.0
VALKEY_STOP_S_MAX = 10.0
LISTEN_BACKLOG = 4096

log = structlog.get_logger("supervisor")


class ServeError(RuntimeError):
    """The server cannot start; the message says what to do."""


def serve(settings: Settings) -> int:
    """Runs the server until SIGINT or SIGTERM. Returns the exit status: 0 after an ordered stop, 1 where it could not
    start or go on (the reason is on standard error)."""
    configure_logging("supervisor")
    try:
        with _data_dir_locked(settings), _listening(settings) as listener:
            asyncio.run(Supervisor(settings, listener).run())
    except (ServeError, ValkeyError, SwitchboardError, OSError) as error:
        print(f"tileweave serve: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _data_dir_locked(settings: Settings) -> Iterator[None]:
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = settings.data_dir / "lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ServeError(
                f"another server (process {file.read().strip() or 'unknown'}) uses the data directory "
                f"{settings.data_dir}: stop it, or choose another directory with TILEWEAVE_DATA_DIR"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The bound socket that all gateways inherit."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + BIND_S_MAX
        while True:
            try:
                listener.bind((settings.host, settings.port))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ServeError(
                        f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
                        "stop what listens there, or choose another with --port"
                    ) from error
                time.sleep(0.1)
        listener.listen(LISTEN_BACKLOG)
        yield listener


class Supervisor:
    """The server's processes; `run` returns when all are gone."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._pipe = ParentPipe()
        self._redis = choose_redis(settings.redis_url, settings.data_dir, settings.run_dir)
        self._environment = os.environ | settings.environment() | {"TILEWEAVE_REDIS_URL": self._redis.url}
        self._switchboard = Switchboard(self._redis.url)
        self._allocation = Allocation(self._switchboard, [str(index) for index in range(settings.gateways)])

    async def run(self) -> None:
        """Starts everything, waits for a signal, stops everything in order."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, stop.set)
        held = sweep(self._settings.run_dir)
        if held:
            log.info("run directory swept", bytes=held)
        token, is_new = load_or_create_token(self._settings)
        database = Database(self._settings.database_path)
        try:
            async with self._valkey(), self._jobs(database), self._gateways():
                self._announce(token if is_new else None)
                await stop.wait()
                log.info("stopping")
        finally:
            await self._switchboard.close()
            database.close()
            sweep(self._settings.run_dir)  # shared memory: nobody reads it any more
            self._settings.run_dir.rmdir()
        log.info("stopped")

    def _announce(self, new_token: str | None) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._settings.tls_cert else "http"
        shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host  # noqa: S104 - compared only
        lines = [
            f"Tileweave is at {scheme}://{shown}:{port}/  (leaderboard: /leaderboard, admin: /admin, API: /docs)",
            f"Redis: {self._redis.label}",
            f"Data:  {self._settings.data_dir.absolute()}",
        ]
        if new_token is not None:
            lines.append(f"Admin token, shown this once: {new_token}")
        if self._settings.admin_token is None:
            lines.append(f"The admin token is kept in {self._settings.token_path.absolute()}")
        print("\n".join(lines), file=sys.stderr, flush=True)

    # ---- the parts, each started on entry and gone on exit -----------------------------------------------------------

    @asynccontextmanager
    async def _valkey(self) -> AsyncIterator[None]:
        if self._redis.binary is None:
            log.info("redis", used=self._redis.label, version=await self._switchboard.check())
            yield
            return
        # It may have come back without its last second: have everything announced again.
        restarted = self._allocation.start_anew
        async with _kept("valkey", lambda: _start_valkey(self._redis, self._pipe), VALKEY_STOP_S_MAX, restarted):
            log.info("redis", used=self._redis.label, version=await self._switchboard.check())
            yield

    @asynccontextmanager
    async def _jobs(self, database: Database) -> AsyncIterator[None]:
        store = JobStore(database)

        def make_run(job: Job) -> JobRun:
            return JobRun(job, self._settings, store, self._switchboard, self._pipe, self._environment)

        queue = JobQueue(self._settings, store, make_run)

        async def watch() -> None:
            async for _ in self._switchboard.watch_wake():
                queue.look()

        async with running_beside(self._allocation.serve(), watch()), running_beside(queue.serve()):
            yield

    @asynccontextmanager
    async def _gateways(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for index in range(self._settings.gateways):
                name = f"gateway {index}"
                start = _gateway_starter(name, index, self._listener, self._environment, self._pipe)
                await stack.enter_async_context(_kept(name, start, GATEWAY_STOP_S_MAX))
            yield


def _gateway_starter(
    name: str, index: int, listener: socket.socket, environment: dict[str, str], pipe: ParentPipe
) -> Callable[[], Awaitable[Child]]:
    argv = [sys.executable, "-m", "backend.gateway", "--index", str(index), "--fd", str(listener.fileno())]
    return lambda: Child.start(name, argv, environment, pipe, pass_fds=[listener.fileno()])


async def _start_valkey(choice: RedisChoice, pipe: ParentPipe) -> Child:
    lock = await asyncio.to_thread(lock_for_start, choice)
    try:
        return await Child.start(
            "valkey", choice.argv(), {"PATH": os.environ.get("PATH", "")}, pipe, pass_fds=[lock],
            death_signal=signal.SIGTERM,
        )  # fmt: skip
    finally:
        os.close(lock)


@asynccontextmanager
async def _kept(
    name: str,
    start: Callable[[], Awaitable[Child]],
    stop_s_max: float,
    restarted: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """A child that is started again whenever it ends, until the block is left; then it is stopped."""
    children = [await start()]

    async def keep() -> None:
        failures = 0
        while True:
            began = time.monotonic()
            status = await children[-1].wait()
            failures = 1 if time.monotonic() - began > STEADY_S else failures + 1
            delay_s = restart_delay_s(failures)
            log.warning("a process ended and is started again", name=name, why=describe_exit(status), delay_s=delay_s)
            await asyncio.sleep(delay_s)
            children[:] = [await start()]
            if restarted is not None:
                await restarted()

    try:
        async with running_beside(keep()):
            yield
    finally:
        await children[-1].stop(stop_s_max)


@asynccontextmanager
async def running_beside(*coroutines: Awaitable[None]) -> AsyncIterator[None]:
    """Runs the coroutines beside the block; cancels and awaits them at its end. One that fails ends the block."""
    owner = asyncio.current_task()
    assert owner is not None
    failed: list[BaseException] = []

    def ended(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)
            owner.cancel()

    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if not failed:
            raise
        owner.uncancel()
    finally:
        for task in tasks:
            task.remove_done_callback(ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise failed[0]
