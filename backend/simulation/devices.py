"""Simulated devices, honest and otherwise. One class: what it does differently is numbers in its `Manners`.

A device queues leases and computes them one after another. It keeps each result until its ACK and sends it again after
it has connected anew, as the protocol asks.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.coordinator import events as core
from backend.simulation.gateway import Connection, SimGateway, Upload
from tileweave.protocol.messages import Lease, Profile

if TYPE_CHECKING:
    from backend.simulation.world import World

QUARANTINE_S = 60.0
SILENT_S = 20.0
"""A gateway closes a socket on which nothing has been heard for this long."""


@dataclass(frozen=True, slots=True)
class Manners:
    """Chances per lease, except `flops` (true speed) and `dies_s` (when it falls silent for good)."""

    name: str
    flops: float
    lies: float = 0.0
    malformed: float = 0.0
    twice: float = 0.0
    fails: float = 0.0
    hiccup: float = 0.0
    drops_socket: float = 0.0
    forges: float = 0.0
    pauses: float = 0.0
    dies_s: float | None = None


class SimDevice:
    """One device. `profile` is what it claims; `accepted` and `rejects` stand in for the ledger."""

    def __init__(self, world: World, name: str, profile: Profile, manners: Manners, rng: random.Random) -> None:
        self.world = world
        self.name = name
        self.profile = profile
        self.manners = manners
        self.rng = rng
        self.rtt_s = rng.uniform(0.001, 0.2)
        self.accepted = 0
        self.rejects = 0
        self.gateway: SimGateway | None = None
        self.connection: Connection | None = None
        self.queue: deque[Lease] = deque()
        self.results: dict[int, tuple[str, float, bool]] = {}
        self.dead = False
        self._busy = False
        self._sockets = 0

    def connect(self) -> None:
        """Open a socket to some gateway and send again what has had no ACK."""
        if self.dead or self.connection is not None:
            return
        self._sockets += 1
        self.gateway = self.rng.choice(list(self.world.gateways.values()))
        self.connection = self.gateway.connect(self, f"{self.name}-{self._sockets}")
        for lease in list(self.results):
            self._send(lease)

    def disconnected(self, connection: str) -> None:
        """The socket closed; come back later."""
        if self.connection is None or self.connection.name != connection:
            return
        self.connection = self.gateway = None
        self.queue.clear()
        self.world.clock.after(self.rng.uniform(0.5, 3.0), self.connect)

    def die(self) -> None:
        """Fall silent for good; the gateway notices only by its pings."""
        self.dead = True
        connection, gateway = self.connection, self.gateway
        if connection is not None and gateway is not None:
            self.world.clock.after(SILENT_S, lambda: gateway.close(connection.name, "silent"))

    def blamed(self) -> None:
        """The ledger's quarantine: kicked now, let in again later."""
        self.accepted, self.rejects = 0, self.rejects + 1
        if self.connection is None or self.gateway is None:
            return
        gateway, name = self.gateway, self.connection.name
        self.connection = self.gateway = None
        self.queue.clear()
        gateway.close(name, "quarantined")
        self.world.clock.after(QUARANTINE_S * 2.0 ** (self.rejects - 1), self.connect)

    # ---- messages to it ------------------------------------------------------------------------------------------

    def leased(self, lease: Lease) -> None:
        """LEASE."""
        if not self.dead:
            self.queue.append(lease)
            self._begin()

    def acknowledged(self, lease: int) -> None:
        """ACK, whatever the verdict."""
        if self.results.pop(lease, None) is not None:
            self.accepted += 1

    def revoked(self, leases: tuple[int, ...]) -> None:
        """REVOKE."""
        self.queue = deque(lease for lease in self.queue if lease.lease not in leases)
        for lease in leases:
            self.results.pop(lease, None)

    # ---- its work ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._busy or not self.queue:
            return
        self._busy = True
        lease = self.queue.popleft()
        flop = 2 * lease.batch * lease.m * lease.n * sum(term.k for term in lease.terms)
        seconds = flop / self.manners.flops * self.rng.uniform(0.8, 1.5)
        hiccup_s = self.rng.uniform(2, 20) if self._does(self.manners.hiccup) else 0.0
        self.world.clock.after(seconds + hiccup_s, lambda: self._finish(lease, seconds))

    def _finish(self, lease: Lease, seconds: float) -> None:
        self._busy = False
        if self.dead:
            return
        manners = self.manners
        connection, gateway = self.connection, self.gateway
        if connection is not None and gateway is not None and self._does(manners.fails):
            code = self.rng.choice(["kernel", "panel", "memory"])
            gateway.tell_coordinator(lease.job, core.LeaseFail(self.name, connection.name, lease.lease, code, ""))
        elif connection is not None and gateway is not None and self._does(manners.malformed):
            fail = core.LeaseFail(self.name, connection.name, lease.lease, "unsupported", "length", bad=True)
            gateway.tell_coordinator(lease.job, fail)
        else:
            self.results[lease.lease] = (lease.job, seconds, not self._does(manners.lies))
            self._send(lease.lease)
            if self._does(manners.twice):
                self._send(lease.lease)
            if self._does(manners.forges):
                self._send(lease.lease, pretend=lease.lease + self.rng.randint(-3, 3))
        self._sometimes()
        self._begin()

    def _sometimes(self) -> None:
        connection, gateway = self.connection, self.gateway
        if connection is None or gateway is None or connection.job is None:
            return
        if self._does(self.manners.drops_socket):
            gateway.close(connection.name, "closed by the device")
        elif self._does(self.manners.pauses):
            job = connection.job
            paused = core.StatusChanged(self.name, connection.name, False, "hidden")
            ready = core.StatusChanged(self.name, connection.name, True, "")
            gateway.tell_coordinator(job, paused)
            self.world.clock.after(self.rng.uniform(0.1, 10), lambda: gateway.tell_coordinator(job, ready))

    def _send(self, lease: int, pretend: int | None = None) -> None:
        result = self.results.get(lease)
        if result is None or self.connection is None or self.gateway is None:
            return
        job, seconds, right = result
        named = lease if pretend is None else pretend
        upload = Upload(named, right and named == lease)
        claimed_s = seconds * self.rng.choice([1.0, 1.0, 1e-3, 1e3])
        self.gateway.upload(self, self.connection.name, job, upload, claimed_s)

    def _does(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance
