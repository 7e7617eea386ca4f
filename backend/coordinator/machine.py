"""The coordinator's core: a pure state machine that turns GEMMs into leases and results into a product.

Theory of operation
-------------------
Events go in, effects come out (`events.py`); time comes with each event. The shell carries the effects out and reports
back (`StartCheck` -> `Checked`, `Store` -> `Stored`), so that the core never waits and a simulator can drive it.

A GEMM is planned when there is a device to plan for: each device has a share, cut into tiles in the order they go out.
From then on devices pull: whenever one has room it gets a returned tile, the next of its share, or one of another's
share (`dispatch.py`); nothing is planned anew when devices come and go, and work never waits for a plan.

    tile   READY -> LEASED -> CHECKING -> STORING -> DONE      (derived from its leases, `transitions.py`)
    lease  OUT -> CHECKING -> STORING -> ACCEPTED
           OUT -> LOST (deadline, connection closed, device barred): the tile is READY again. A late result of a LOST
                  lease is checked like any other while its tile is open; the first valid result of a tile wins.
           OUT -> CLOSED (FAIL, or the tile is done, re-cut, or its GEMM ended): later results are answered `late`.

Deadlines. Only the first lease of a device runs; the next starts when that one is answered. Expiry means silence: all
leases of the device go back and it gets none until it sends anything, or a trial lease after a growing pause. A gap
between events longer than `stall_s` is our own stall, and all deadlines move by it.

Trust. A wrong result, or one of impossible length, is blamed: the shell's ledger decides on quarantine, and here the
device is barred until it connects again. `fails_max` FAILs in a row bar it too, without blame. Operands that are not
finite fail the GEMM and blame nobody. Once a GEMM has ended its operands may be overwritten, so later verdicts about it
count for nothing. Results from strangers, of unknown leases, twice or too late are answered, never asserted.

A slot is freed exactly once: when its result is refused, when its verdict is in, or when it is stored. (Gateways never
use a slot's number twice, so that one of an earlier run frees nothing.)
"""

from __future__ import annotations

from typing import assert_never

from backend.coordinator.book import Book
from backend.coordinator.dispatch import Dispatcher
from backend.coordinator.events import (
    Blame,
    Check,
    Checked,
    Effect,
    Event,
    FreeSlot,
    GatewayRestarted,
    GemmSubmitted,
    Joined,
    LeaseFail,
    Left,
    ResultArrived,
    SendAck,
    StartCheck,
    StatusChanged,
    Store,
    Stored,
    Tick,
)
from backend.coordinator.fleet import DeviceRecord, MachineLimits
from backend.coordinator.invariants import check_invariants
from backend.coordinator.planning import Planning
from backend.coordinator.progress import Progress, progress
from backend.coordinator.records import GemmRun, LeaseRecord, Tile
from backend.coordinator.transitions import ANSWERS, HOLDS_SLOT, TRANSITIONS, LeaseError, LeaseEvent, TileState
from planner.plan import plan
from planner.tiles import smallest_tile_bytes
from tileweave.protocol.messages import Verdict

MEMORY_SHRINKS_MAX = 4
"""A device that fails for want of memory is planned with half of it, down to this part of what it offered: below, its
tiles would be so small that re-cutting for it would hurt everybody."""


