"""/api/v1/devices: who is here, what it computes with, and what it has given."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from starlette.responses import Response

from backend.gateway.answers import JsonResponse
from backend.gateway.context import Gateway, gateway_of, known_id
from backend.gateway.render import device_json
from backend.stores.devices import DeviceRow

router = APIRouter(tags=["devices"])


@router.get("/devices")
async def list_devices(
    request: Request,
    limit: Annotated[int, Query(ge=1)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
) -> Response:
    """Devices, last seen first."""
    gateway = gateway_of(request)
    now_s = time.time()

    def read() -> tuple[list[DeviceRow], int]:
        most = min(limit, gateway.settings.page_rows_max)
        return gateway.devices.list(most, offset, now_s), gateway.devices.count()

    rows, total = await gateway.store(read)
    live = await gateway.live_devices([row.id for row in rows])
    answer = [device_json(row, fields, now_s) for row, fields in zip(rows, live, strict=True)]
    return JsonResponse({"devices": answer, "total": total})


@router.get("/devices/{device_id}")
async def get_device(request: Request, device_id: str) -> Response:
    """One device."""
    gateway = gateway_of(request)
    row = await find_device(gateway, device_id)
    (live,) = await gateway.live_devices([row.id])
    return JsonResponse(device_json(row, live, time.time()))


async def find_device(gateway: Gateway, device_id: str) -> DeviceRow:
    """The device. Raises HTTPException 404."""
    row = await gateway.store(gateway.devices.get, known_id("device", device_id), time.time())
    if row is None:
        raise HTTPException(404, f"no device {device_id}")
    return row
