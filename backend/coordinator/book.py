"""The book of leases: the core's whole state, and the elementary operations on it, each leaving it consistent.

`move` is the one place where a lease changes state; sending, closing, answering and ending build on it. Which operation
an event asks for is the machine's matter. Effects are noted in the order in which they must be carried out.
"""

from __future__ import annotations

from collections import OrderedDict

from backend.coordinator.events import (
    DropPanels,
    Effect,
    FreeSlot,
    GemmDone,
    GemmFailed,
    LeaseLost,
    PrepareCheck,
    SendAck,
    SendLease,
    SendRevoke,
)
from backend.coordinator.fleet import DeviceRecord, MachineLimits
from backend.coordinator.records import GemmRun, LeaseRecord, Tile
from backend.coordinator.transitions import (
    ANSWERS,
    ENDED,
    HOLDS_SLOT,
    LeaseEvent,
    LeaseState,
    TileState,
    advance,
)
from planner.tiles import tile_seconds
from tileweave.protocol.messages import Lease, Verdict

EPOCH_LEASES = 2**32
"""Leases per epoch: a lease id is epoch x this + a counter, so that an earlier epoch's are recognised."""


class Book:
    """State of one job's core: devices by id, open GEMMs oldest first, leases that have not ended for good. `wake` asks
    for every device to be looked at, `touched` for these."""

    def __init__(self, job: str, epoch: int, limits: MachineLimits) -> None:
        self.job = job
        self.epoch = epoch
        self.limits = limits
        self.now_s = 0.0
        self.devices: dict[str, DeviceRecord] = {}
        self.gemms: dict[int, GemmRun] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.ended: OrderedDict[int, Verdict] = OrderedDict()
        self.unanswered: OrderedDict[str, int] = OrderedDict()  # devices that left with leases out -> their silences
        self.effects: list[Effect] = []
        self.wake = False
        self.touched: set[str] = set()
        self.tiles_done = 0
        self.flop_done = 0
        self.step = 0
        self.leases_lost = 0
        self._next_lease = 0

    def connected(self, device: str, connection: str) -> DeviceRecord | None:
        """The device's record, if this is its connection."""
        record = self.devices.get(device)
        return record if record is not None and record.connection == connection else None

    # ---- leases --------------------------------------------------------------------------------------------------

    def send(self, tile: Tile, device: DeviceRecord) -> bool:
        """Lease the tile to the device; False where its memory has no room until it is done with earlier leases."""
        if not self._make_room(device, tile):
            return False
        gemm, limits, first = tile.gemm, self.limits, not tile.leases
        new_bytes = device.new_bytes(tile.panels)
        predicted_s = tile_seconds(tile.rect, gemm.shape, device.planned(), new_bytes, limits.plan.lease_seconds)
        device.hold(tile.panels, gemm.request.step)
        number = self.epoch * EPOCH_LEASES + self._next_lease
        lease = LeaseRecord(number, tile, device, self.now_s, new_bytes, predicted_s, gemm.accuracy)
        self._next_lease += 1
        if not device.out:
            lease.started_s = self.now_s
        if gemm.first_lease_s is None:
            gemm.first_lease_s = self.now_s
        device.out[lease.lease] = device.unacknowledged[lease.lease] = lease
        device.leases += 1
        device.last_predicted_s = predicted_s
        tile.leases.append(lease)
        gemm.leases.append(lease)
        self.leases[lease.lease] = lease
        gemm.settle(tile)
        waits_s = sum(other.predicted_s for other in device.out.values())
        message = Lease(
            lease=lease.lease,
            job=self.job,
            batch=tile.rect.batch,
            m=tile.rect.m,
            n=tile.rect.n,
            terms=tile.terms,
            deadline_s=limits.deadline_factor * waits_s + limits.deadline_grace_s,
            a_by_k=gemm.shape.a_by_k,
            b_by_k=gemm.shape.b_by_k,
            dtype=gemm.request.elements.results,
            accuracy=gemm.accuracy,
        )
        self.effects.append(SendLease(device.gateway, device.device, device.connection, message, tile.refs))
        if first:
            self.effects.append(PrepareCheck(gemm.request.gemm, tile.rect))
        return True

    def move(self, lease: LeaseRecord, event: LeaseEvent) -> None:
        """Change the lease's state, and what follows from it for its device, its tile and its GEMM."""
        lease.state = advance(lease.state, event)
        owner, tile = lease.owner, lease.tile
        if owner.out.pop(lease.lease, None) is not None:
            following = next(iter(owner.out.values()), None)
            if following is not None and following.started_s is None:
                following.started_s = self.now_s
        if lease.state not in HOLDS_SLOT:
            owner.unacknowledged.pop(lease.lease, None)
        self.touched.add(owner.device)
        before = tile.state
        tile.gemm.settle(tile)
        if tile.state is TileState.READY and before is not TileState.READY:
            self.wake = True
        if tile.gemm.ended and lease.state in ENDED:
            self._forget(lease)

    def lose_all(self, device: DeviceRecord, why: str) -> None:
        """All leases of the device go back; their tiles are ready for others."""
        for lease in list(device.out.values()):
            self.move(lease, LeaseEvent.LOSE)
            self.leases_lost += 1
            self.effects.append(LeaseLost(device.device, lease.lease, why, self.now_s - lease.sent_s))

    def close_others(self, tile: Tile) -> None:
        """Nobody needs to answer for this tile any more."""
        for lease in tile.leases:
            if lease.state is LeaseState.OUT:
                owner = lease.owner
                self.move(lease, LeaseEvent.CLOSE)
                self.effects.append(SendRevoke(owner.gateway, owner.device, owner.connection, (lease.lease,)))
            elif lease.state is LeaseState.LOST:
                self.move(lease, LeaseEvent.CLOSE)

    def acknowledge(self, lease: LeaseRecord, verdict: Verdict, reason: str, flop: int) -> None:
        """The final word on a result, and its slot free."""
        slot, device = lease.slot, lease.owner.device
        assert slot is not None, f"lease {lease.lease} has no result to acknowledge"
        self.effects.append(
            SendAck(lease.reply_gateway, device, lease.reply_connection, lease.lease, verdict, reason, flop)
        )
        lease.slot = None
        self.effects.append(FreeSlot(slot))

    def _forget(self, lease: LeaseRecord) -> None:
        if self.leases.pop(lease.lease, None) is None:
            return
        self.ended[lease.lease] = ANSWERS[lease.state]
        if len(self.ended) > self.limits.ended_leases_max:
            self.ended.popitem(last=False)

    # ---- panels --------------------------------------------------------------------------------------------------

    def _make_room(self, device: DeviceRecord, tile: Tile) -> bool:
        """Room for what the tile needs, by dropping the panels least recently leased that no lease of the device
        needs. False, and nothing dropped, where that is not enough."""
        missing = device.new_bytes(tile.panels) + tile.result_bytes - device.free_bytes()
        if missing <= 0:
            return True
        pinned = device.pinned() | tile.panels.keys()
        dropped: set[str] = set()
        for panel, size in device.held.items():
            if missing <= 0:
                break
            if panel not in pinned:
                dropped.add(panel)
                missing -= size
        if missing > 0:
            return False
        self.drop_on(device, dropped)
        return True

    def begin_step(self, step: int) -> None:
        """The script is at this step. Activations are of no use after theirs, and weights change: what a whole step did
        without goes, so that devices are not filled with it up to their memory."""
        self.step = step
        for device in self.devices.values():
            if stale := device.stale(step):
                self.drop_on(device, stale)

    def drop_on(self, device: DeviceRecord, panels: set[str]) -> None:
        """Have this one device drop these panels; they may be sent to it again."""
        device.drop(panels)
        self.effects.append(DropPanels(tuple(sorted(panels)), device.gateway, device.device, device.connection))

    # ---- ends ----------------------------------------------------------------------------------------------------

    def fail(self, gemm: GemmRun, reason: str) -> None:
        """The GEMM cannot be computed."""
        self.effects.append(GemmFailed(gemm.request.gemm, reason))
        self._end(gemm)

    def finish(self, gemm: GemmRun) -> None:
        """Every tile is in place."""
        request = gemm.request
        span_s = self.now_s - (gemm.submitted_s if gemm.first_lease_s is None else gemm.first_lease_s)
        self.effects.append(
            GemmDone(request.gemm, request.step, len(gemm.tiles), span_s, gemm.kernel_seconds, gemm.predicted_s)
        )
        self._end(gemm)

    def _end(self, gemm: GemmRun) -> None:
        """Close what is still open. Leases whose slot is being read stay known until their verdict."""
        gemm.ended = True
        del self.gemms[gemm.request.gemm]
        for tile in gemm.tiles.values():
            self.close_others(tile)
        for lease in gemm.leases:
            if lease.state in ENDED:
                self._forget(lease)
        self.wake = True

    def remove(self, device: DeviceRecord, why: str) -> None:
        """The device is not this job's any more; where it is another's now, it needs the memory."""
        if device.out or device.silences:
            self.unanswered[device.device] = device.silences
            if len(self.unanswered) > self.limits.unanswered_max:
                self.unanswered.popitem(last=False)
        self.lose_all(device, why)
        if device.held:
            self.drop_on(device, set(device.held))
        del self.devices[device.device]
        self.wake = True
