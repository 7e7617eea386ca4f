"""A simulated gateway process: sockets of devices, result slots, and messages in order to coordinators and allocator.

A restart forgets every socket. A slot's number is never used twice, and its file outlives the run that wrote it, so
that a result under check survives its gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.coordinator import events as core
from backend.simulation.clock import Channel
from backend.switchboard.messages import DeviceOffline, DeviceOnline, GatewayUp, SlotRef, ToAllocator

if TYPE_CHECKING:
    from backend.simulation.devices import SimDevice
    from backend.simulation.world import World


@dataclass(slots=True)
class Upload:
    """What lies in a slot: the result of which lease, and whether it is right."""

    lease: int
    right: bool


@dataclass
class Connection:
    """A device's socket: the job it serves, and what it was sent and not told to drop, in bytes by panel."""

    name: str
    device: SimDevice
    down: Channel
    job: str | None = None
    epoch: int = 0
    panels: dict[str, int] = field(default_factory=dict)


class SimGateway:
    """One gateway process; `restart` forgets every socket."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 0
        self.connections: dict[str, Connection] = {}
        self._last_slot = 0

    def restart(self) -> None:
        """Die, and come back at once as the next incarnation."""
        gone = list(self.connections.values())
        self.connections.clear()
        self.incarnation += 1
        up = GatewayUp(gateway=self.name, incarnation=str(self.incarnation))
        self.tell_allocator(up)
        for job in list(self.world.coordinators):
            self.tell_coordinator(job, core.GatewayRestarted(self.name))
        for connection in gone:
            connection.device.disconnected(connection.name)

    def connect(self, device: SimDevice, connection: str) -> Connection:
        """A device said HELLO."""
        made = Connection(connection, device, Channel(self.world.clock))
        self.connections[connection] = made
        self.tell_allocator(
            DeviceOnline(
                device=device.name,
                connection=connection,
                gateway=self.name,
                profile=device.profile,
                rtt_s=device.rtt_s,
                accepted=device.accepted,
                rejects=device.rejects,
            )
        )
        return made

    def close(self, connection: str, reason: str) -> None:
        """The socket closed, from whichever side."""
        made = self.connections.pop(connection, None)
        if made is None:
            return
        if made.job is not None:
            self.tell_coordinator(made.job, core.Left(made.device.name, connection, reason))
        self.tell_allocator(DeviceOffline(device=made.device.name, connection=connection, reason=reason))
        made.device.disconnected(connection)

    def upload(self, device: SimDevice, connection: str, job: str, upload: Upload, seconds: float) -> None:
        """A complete RESULT: into a free slot, and its event on the way."""
        if job not in self.world.coordinators:
            return
        self._last_slot += 1
        slot = SlotRef(self.name, self._last_slot, f"{self.name}-{self.incarnation}", 0, 0)
        self.world.uploads[slot] = upload
        event = core.ResultArrived(device.name, connection, upload.lease, seconds, self.world.latency_s(), slot)
        self.tell_coordinator(job, event)

    def tell_allocator(self, message: ToAllocator) -> None:
        """Into its stream, which keeps the order in which all senders wrote."""
        self.world.allocator_stream.send(self.world.latency_s(), lambda: self.world.allocate(message))

    def tell_coordinator(self, job: str, event: core.Event) -> None:
        """Into its stream, which keeps the order in which all senders wrote."""
        coordinator = self.world.coordinators.get(job)
        if coordinator is not None:
            coordinator.stream.send(self.world.latency_s(), lambda: coordinator.deliver(event))
