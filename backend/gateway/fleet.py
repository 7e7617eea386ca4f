"""All device connections of this gateway, and its conversation with the other processes.

Three loops: one reads the gateway's stream and hands each message to its connection, one is the clock of all
connections (PING, silence, stalls, live figures), one looks for jobs that have ended, so that no device waits for an
answer and no slot for a release that will never come. A message for a connection that is gone is answered with
`DeviceOffline` once more: whoever sent it has missed it.

Left out: letting devices in (`socket.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from backend.gateway.connection import Connection
from backend.gateway.courier import RETRY_S, Courier
from backend.gateway.maps import Maps, PanelSource
from backend.gateway.numbers import Numbers
from backend.gateway.openjobs import OpenJobs
from backend.gateway.slots import Slot, Slots
from backend.settings import Settings
from backend.switchboard.messages import (
    Acknowledge,
    Assign,
    Census,
    DeviceOffline,
    DropPanels,
    Kick,
    PanelRef,
    Push,
    Release,
    RevokeLeases,
    SlotRef,
    SwitchMessage,
    ToGateway,
)
from backend.switchboard.streams import (
    ALLOCATOR_STREAM,
    Switchboard,
    SwitchboardError,
    coordinator_stream,
    gateway_stream,
)
from tileweave.protocol import ByeCode

LIVE_EVERY_S = 5.0  # refresh of the devices' live figures, which expire after 30 s
SWEEP_EVERY_S = 1.0
GOODBYE_S_MAX = 2.0
RESENT_SHARE = 4  # of the upload slots, one part in so many is for results that are sent again after a reconnect

log = structlog.get_logger("gateway")


class Fleet:
    """The house of all connections; see `ports.House` for what they ask of it."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        switchboard: Switchboard,
        courier: Courier,
        slots: Slots,
        open_jobs: OpenJobs,
        numbers: Numbers,
    ) -> None:
        self.settings = settings
        self.name = name
        self.slots = slots
        self._switchboard = switchboard
        self._courier = courier
        self._maps = Maps(settings.run_dir, settings.maps_max)
        self._open_jobs = open_jobs
        self._numbers = numbers
        self._connections: dict[str, Connection] = {}
        self._addresses: Counter[str] = Counter()
        self._left = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._filled: dict[int, tuple[str, float]] = {}  # slot -> (job, since), complete and not released
        self._slot_jobs: dict[int, str] = {}
        self._resent: dict[int, int] = {}  # slot -> size, of results whose lease this gateway does not know

    # ---- who is here -------------------------------------------------------------------------------------------------

    @property
    def online(self) -> int:
        """Devices connected."""
        return len(self._connections)

    @asynccontextmanager
    async def door(self, address: str) -> AsyncGenerator[str | None, None]:
        """Counts a socket of `address` while it is open; gives the reason where it is one too many."""
        refusal = None
        if sum(self._addresses.values()) >= self.settings.connections_max:
            refusal = f"the server has its {self.settings.connections_max} connections"
        elif self._addresses[address] >= self.settings.devices_per_address_max:
            refusal = (
                f"your address has {self.settings.devices_per_address_max} devices connected, the most it may have"
            )
        if refusal is not None:
            yield refusal
            return
        self._addresses[address] += 1
        try:
            yield None
        finally:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    @asynccontextmanager
    async def member(self, connection: Connection) -> AsyncGenerator[None, None]:
        """The device is online while this lasts. An earlier connection of the same device is replaced."""
        device = connection.identity.device
        await self._replace_elsewhere(device)
        before = self._connections.get(device)
        if before is not None:
            before.finish("replaced", "this device connected again")
        self._connections[device] = connection
        await self._courier.put(ALLOCATOR_STREAM, connection.online(self.name))
        await self._show({device: connection.live(self.name)})
        try:
            yield
        finally:
            last = self._connections.get(device) is connection
            if last:
                del self._connections[device]
                self._left.set()
            await self._tell_offline(connection)
            if last:
                await self._forget(device)

    async def _replace_elsewhere(self, device: str) -> None:
        try:
            live = (await self._switchboard.device_live([device]))[0]
        except SwitchboardError:
            return
        gateway, connection = live.get("gateway"), live.get("connection")
        if gateway and connection and gateway != self.name:
            kick = Kick(device=device, connection=connection, code="replaced", reason="this device connected again")
            await self._courier.put(gateway_stream(gateway), kick)

    async def _tell_offline(self, connection: Connection) -> None:
        identity = connection.identity
        gone = DeviceOffline(device=identity.device, connection=identity.connection, reason=connection.end_reason)
        await self._courier.put(ALLOCATOR_STREAM, gone)
        if connection.job is not None:
            await self._courier.put(coordinator_stream(connection.job), gone)

    async def _show(self, live: dict[str, dict[str, Any]]) -> None:
        try:
            await self._switchboard.set_devices_live(live)
        except SwitchboardError as error:
            log.warning("live figures not written", error=str(error))

    async def _forget(self, device: str) -> None:
        try:
            live = (await self._switchboard.device_live([device]))[0]
            if live.get("gateway") in (None, self.name):
                await self._switchboard.drop_device_live(device)
        except SwitchboardError as error:
            log.warning("live figures not removed", error=str(error))

    # ---- what connections ask (ports.House) --------------------------------------------------------------------------

    async def tell_job(self, job: str, message: SwitchMessage) -> None:  # noqa: D102
        await self._courier.put(coordinator_stream(job), message)

    def offer_job(self, job: str, message: SwitchMessage) -> None:  # noqa: D102
        self._courier.offer(coordinator_stream(job), message)

    async def takes_results(self, job: str) -> bool:  # noqa: D102
        return await self._open_jobs.is_open(job)

    async def take_slot(self, size: int, job: str, leased: bool) -> Slot | None:  # noqa: D102
        try:
            async with asyncio.timeout(self.settings.slot_wait_s_max):
                while (slot := self._slot(size, leased)) is None:
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
        except TimeoutError:
            return None
        self._slot_jobs[slot.number] = job
        if not leased:
            self._resent[slot.number] = size
        return slot

    def _slot(self, size: int, leased: bool) -> Slot | None:
        """A slot if there is room. The size of a result that is sent again is the device's word alone: such results
        share a part of the slots, so that claims without leases cannot keep leased results out."""
        share_bytes = self.slots.total_bytes // RESENT_SHARE
        if not leased and self._resent and sum(self._resent.values()) + size > share_bytes:
            return None
        return self.slots.take(size)

    def slot_view(self, slot: Slot) -> memoryview:  # noqa: D102
        return self.slots.view(slot)

    def slot_ref(self, slot: Slot) -> SlotRef:  # noqa: D102
        return self.slots.ref(slot, self.name)

    def slot_filled(self, slot: Slot) -> None:  # noqa: D102
        self._filled[slot.number] = (self._slot_jobs[slot.number], time.monotonic())
        self._numbers.results.inc()

    def free_slot(self, slot: Slot) -> None:  # noqa: D102
        self._release(slot.number)

    def panel(self, ref: PanelRef) -> PanelSource:  # noqa: D102
        return self._maps.panel(ref)

    def count(self, direction: str, size: int) -> None:  # noqa: D102
        self._numbers.device_bytes[direction].inc(size)

    def _release(self, number: int) -> None:
        self._filled.pop(number, None)
        self._slot_jobs.pop(number, None)
        self._resent.pop(number, None)
        if self.slots.give_back(number):
            self._slot_freed.set()

    # ---- the stream --------------------------------------------------------------------------------------------------

    async def read_stream(self) -> None:
        """Hands on what the other processes say, for ever."""
        stream = gateway_stream(self.name)
        while True:
            try:
                entries: AsyncGenerator[tuple[str, list[Any]], None] = self._switchboard.receive(stream, ToGateway)
                async for entry, messages in entries:
                    for message in messages:
                        await self._one(message)
                    await self._switchboard.ack(stream, entry)
            except SwitchboardError as error:
                log.error("cannot read from Redis, trying again", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _one(self, message: Any) -> None:
        match message:
            case Release(slots=slots):
                for number in slots:
                    self._release(number)
            case Census():
                for connection in self._connections.values():
                    await self._courier.put(ALLOCATOR_STREAM, connection.online(self.name))
            case _:
                await self._to_connection(message)

    async def _to_connection(self, message: Push | Acknowledge | RevokeLeases | DropPanels | Assign | Kick) -> None:
        connection = self._connections.get(message.device)
        if connection is None or connection.identity.connection != message.connection:
            if isinstance(message, Push | Assign):
                await self._deny(message)
            return
        match message:
            case Push():
                connection.push(message)
            case Acknowledge(ack=ack):
                connection.acknowledge(ack)
            case RevokeLeases(job=job, leases=leases):
                await connection.revoke(job, leases)
            case DropPanels(panels=panels):
                connection.drop(panels)
            case Assign(job=job, epoch=epoch):
                connection.assign(job, epoch)
            case Kick(code=code, reason=reason, retry_s=retry_s):
                connection.finish(code, reason, retry_s)

    async def _deny(self, message: Push | Assign) -> None:
        gone = DeviceOffline(device=message.device, connection=message.connection, reason="not connected")
        job = message.lease.job if isinstance(message, Push) else message.job
        if job is not None:
            await self._courier.put(coordinator_stream(job), gone)
        await self._courier.put(ALLOCATOR_STREAM, gone)

    # ---- the clocks --------------------------------------------------------------------------------------------------

    async def clock(self) -> None:
        """Ticks every connection each `ping_s`, and refreshes what the pages show."""
        shown_s = time.monotonic()
        while True:
            await asyncio.sleep(self.settings.ping_s)
            now_s = time.monotonic()
            for connection in list(self._connections.values()):
                connection.tick(now_s)
            if now_s - shown_s >= LIVE_EVERY_S:
                shown_s = now_s
                await self._show({device: item.live(self.name) for device, item in self._connections.items()})

    async def sweep(self) -> None:
        """Answers for jobs that have ended, and takes back slots that nobody released."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            connections = list(self._connections.values())
            jobs = {job for job, _ in self._filled.values()}.union(*(item.session.jobs() for item in connections))
            ended = [job for job in jobs if not await self._open_jobs.is_open(job)]
            for job in ended:
                for connection in connections:
                    await connection.job_ended(job)
            now_s = time.monotonic()
            for number, (job, since_s) in list(self._filled.items()):
                if job in ended or now_s - since_s > self.settings.slot_held_s_max:
                    self._release(number)

    async def goodbye(self, code: ByeCode, reason: str, retry_s: float) -> None:
        """Ends all connections in order."""
        for connection in self._connections.values():
            connection.finish(code, reason, retry_s)
        try:
            async with asyncio.timeout(GOODBYE_S_MAX):
                while self._connections:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            log.warning("connections left open", count=len(self._connections))

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What must run for as long as the gateway does."""
        return [self.read_stream(), self.clock(), self.sweep(), self._courier.run()]
