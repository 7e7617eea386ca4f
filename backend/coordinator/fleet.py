"""What the core knows of a device of its job: standing, speed, what it holds, and what it may be given.

Speeds begin as the device's claims, clamped, and then follow what the server sees, as moving averages. A kernel time
that a device reports is believed only where it is shorter than the server's own span; and since it could be reported
too short, `lag` compares whole leases with their prediction by the server's clock alone and slows the device in every
later plan. So a claim can win a device some tiles, never a queue.

Memory is planned, not asked: panels sent and not dropped, plus results not yet acknowledged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from backend.coordinator.events import Joined
from backend.coordinator.records import LeaseRecord
from planner.shapes import Device, PlanLimits

SMOOTHING = 0.3
"""Weight of a new measurement in the moving averages."""

JITTER_S = 0.02
"""Lateness below this is the server's own noise and never slows a device in the plans."""

LINK_BYTES_MIN = 64 << 10
"""Transfers smaller than this say nothing about a link's rate."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The coordinator core's limits; see the machine's theory of operation for how they act."""

    plan: PlanLimits = field(default_factory=PlanLimits)
    leases_per_device_max: int = 8
    leases_new_device_max: int = 2  # until `accepted_trusted` results were accepted
    accepted_trusted: int = 8
    trials_max: int = 4  # first leases of a device of unknown links, given whatever the defaults predict
    leases_per_tile_max: int = 2  # a tile and its backup
    deadline_factor: float = 2.0  # deadline = start + factor x predicted + grace
    deadline_grace_s: float = 1.5
    stall_s: float = 1.0  # a longer gap between two events is the server's own
    suspect_s: float = 30.0  # a silent device gets one trial lease after this, doubled each time
    suspect_s_max: float = 600.0
    unanswered_max: int = 4096  # devices remembered that left without answering their leases
    fails_max: int = 3  # FAILs in a row after which a device gets no more leases
    backup_s_min: float = 0.1  # a lease less overdue than this is not a straggler
    ended_leases_max: int = 65536  # remembered after their GEMM, to tell a duplicate from a late result
    flops_default: float = 5e9
    flops_min: float = 1e7
    flops_max: float = 1e14
    memory_bytes_default: int = 512 << 20
    memory_bytes_min: int = 16 << 20
    memory_bytes_max: int = 64 << 30
    rtt_s_default: float = 0.05
    down_bps_default: float = 12.5e6
    up_bps_default: float = 2.5e6
    link_bps_min: float = 1e4
    link_bps_max: float = 1e11


def _clamped(value: float, default: float, low: float, high: float) -> float:
    return min(max(value, low), high) if value > 0 and math.isfinite(value) else default


