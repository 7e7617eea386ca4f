"""What the routes share: the stores, the switchboard and the fleet of one running gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fastapi import HTTPException
from starlette.requests import HTTPConnection

from backend.gateway.fleet import Fleet
from backend.gateway.live import Live
from backend.gateway.numbers import Numbers
from backend.settings import Settings
from backend.stores.devices import DeviceStore
from backend.stores.jobs import JobStore
from backend.stores.ledger import Ledger
from backend.switchboard.streams import Switchboard, SwitchboardError

LIVE_S_MAX = 1.0  # a page is shown without live figures rather than late

P = ParamSpec("P")
T = TypeVar("T")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Gateway:
    """One running gateway. `threads` run the stores' blocking calls, each thread with a connection of its own."""

    settings: Settings
    name: str
    switchboard: Switchboard
    jobs: JobStore
    devices: DeviceStore
    ledger: Ledger
    fleet: Fleet
    live: Live
    numbers: Numbers
    threads: ThreadPoolExecutor

    async def store(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A blocking call of a store, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(call, *args, **kwargs))

    async def live_jobs(self, jobs: Sequence[str]) -> list[dict[str, Any]]:
        """The jobs' live fields; {} for each where Redis does not answer at once."""
        try:
            async with asyncio.timeout(LIVE_S_MAX):
                return await self.switchboard.job_live(jobs)
        except (SwitchboardError, TimeoutError):
            return [{} for _ in jobs]

    async def live_devices(self, devices: Sequence[str]) -> list[dict[str, Any]]:
        """The devices' live fields; {} for one that is offline, or where Redis does not answer at once."""
        try:
            async with asyncio.timeout(LIVE_S_MAX):
                return await self.switchboard.device_live(devices)
        except (SwitchboardError, TimeoutError):
            return [{} for _ in devices]


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request or socket."""
    gateway: Gateway = connection.app.state.gateway
    return gateway


def known_id(what: str, value: str) -> str:
    """`value`, if it can be an id at all. Raises HTTPException 404."""
    if not _ID.fullmatch(value):
        raise HTTPException(404, f"no {what} of this id; ids are up to 64 letters, digits, - and _")
    return value
