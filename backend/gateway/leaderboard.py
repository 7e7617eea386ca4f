"""/api/v1/leaderboard: devices by recent average, total or today's credit."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from backend.gateway.answers import JsonResponse
from backend.gateway.context import gateway_of
from backend.gateway.render import leader_json
from backend.stores.devices import Order

router = APIRouter(tags=["leaderboard"])


@router.get("/leaderboard")
async def leaderboard(
    request: Request,
    by: Literal["device"] = "device",
    order: Order = "rac",
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
) -> Response:
    """One page of a board; ties keep a stable order."""
    gateway = gateway_of(request)
    rows, total = await gateway.store(gateway.devices.leaderboard, order, limit, offset, time.time())
    live = await gateway.live_devices([row.id for row in rows])
    answer = [leader_json(row, bool(fields)) for row, fields in zip(rows, live, strict=True)]
    return JsonResponse(
        {"by": by, "order": order, "total": total, "limit": limit, "offset": offset, "rows": answer},
        headers={"Cache-Control": "no-store"},
    )