@dataclass(slots=True, eq=False)
class DeviceRecord:
    """One connection of one device, from `Joined` to `Left`. `held` are the bytes of the panels it has, the one last
    leased last; `used` the step in which each was. `flops` is the device's claim until `measured`;
    `memory_bytes` begins as `memory_offered` and shrinks when the device fails for want of memory."""

    device: str
    connection: str
    gateway: str
    workers: int
    flops: float
    memory_bytes: int
    memory_offered: int
    rtt_s: float
    down_bps: float
    up_bps: float
    down_known: bool
    up_known: bool
    accepted: int
    rejects: int
    ready: bool = True
    reason: str = ""
    measured: bool = False
    barred: str = ""
    fails: int = 0
    leases: int = 0
    lag: float = 1.0
    silences: int = 0
    suspect_until_s: float | None = None
    last_predicted_s: float = 0.0
    out: dict[int, LeaseRecord] = field(default_factory=dict)
    unacknowledged: dict[int, LeaseRecord] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    used: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, event: Joined, limits: MachineLimits) -> DeviceRecord:
        """A new connection; unknown figures get the defaults, claims are clamped."""
        link = limits.link_bps_min, limits.link_bps_max
        memory = min(event.memory_bytes or limits.memory_bytes_default, limits.memory_bytes_max)
        return cls(
            device=event.device,
            connection=event.connection,
            gateway=event.gateway,
            workers=event.workers,
            flops=_clamped(event.flops, limits.flops_default, limits.flops_min, limits.flops_max),
            memory_bytes=memory,
            memory_offered=memory,
            rtt_s=_clamped(event.rtt_s, limits.rtt_s_default, 1e-5, 60.0),
            down_bps=_clamped(event.down_bps, limits.down_bps_default, *link),
            up_bps=_clamped(event.up_bps, limits.up_bps_default, *link),
            down_known=event.down_bps > 0,
            up_known=event.up_bps > 0,
            accepted=event.accepted,
            rejects=event.rejects,
        )

    def planned(self) -> Device:
        """The device as the planner should see it: measured rates, divided by how much it lags behind them."""
        lag = self.lag
        return Device(
            self.device, self.flops / lag, self.memory_bytes, self.down_bps / lag, self.up_bps / lag, self.rtt_s
        )

    def why_not(self, now_s: float) -> str:
        """Why it gets no lease whatever there is to do; empty where it may get one."""
        if self.barred:
            return self.barred
        if not self.ready:
            return self.reason or "paused"
        if self.suspect_until_s is not None and now_s < self.suspect_until_s:
            return "silent since a lease of it expired"
        return ""

    def cap(self, limits: MachineLimits) -> int:
        """Leases it may have out at once: one or two until it has proved itself, then enough to cover the round trip
        and each of its workers."""
        if self.suspect_until_s is not None or (self.accepted == 0 and self.rejects > 0):
            return 1
        if self.accepted < limits.accepted_trusted:
            return min(limits.leases_new_device_max, limits.leases_per_device_max)
        service_s = max(self.last_predicted_s - self.rtt_s, 1e-4)
        return min(limits.leases_per_device_max, max(self.workers + 1, 2 + int(self.rtt_s / service_s)))

    def has_room(self, limits: MachineLimits) -> bool:
        """May it have one more lease? Results that wait for their verdict count too, against twice the cap, so that a
        flood of them cannot run ahead of verification."""
        cap = self.cap(limits)
        return len(self.out) < cap and len(self.unacknowledged) < 2 * cap

    def on_trial(self, limits: MachineLimits) -> bool:
        """Is it to get a tile for the sake of its figures? The plans leave out a device whose assumed links are slower
        than the others' real ones, and without a tile they would never be seen: so it gets a few, one at a time."""
        return self.unknown and self.leases < limits.trials_max and not self.out and not self.unacknowledged

    @property
    def unknown(self) -> bool:
        """Is a link of it still the default?"""
        return not (self.down_known and self.up_known)

    def new_bytes(self, panels: dict[str, int]) -> int:
        """Bytes of those panels that it does not hold."""
        return sum(size for panel, size in panels.items() if panel not in self.held)

    def free_bytes(self) -> int:
        """Memory left beside the panels it holds and the results it must keep until their ACK."""
        results = sum(lease.tile.result_bytes for lease in self.unacknowledged.values())
        return self.memory_bytes - self.held_bytes - results

    def hold(self, panels: dict[str, int], step: int) -> None:
        """These panels are being sent, or used again, in this step: they become the last to be dropped."""
        for panel, size in panels.items():
            self.held_bytes += size - self.held.pop(panel, 0)
            self.held[panel] = size
            self.used[panel] = step

    def drop(self, panels: tuple[str, ...] | set[str]) -> None:
        """These panels are not held any more."""
        for panel in panels:
            self.held_bytes -= self.held.pop(panel, 0)
            self.used.pop(panel, None)

    def stale(self, step: int) -> set[str]:
        """Panels that this step and the one before had no use for."""
        return {panel for panel, last in self.used.items() if last < step - 1} - self.pinned()

    def answered(self) -> None:
        """It sent something: not silent."""
        self.silences, self.suspect_until_s = 0, None

    def back_after(self, silences: int, now_s: float, limits: MachineLimits) -> None:
        """Its last connection ended with leases unanswered, after so many expiries: one lease until it answers that,
        and from the second expiry on not at once either, or connecting anew would clear a hoarder's record."""
        self.silences = silences
        pause_s = min(limits.suspect_s * 2.0 ** (silences - 2), limits.suspect_s_max) if silences > 1 else 0.0
        self.suspect_until_s = now_s + pause_s

    def pinned(self) -> set[str]:
        """Panels that leases still out need."""
        return {panel for lease in self.out.values() for panel in lease.tile.panels}

    def measure(self, lease: LeaseRecord, limits: MachineLimits) -> None:
        """Refresh the averages from a good result of this device, whose kernel time is already clamped."""
        self.measured = True
        flops = _clamped(lease.tile.flop / max(lease.seconds, 1e-6), self.flops, limits.flops_min, limits.flops_max)
        self.flops += SMOOTHING * (flops - self.flops)
        if lease.upload_s > 0 and lease.tile.result_bytes >= LINK_BYTES_MIN:
            self.link(0.0, 0.0, lease.tile.result_bytes / lease.upload_s, limits)
        self._proven(lease, lease.arrived_s - lease.sent_s)
        took_s = lease.arrived_s - (lease.started_s if lease.started_s is not None else lease.sent_s)
        ratio = min(max(1.0, (took_s - JITTER_S) / lease.predicted_s * self.lag), 8.0 * self.lag, 64.0)
        self.lag += SMOOTHING * (ratio - self.lag)

    def _proven(self, lease: LeaseRecord, span_s: float) -> None:
        """What a lease moved between its sending and its result, the links can move: a floor under the averages. Small
        transfers give no rate of their own, and a default that is too low would cut small GEMMs to slivers for ever."""
        span_s = max(span_s, 1e-6)
        self.down_bps = max(self.down_bps, lease.new_bytes / span_s)
        self.up_bps = max(self.up_bps, lease.tile.result_bytes / span_s)

    def link(self, rtt_s: float, down_bps: float, up_bps: float, limits: MachineLimits) -> None:
        """Refresh the averages from link measurements; 0 is not measured. The first one replaces the default."""
        if rtt_s > 0:
            self.rtt_s += SMOOTHING * (min(rtt_s, 60.0) - self.rtt_s)
        if down_bps > 0:
            rate = _clamped(down_bps, self.down_bps, limits.link_bps_min, limits.link_bps_max)
            self.down_bps += (SMOOTHING if self.down_known else 1.0) * (rate - self.down_bps)
            self.down_known = True
        if up_bps > 0:
            rate = _clamped(up_bps, self.up_bps, limits.link_bps_min, limits.link_bps_max)
            self.up_bps += (SMOOTHING if self.up_known else 1.0) * (rate - self.up_bps)
            self.up_known = True
