"""The simulated world: the real `Allocator`, gateways, coordinators and devices, and the accounts over all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.allocator.core import Allocator, TellGateway
from backend.coordinator import events as core
from backend.simulation.clock import Channel, Clock
from backend.simulation.gateway import Connection, SimGateway, Upload
from backend.switchboard.messages import (
    Assign,
    Census,
    DeviceJoined,
    DeviceLeft,
    DeviceOffline,
    JobGone,
    SlotRef,
    ToAllocator,
)

if TYPE_CHECKING:
    from backend.simulation.coordinator import SimCoordinator
    from backend.simulation.devices import SimDevice


class World:
    """Everything. `credits` is the FLOP granted to each device, `flop_due` that of all finished GEMMs,
    `uploads` what lies in slots that are not free."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = Clock()
        self.gateways: dict[str, SimGateway] = {}
        self.coordinators: dict[str, SimCoordinator] = {}
        self.devices: dict[str, SimDevice] = {}
        self.allocator = Allocator(0)
        self.uploads: dict[SlotRef, Upload] = {}
        self.credits: dict[str, int] = {}
        self.flop_due = 0
        self.events = 0
        self.slow_server = rng.random() < 0.3
        self.allocator_stream = Channel(self.clock)
        self._to_gateways = Channel(self.clock)

    def latency_s(self) -> float:
        """One hop between processes or to a device; now and then a long one."""
        return self.rng.expovariate(50) + (self.rng.uniform(0, 2) if self.rng.random() < 0.02 else 0.0)

    def work_s(self) -> float:
        """A check or a store; on a slow server sometimes seconds."""
        slow = self.slow_server and self.rng.random() < 0.1
        return self.rng.expovariate(200) + (self.rng.uniform(0, 5) if slow else 0.0)

    def credit(self, device: str, flop: int) -> None:
        """An ACK grants this FLOP."""
        self.credits[device] = self.credits.get(device, 0) + flop

    def free(self, slot: SlotRef) -> None:
        """Nobody reads the slot any more."""
        assert slot in self.uploads, f"{slot} is freed twice"
        del self.uploads[slot]

    def job_ended(self, job: str) -> None:
        """The job's last GEMM is done: its devices are free."""
        coordinator = self.coordinators.pop(job)
        self.allocate(JobGone(job=job, epoch=coordinator.machine.book.epoch))

    # ---- from the allocator --------------------------------------------------------------------------------------

    def allocate(self, message: ToAllocator) -> None:
        """The allocator gets a message; carry out what it says."""
        effects = self.allocator.handle(message, self.clock.now_s)
        self.allocator.check_invariants()
        for effect in effects:
            if isinstance(effect, TellGateway):
                self._to_gateways.send(self.latency_s(), self._assigner(effect.gateway, effect.message))
            elif (coordinator := self.coordinators.get(effect.job)) is not None:
                coordinator.stream.send(self.latency_s(), self._deliverer(effect.job, effect.message))

    def _assigner(self, gateway: str, message: Assign | Census) -> Callable[[], None]:
        def assign() -> None:
            assert isinstance(message, Assign), "nobody asked for a census"
            connection = self.gateways[gateway].connections.get(message.connection)
            if connection is not None and message.epoch > connection.epoch:
                connection.job, connection.epoch = message.job, message.epoch

        return assign

    def _deliverer(self, job: str, message: DeviceJoined | DeviceLeft) -> Callable[[], None]:
        def deliver() -> None:
            coordinator = self.coordinators.get(job)
            if coordinator is None:
                return
            if isinstance(message, DeviceLeft):
                coordinator.deliver(core.Left(message.device, message.connection, message.reason))
                return
            coordinator.deliver(core.Joined.of(message.online))

        return deliver

    # ---- from coordinators to devices ----------------------------------------------------------------------------

    def tell(self, effect: core.SendAck | core.SendRevoke, callback: Callable[[Connection], None]) -> None:
        """Say something to a device, if its connection is still there."""
        connection = self.gateways[effect.gateway].connections.get(effect.connection)
        if connection is not None:
            self._down(connection, callback)

    def push(self, job: str, effect: core.SendLease) -> None:
        """Send a lease after its missing panels; a connection that is gone is reported as such."""
        gateway = self.gateways[effect.gateway]
        connection = gateway.connections.get(effect.connection)
        if connection is None:
            gateway.tell_coordinator(job, core.Left(effect.device, effect.connection, "not connected"))
            gateway.tell_allocator(
                DeviceOffline(device=effect.device, connection=effect.connection, reason="not connected")
            )
            return
        for panel in effect.panels:
            connection.panels[panel.panel] = panel.size
        held = sum(size for panel, size in connection.panels.items() if panel.startswith(f"{job}."))
        memory = connection.device.profile.memory_bytes
        assert held <= memory, f"{effect.device} has {memory} bytes and was sent panels of {held}"
        self._down(connection, lambda there: there.device.leased(effect.lease))

    def drop(self, effect: core.DropPanels) -> None:
        """Forget panels, if the connection is still there."""
        connection = self.gateways[effect.gateway].connections.get(effect.connection)
        if connection is not None:
            for panel in effect.panels:
                connection.panels.pop(panel, None)

    def _down(self, connection: Connection, callback: Callable[[Connection], None]) -> None:
        def arrive() -> None:
            if connection.device.connection is connection:
                callback(connection)

        connection.down.send(self.latency_s(), arrive)