class Machine:
    """The core for one job and one epoch of it. Feed it with `handle`; `book` is its state, for reading only."""

    def __init__(self, job: str, epoch: int, limits: MachineLimits) -> None:
        self.book = Book(job, epoch, limits)
        self._planning = Planning(limits.plan)
        self._begun = False

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about `event`, in the order to do it. `now_s` is any monotonic clock's. Raises `LeaseError` on a
        `Checked` or `Stored` that was not asked for."""
        self.book.effects = []
        self._pass_time(now_s)
        match event:
            case GemmSubmitted():
                self._gemm(event)
            case Joined():
                self._joined(event)
            case Left():
                self._left(event)
            case GatewayRestarted():
                self._gateway(event)
            case ResultArrived():
                self._result(event)
            case Checked():
                self._checked(event)
            case Stored():
                self._stored(event)
            case LeaseFail():
                self._failed(event)
            case StatusChanged():
                self._status(event)
            case Tick():
                self._tick()
            case _:
                assert_never(event)
        self._dispatch()
        return self.book.effects

    def progress(self) -> Progress:
        """Counts since the start of this epoch, and what it waits for if nothing moves."""
        return progress(self.book)

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. For tests and the simulator: it reads everything."""
        check_invariants(self.book)

    # ---- time ----------------------------------------------------------------------------------------------------

    def _pass_time(self, now_s: float) -> None:
        book = self.book
        gap_s = now_s - book.now_s if self._begun else 0.0
        self._begun = True
        book.now_s = max(now_s, book.now_s)
        if gap_s > book.limits.stall_s:
            for device in book.devices.values():
                for lease in device.out.values():
                    if lease.started_s is not None:
                        lease.started_s += gap_s

    def _tick(self) -> None:
        self.book.wake = True
        now_s, limits = self.book.now_s, self.book.limits
        for device in self.book.devices.values():
            first = next(iter(device.out.values()), None)
            if first is None or first.started_s is None:
                continue
            deadline_s = first.started_s + limits.deadline_factor * first.predicted_s + limits.deadline_grace_s
            if now_s <= deadline_s:
                continue
            pause_s = min(limits.suspect_s * 2.0**device.silences, limits.suspect_s_max)
            device.silences += 1
            device.suspect_until_s = now_s + pause_s
            self.book.lose_all(device, "expired")

    # ---- GEMMs ---------------------------------------------------------------------------------------------------

    def _gemm(self, event: GemmSubmitted) -> None:
        assert event.gemm not in self.book.gemms, f"GEMM {event.gemm} is open already"
        if event.step > self.book.step:
            self.book.begin_step(event.step)
        self.book.gemms[event.gemm] = GemmRun(event, self.book.now_s)
        self.book.wake = True

    def _plan(self, gemm: GemmRun) -> None:
        """Cut the GEMM for the devices that take work; fail it where none of all devices could take any of it."""
        now_s = self.book.now_s
        fleet = [device for device in self.book.devices.values() if not device.why_not(now_s)]
        made = self._planning.plan(gemm, fleet)
        if made.shares:
            gemm.planned = True
            gemm.predicted_s = made.predicted_s
            for share in made.shares:
                for rect in share.tiles:
                    gemm.add(rect, share.device, share.grains)
        elif (
            fleet
            and not plan(gemm.shape, [d.planned() for d in self.book.devices.values()], self.book.limits.plan).shares
        ):
            reasons = "; ".join(f"{device}: {reason}" for device, reason in sorted(made.left_out.items())[:3])
            self.book.fail(
                gemm,
                f"a product of {gemm.shape.m} x {gemm.shape.depth} by {gemm.shape.depth} x {gemm.shape.n} fits no "
                f"device, even in tiles of one element ({smallest_tile_bytes(gemm.shape)} bytes): {reasons}",
            )

    # ---- devices -------------------------------------------------------------------------------------------------

    def _joined(self, event: Joined) -> None:
        before = self.book.devices.get(event.device)
        if before is not None and before.connection == event.connection:
            return
        if before is not None:
            self.book.remove(before, "connected anew")
        device = DeviceRecord.of(event, self.book.limits)
        if device.memory_bytes < self.book.limits.memory_bytes_min:
            device.barred = f"memory: offers {device.memory_bytes} bytes, needs {self.book.limits.memory_bytes_min}"
        silences = self.book.unanswered.pop(event.device, None)
        if silences is not None:
            device.back_after(silences, self.book.now_s, self.book.limits)
        self.book.devices[event.device] = device
        self.book.wake = True

    def _left(self, event: Left) -> None:
        device = self.book.devices.get(event.device)
        if device is not None and device.connection == event.connection:
            self.book.remove(device, event.reason)

    def _gateway(self, event: GatewayRestarted) -> None:
        for device in [device for device in self.book.devices.values() if device.gateway == event.gateway]:
            self.book.remove(device, "its gateway restarted")

    def _blame(self, device: str, connection: str, gateway: str, lease: LeaseRecord, reason: str) -> None:
        self.book.effects.append(Blame(device, connection, gateway, lease.lease, reason))
        lease.tile.spoiled.add(device)
        record = self.book.devices.get(device)
        if record is not None:
            record.accepted = 0
            record.rejects += 1
            record.barred = reason
            self.book.lose_all(record, "barred")

    def _status(self, event: StatusChanged) -> None:
        device = self.book.connected(event.device, event.connection)
        if device is None:
            return
        device.link(event.rtt_s, event.down_bps, event.up_bps, self.book.limits)
        if event.ready and not device.ready:
            self.book.wake = True
        device.ready, device.reason = event.ready, event.reason

    # ---- answers of devices --------------------------------------------------------------------------------------

    def _result(self, event: ResultArrived) -> None:
        device = self.book.connected(event.device, event.connection)
        if device is not None:
            device.answered()
        lease = self.book.leases.get(event.lease)
        if lease is None:
            self._refuse(event, self.book.ended.get(event.lease, "late"), "the tile is not open any more")
        elif lease.owner.device != event.device:
            self._refuse(event, "rejected", f"lease {event.lease} is another device's")
        elif (lease.state, LeaseEvent.RESULT) in TRANSITIONS:
            self._accept_upload(lease, event)
        elif lease.state in HOLDS_SLOT and lease.reply_connection != event.connection:
            lease.reply_connection, lease.reply_gateway = event.connection, event.slot.gateway
            self.book.effects.append(FreeSlot(event.slot))
        else:
            self._refuse(event, ANSWERS[lease.state], "this lease has been answered or closed")

    def _refuse(self, event: ResultArrived, verdict: Verdict, reason: str) -> None:
        self.book.effects += [
            SendAck(event.slot.gateway, event.device, event.connection, event.lease, verdict, reason, 0),
            FreeSlot(event.slot),
        ]

    def _accept_upload(self, lease: LeaseRecord, event: ResultArrived) -> None:
        now_s = self.book.now_s
        lease.span_s = now_s - lease.sent_s
        lease.seconds = event.seconds if 0 < event.seconds <= lease.span_s else lease.span_s
        lease.slot, lease.upload_s, lease.arrived_s = event.slot, event.upload_s, now_s
        lease.reply_connection, lease.reply_gateway = event.connection, event.slot.gateway
        self.book.move(lease, LeaseEvent.RESULT)
        gemm = lease.tile.gemm
        self.book.effects.append(
            StartCheck(lease.lease, gemm.request.gemm, lease.tile.rect, event.slot, lease.accuracy)
        )

    def _failed(self, event: LeaseFail) -> None:
        device = self.book.connected(event.device, event.connection)
        if device is not None:
            device.answered()
        lease = self.book.leases.get(event.lease)
        if lease is None or lease.owner.device != event.device or (lease.state, LeaseEvent.FAIL) not in TRANSITIONS:
            return
        self.book.move(lease, LeaseEvent.FAIL)
        if event.bad:
            self._blame(event.device, event.connection, lease.owner.gateway, lease, f"bad result: {event.message}")
        elif event.code == "stopped":
            if device is not None:
                device.ready, device.reason = False, "stopped"
        else:
            lease.tile.spoiled.add(event.device)
            if device is not None:
                self._count_fail(device, lease.tile, event)

    def _count_fail(self, device: DeviceRecord, tile: Tile, event: LeaseFail) -> None:
        device.fails += 1
        if event.code == "memory":
            least = max(device.memory_offered // MEMORY_SHRINKS_MAX, self.book.limits.memory_bytes_min)
            device.memory_bytes = max(device.memory_bytes // 2, least)
        elif event.code == "panel":
            self.book.drop_on(device, {panel for panel in tile.panels if panel not in device.pinned()})
        if device.fails >= self.book.limits.fails_max:
            device.barred = f"failed {device.fails} leases in a row, last: {event.code} {event.message}".rstrip()
            self.book.lose_all(device, "barred")

    # ---- answers of the shell ------------------------------------------------------------------------------------

    def _checked(self, event: Checked) -> None:
        lease = self._asked(event.lease)
        tile, gemm = lease.tile, lease.tile.gemm
        device = self.book.devices.get(lease.owner.device)
        if device is not None and event.verdict is Check.GOOD and not gemm.ended:
            device.measure(lease, self.book.limits)  # not before: a wrong result's haste says nothing
        if gemm.ended or (event.verdict is Check.GOOD and tile.state in (TileState.STORING, TileState.DONE)):
            self.book.move(lease, LeaseEvent.MOOT)
            self.book.acknowledge(lease, "late", "another result of this tile was first", 0)
        elif event.verdict is Check.GOOD:
            self.book.move(lease, LeaseEvent.GOOD)
            assert lease.slot is not None
            self.book.effects.append(
                Store(
                    lease=lease.lease,
                    device=lease.owner.device,
                    gemm=gemm.request.gemm,
                    step=gemm.request.step,
                    rect=tile.rect,
                    flop=tile.flop,
                    seconds=lease.seconds,
                    span_s=lease.span_s,
                    slot=lease.slot,
                )
            )
        elif event.verdict is Check.BAD:
            self.book.move(lease, LeaseEvent.BAD)
            self.book.acknowledge(lease, "rejected", event.detail, 0)
            reason = f"wrong result: {event.detail}".rstrip(": ")
            self._blame(lease.owner.device, lease.reply_connection, lease.reply_gateway, lease, reason)
        elif event.verdict is Check.UNSURE:
            gemm.accuracy = "rowwise"  # where every honest product is told from a lie, so that this happens once
            self.book.move(lease, LeaseEvent.MOOT)
            self.book.acknowledge(lease, "late", f"{event.detail}; the tile is computed again row-wise", 0)
        else:
            self.book.move(lease, LeaseEvent.MOOT)
            self.book.acknowledge(lease, "late", "the GEMM's operands are not finite", 0)
            self.book.fail(gemm, f"operands are not finite: {event.detail}".rstrip(": "))

    def _stored(self, event: Stored) -> None:
        lease = self._asked(event.lease)
        tile, gemm = lease.tile, lease.tile.gemm
        self.book.move(lease, LeaseEvent.STORED)
        if event.credited:
            self.book.acknowledge(lease, "accepted", "", tile.flop)
            self.book.flop_done += tile.flop
        else:
            self.book.acknowledge(lease, "duplicate", "this part of the product was credited before", 0)
        device = self.book.devices.get(lease.owner.device)
        if device is not None:
            device.accepted += 1
            device.fails = 0
        self.book.tiles_done += 1
        gemm.kernel_seconds += lease.seconds
        if gemm.ended:
            return
        self.book.close_others(tile)
        if gemm.remaining == 0:
            self.book.finish(gemm)

    def _asked(self, number: int) -> LeaseRecord:
        lease = self.book.leases.get(number)
        if lease is None:
            raise LeaseError(f"an answer about lease {number}, about which nothing was asked")
        return lease

    # ---- giving out work -----------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give each device with room what there is for it, one lease each in turn."""
        book = self.book
        while book.gemms and (book.wake or book.touched):
            names = book.devices.keys() if book.wake else book.touched & book.devices.keys()
            hungry = [book.devices[name] for name in sorted(names)]
            # A product of few tiles has none left after the first devices: those on trial come before the others.
            hungry.sort(key=lambda device: not device.on_trial(book.limits))
            book.wake = False
            while hungry:
                hungry = [device for device in hungry if self._give(device)]
            book.touched.clear()

    def _give(self, device: DeviceRecord) -> bool:
        """Send the device one lease, if there is one for it."""
        book = self.book
        if device.why_not(book.now_s) or not device.has_room(book.limits):
            return False
        dispatcher = Dispatcher(book.devices, book.limits, book.now_s)
        for gemm in list(book.gemms.values()):
            if not gemm.planned:
                self._plan(gemm)
            if gemm.planned and (tile := dispatcher.own_tile(gemm, device)) is not None:
                return self._give_tile(tile, dispatcher, device)
        for gemm in book.gemms.values():
            if gemm.planned and (tile := dispatcher.others_tile(gemm, device)) is not None:
                return self._give_tile(tile, dispatcher, device)
        if device.unacknowledged:
            return False
        for gemm in book.gemms.values():
            if (tile := dispatcher.backup_tile(gemm, device)) is not None:
                return book.send(tile, device)
        return False

    def _give_tile(self, tile: Tile, dispatcher: Dispatcher, device: DeviceRecord) -> bool:
        pieces = dispatcher.pieces(tile, device)
        if not pieces:
            device.barred = f"memory: {device.memory_bytes} bytes hold no tile of this GEMM"
            self.book.lose_all(device, "barred")
            return False
        if len(pieces) > 1:
            self.book.close_others(tile)
            tile = tile.gemm.replace(tile, pieces, device.device)[0]
            self.book.wake = True
        return self.book.send(tile, device)
