"""The application: the gateway's parts put together, and their life from start to stop.

`create_app` wires what needs no running loop; the lifespan opens the database and Redis, starts the fleet's loops and
tells everybody that this gateway is up, which is also how they learn that an earlier run of it is gone. A loop that
fails ends the process: its supervisor starts a fresh one, and the devices come back.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from backend.gateway import answers, devices, health, jobs, leaderboard, pages
from backend.gateway.auth import Auth
from backend.gateway.context import Gateway
from backend.gateway.courier import Courier
from backend.gateway.fleet import Fleet
from backend.gateway.live import Live
from backend.gateway.numbers import Numbers
from backend.gateway.openjobs import OpenJobs
from backend.gateway.security import Guard
from backend.gateway.slots import Slots, sweep
from backend.gateway.socket import Registrations, device_socket
from backend.settings import Settings, load_or_create_token
from backend.stores.database import Database
from backend.stores.devices import DeviceStore
from backend.stores.jobs import Job, JobStore
from backend.stores.ledger import Ledger
from backend.switchboard.messages import GatewayUp
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, coordinator_stream

STORE_THREADS = 4
FLUSH_S_MAX = 2.0
RUNNING_JOBS_TOLD_MAX = 1000
API = "/api/v1"

log = structlog.get_logger("gateway")


def create_app(settings: Settings, index: int = 0) -> FastAPI:
    """The gateway number `index` of this server. Raises ValueError without TILEWEAVE_REDIS_URL."""
    if settings.redis_url is None:
        raise ValueError("a gateway needs TILEWEAVE_REDIS_URL; `tileweave serve` starts one and sets it")
    name = str(index)
    numbers = Numbers(name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with running(settings, name, numbers) as gateway:
            app.state.gateway = gateway
            yield

    app = FastAPI(
        title="Tileweave",
        description="Train models and multiply matrices on volunteers' devices.",
        version="1",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat whatever Host the request named
        lifespan=lifespan,
    )
    token, _ = load_or_create_token(settings)
    app.state.auth = Auth(token, settings.session_s_max, settings.login_failures_per_minute_max, time.time)
    app.state.registrations = Registrations(settings.registrations_per_hour_max)
    app.add_middleware(Guard, settings=settings, numbers=numbers)
    for router in (jobs.router, devices.router, leaderboard.router, health.router):
        app.include_router(router, prefix=API)
    # Probes and scrapers look here by convention.
    app.include_router(health.router, include_in_schema=False)
    app.router.routes.append(WebSocketRoute("/ws/device", device_socket))
    answers.install(app, _error_page)
    pages.install(app, pages.web_root())
    return app


def _error_page(request: Request, status: int, detail: str) -> Response | None:
    return pages.error_page(request, status, detail) if pages.wants_page(request) else None


@asynccontextmanager
async def running(settings: Settings, name: str, numbers: Numbers) -> AsyncGenerator[Gateway, None]:
    """A gateway with everything open and its loops at work."""
    assert settings.redis_url is not None
    settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    incarnation = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    sweep(settings.run_dir, name, keep=1)
    slots = Slots(settings.run_dir / f"results-{name}-{incarnation}.bin", settings.slots_bytes_max)
    database = Database(settings.database_path)
    switchboard = Switchboard(settings.redis_url)
    courier = Courier(switchboard)
    threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
    job_store = JobStore(database)

    async def find(job: str) -> Job | None:
        return await gateway.store(job_store.get, job)

    async def render(job: str) -> dict[str, Any] | None:
        row = await find(job)
        return None if row is None else await jobs.render_job(gateway, row)

    fleet = Fleet(settings, name, switchboard, courier, slots, OpenJobs(find), numbers)
    live = Live(
        switchboard,
        render,
        settings.event_streams_max,
        settings.event_streams_per_address_max,
        settings.events_queued_max,
    )
    gateway = Gateway(
        settings, name, switchboard, job_store, DeviceStore(database), Ledger(database), fleet, live, numbers, threads
    )
    loops = [asyncio.create_task(loop) for loop in fleet.loops()]
    for loop in loops:
        loop.add_done_callback(_end_on_failure)
    try:
        await _announce(gateway, courier, incarnation)
        yield gateway
    finally:
        live.close()
        await fleet.goodbye("shutdown", "the server stops or restarts; come back", retry_s=1.0)
        await courier.flush(FLUSH_S_MAX)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await switchboard.close()
        threads.shutdown(cancel_futures=True)
        database.close()
        slots.close()


async def _announce(gateway: Gateway, courier: Courier, incarnation: str) -> None:
    up = GatewayUp(gateway=gateway.name, incarnation=incarnation)
    await courier.put(ALLOCATOR_STREAM, up)
    for job in await gateway.store(gateway.jobs.list, ["running"], RUNNING_JOBS_TOLD_MAX):
        await courier.put(coordinator_stream(job.id), up)


def _end_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a loop failed; the gateway ends and is started again", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
