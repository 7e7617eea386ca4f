"""The shell around the coordinator's core: events in from sockets, threads and ticks; effects out to them.

Everything here runs on the event loop; what takes time goes to the check threads or the store thread, whose answers
come back as events. The first error that nobody can handle ends the process (`fatal`): the supervisor then starts the
job again from its last checkpoint, which is the one way to recover that has to work anyway.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import structlog

from backend.coordinator import events as core
from backend.coordinator.fleet import MachineLimits
from backend.coordinator.machine import Machine
from backend.jobs.books import Books
from backend.jobs.counters import Counters
from backend.jobs.maps import Maps, RegionError
from backend.jobs.outbox import Outbox
from backend.jobs.products import Product as Assembly
from backend.jobs.requests import Requested, read_request
from backend.jobs.translate import event_of, messages_of
from backend.settings import Settings
from backend.stores.ledger import Ledger
from backend.switchboard import messages as wire
from backend.switchboard.streams import Switchboard, coordinator_stream, gateway_stream
from backend.verify import normwise
from backend.verify.verifier import Verifier
from planner.shapes import PlanLimits
from tileweave.conversions import floats
from tileweave.protocol.elements import WIRES, Elements, Wire, result_bytes
from tileweave.protocol.messages import TEXT_CHARACTERS_MAX, Accuracy
from tileweave.script.wire import GemmFailed, GemmRequest, Product, Region, ToScript

CHECK_THREADS_MAX = 4
log = structlog.get_logger("coordinator")


class Shell:
    """One job's epoch. `tell_script` sends a message to the script, `gemm_done` gets each product's figures."""

    def __init__(
        self,
        job: str,
        epoch: int,
        accuracy: Accuracy,
        wire_name: Wire,
        settings: Settings,
        switchboard: Switchboard,
        ledger: Ledger,
        counters: Counters,
        tell_script: Callable[[ToScript], None],
        gemm_done: Callable[[dict[str, Any]], None],
    ) -> None:
        plan = PlanLimits(panel_bytes_max=settings.panel_bytes_max, result_bytes_max=settings.result_bytes_max)
        limits = MachineLimits(plan=plan, leases_per_device_max=settings.leases_per_device_max)
        run_dir = settings.run_dir.absolute()
        self.job = job
        self.machine = Machine(job, epoch, limits)
        self._accuracy: Accuracy = accuracy
        self._elements: Elements = WIRES[wire_name]
        self.counters = counters
        self.outbox = Outbox(switchboard, coordinator_stream(job))
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._switchboard = switchboard
        self._ledger = ledger
        self._tell_script = tell_script
        self._gemm_done = gemm_done
        self._slots = Maps(run_dir)
        self._operands = Maps(run_dir / "jobs" / job)
        self._results = Maps(run_dir / "jobs" / job, writable=True)
        self._products: dict[int, Assembly] = {}  # of each open GEMM
        self.books = Books(ledger, job, epoch, self._slots, self._products.get, self._elements.results)
        self._verifier = Verifier()
        self._checkers = ThreadPoolExecutor(max(1, min(CHECK_THREADS_MAX, (os.cpu_count() or 1) - 1)), "check")
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: core.Event) -> None:
        """One event through the core; its effects are under way when this returns."""
        match event:
            case core.ResultArrived():
                self.counters.arrived(event)
            case core.GatewayRestarted():
                self.outbox.forget_gateway(event.gateway)
            case _:
                pass
        effects = self.machine.handle(event, time.monotonic())
        if isinstance(event, core.Left | core.GatewayRestarted):
            self.counters.gone({device.connection for device in self.machine.book.devices.values()})
        for effect in effects:
            self._carry_out(effect)

    def receive(self, entry: str, messages: list[wire.ToCoordinator]) -> None:
        """One entry of the job's stream."""
        slots = [message.slot for message in messages if isinstance(message, wire.ResultReady)]
        self.outbox.opened(entry, slots)
        for message in messages:
            if isinstance(message, wire.DeviceJoined) and message.epoch != self.machine.book.epoch:
                continue  # meant for an earlier run of this job
            event = event_of(message)
            if event is not None:
                self.handle(event)

    def submit(self, request: GemmRequest) -> None:
        """The script wants a product. One that cannot be read or has impossible sizes is answered at once."""
        try:
            if request.id in self._products:
                raise RegionError(f"GEMM {request.id} is open already")
            read = read_request(request, self.job, self._elements, self._operands, self._results)
        except RegionError as error:
            self._tell_script(GemmFailed(id=request.id, reason=str(error)))
            return
        self._products[request.id] = read.c
        self._verifier.open_gemm(request.id, read.a, read.bt, self._elements.results)
        self.counters.submitted(request.id, read.event.shape)
        if self._accuracy == "normwise" and read.event.shape.parts == 1:
            self.spawn(self._choose_accuracy(read))
        else:
            self.handle(read.event)

    async def _choose_accuracy(self, read: Requested) -> None:
        event = read.event

        def suits() -> bool:
            a = read.a.read(0, event.batch, 0, event.m, 0, event.k)
            return normwise.suits(a, read.bt.read(0, event.batch, 0, event.n, 0, event.k))

        if await asyncio.get_running_loop().run_in_executor(self._checkers, suits):
            event = replace(event, accuracy="normwise")
        self.handle(event)

    def live(self) -> dict[str, Any]:
        """What the job's page shows now."""
        seen = self.machine.progress()
        return self.counters.live(time.monotonic()) | {"devices": seen.devices, "waiting": seen.waiting or None}

    def device_speeds(self) -> dict[str, dict[str, float]]:
        """What the core measured of each device it has had good results from, as its plans use it."""
        return {
            name: {"measured_flops": d.planned().flops} for name, d in self.machine.book.devices.items() if d.measured
        }

    def publish(self, event: str, data: dict[str, Any]) -> None:
        """A live event for whoever watches."""
        self.spawn(self._switchboard.publish_live(self.job, event, data))

    def goodbye(self) -> None:
        """The job ends here: nothing it leased or sent is needed any more."""
        for device in self.machine.book.devices.values():
            stream = gateway_stream(device.gateway)
            if device.out:
                revoke = wire.RevokeLeases(
                    device=device.device, connection=device.connection, job=self.job, leases=list(device.out)
                )
                self.outbox.put(stream, revoke)
            if device.held:
                drop = wire.DropPanels(device=device.device, connection=device.connection, panels=list(device.held))
                self.outbox.put(stream, drop)

    async def settle(self) -> None:
        """Returns when all that was spawned so far is done: checks, records, live events."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Waits for what is under way on threads and lets them go."""
        self._checkers.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: core.Effect) -> None:
        for stream, message in messages_of(effect, self.job):
            self.outbox.put(stream, message)
        match effect:
            case core.SendLease():
                self.counters.leased(effect)
            case core.FreeSlot():
                self.outbox.freed(effect.slot)
            case core.DropPanels():
                self.counters.dropped(effect)
            case core.PrepareCheck():
                self.spawn(self._prepare(effect))
            case core.StartCheck():
                self.spawn(self._check(effect))
            case core.Store():
                self.books.store(effect, lambda credited: self._stored(effect, credited))
            case core.Blame():
                self.spawn(self._blame(effect))
            case core.GemmDone():
                product = self._close_gemm(effect.gemm)
                self._gemm_done(self.counters.gemm_done(effect))
                if product.partial:
                    self.spawn(self._finish(effect.gemm, product))
                else:
                    self._tell_script(Product(id=effect.gemm))
            case core.GemmFailed():
                self._close_gemm(effect.gemm)
                self.counters.gemm_failed(effect.gemm)
                self._tell_script(GemmFailed(id=effect.gemm, reason=effect.reason))
            case core.LeaseLost():
                log.info("lease lost", device=effect.device, lease=effect.lease, why=effect.why)
                self.publish("lease_lost", asdict(effect))
            case _:
                pass

    def _close_gemm(self, gemm: int) -> Assembly:
        self._verifier.close_gemm(gemm)
        return self._products.pop(gemm)

    async def _finish(self, gemm: int, product: Assembly) -> None:
        await asyncio.get_running_loop().run_in_executor(self._checkers, product.finish)
        self._tell_script(Product(id=gemm))

    def _stored(self, effect: core.Store, credited: bool) -> None:
        if credited:
            self.counters.stored(effect.device, effect.flop, time.monotonic())
        self.handle(core.Stored(effect.lease, credited))

    async def _prepare(self, effect: core.PrepareCheck) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._checkers, self._verifier.prepare, effect.gemm, effect.rect)

    async def _check(self, effect: core.StartCheck) -> None:
        checked = await asyncio.get_running_loop().run_in_executor(self._checkers, self._verdict, effect)
        if checked.verdict is not core.Check.GOOD:
            log.warning("result not accepted", lease=effect.lease, verdict=checked.verdict.value, why=checked.detail)
        self.handle(checked)

    def _verdict(self, effect: core.StartCheck) -> core.Checked:
        rect, slot = effect.rect, effect.slot
        dtype = self._elements.results
        expected = result_bytes(rect.elements, dtype)
        if slot.size != expected:
            return core.Checked(effect.lease, core.Check.BAD, f"{slot.size} bytes, expected {expected}")
        data = self._slots.bytes(Region(path=slot.path, offset=slot.offset, size=slot.size), expected)
        tile = floats(data, rect.elements, dtype).reshape(rect.batch, rect.m, rect.n)
        try:
            verdict = self._verifier.check(effect.gemm, rect, tile, effect.accuracy)
        except LookupError:
            return core.Checked(effect.lease, core.Check.GOOD)  # the GEMM has ended: what is said counts for nothing
        return core.Checked(effect.lease, verdict.kind, verdict.detail)

    async def _blame(self, effect: core.Blame) -> None:
        """The reject goes into the ledger, in order; then the device is sent away for as long as that says."""
        now_s = time.time()
        until_s: list[float] = []

        def record() -> None:
            standing = self._ledger.blame(effect.device, self.job, effect.reason, now_s)
            until_s.append(standing.quarantined_until_s)

        await self.books.call(record)
        log.warning("device blamed", device=effect.device, lease=effect.lease, reason=effect.reason)
        kick = wire.Kick(
            device=effect.device, connection=effect.connection, code="quarantined",
            reason=effect.reason[:TEXT_CHARACTERS_MAX], retry_s=max(0.0, until_s[0] - now_s),
        )  # fmt: skip
        self.outbox.put(gateway_stream(effect.gateway), kick)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside the rest; an error in it is fatal."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.fatal.done():
            self.fatal.set_exception(error)
