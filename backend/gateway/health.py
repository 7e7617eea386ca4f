"""Liveness, readiness, and the counters for Prometheus (from this machine, or with the token)."""

from __future__ import annotations

import asyncio
import ipaddress

from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.gateway.answers import JsonResponse
from backend.gateway.auth import address_of, require_admin
from backend.gateway.context import Gateway, gateway_of
from backend.switchboard.streams import SwitchboardError

READY_S_MAX = 2.0
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for")

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return JsonResponse({"ok": True})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Redis and the database answer; 503 where one does not."""
    gateway = gateway_of(request)
    redis, database = await asyncio.gather(_redis(gateway), _database(gateway))
    ok = redis == "ok" and database == "ok"
    return JsonResponse({"ok": ok, "redis": redis, "database": database}, 200 if ok else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    if not _from_this_machine(request):
        require_admin(request)
    gateway = gateway_of(request)
    gateway.numbers.devices.set(gateway.fleet.online)
    gateway.numbers.slots.set(gateway.fleet.slots.used_bytes)
    return Response(gateway.numbers.exposition(), media_type="text/plain; version=0.0.4")


def _from_this_machine(request: Request) -> bool:
    """A loopback peer that forwards for nobody: a proxy on this machine is not a reason to open up."""
    if any(name in request.headers for name in FORWARDING_HEADERS):
        return False
    try:
        return ipaddress.ip_address(address_of(request)).is_loopback
    except ValueError:
        return False


async def _redis(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(READY_S_MAX):
            await gateway.switchboard.check()
    except (SwitchboardError, TimeoutError):
        return "no answer"
    return "ok"


async def _database(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(READY_S_MAX):
            await gateway.store(gateway.jobs.count, ["running"])
    except (OSError, RuntimeError, TimeoutError):
        return "no answer"
    return "ok"
