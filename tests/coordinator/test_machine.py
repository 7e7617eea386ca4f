"""The coordinator's core, event by event: what each answer, silence and trouble does to leases, tiles and devices."""

from __future__ import annotations

from typing import TypeVar

import pytest

from backend.coordinator.events import (
    Blame,
    Check,
    Checked,
    DropPanels,
    Effect,
    Event,
    FreeSlot,
    GatewayRestarted,
    GemmDone,
    GemmFailed,
    GemmSubmitted,
    Joined,
    LeaseFail,
    LeaseLost,
    Left,
    PrepareCheck,
    ResultArrived,
    SendAck,
    SendLease,
    SendRevoke,
    StartCheck,
    StatusChanged,
    Store,
    Stored,
    Tick,
)
from backend.coordinator.fleet import MachineLimits
from backend.coordinator.machine import Machine
from backend.coordinator.transitions import (
    ANSWERS,
    ENDED,
    TRANSITIONS,
    LeaseError,
    LeaseEvent,
    LeaseState,
    advance,
)
from backend.switchboard.messages import SlotRef
from planner.shapes import PlanLimits
from planner.tiles import tile_seconds

E = TypeVar("E")
EPOCH = 3


class Harness:
    """A machine, a clock, and what has come out of it."""

    def __init__(self, limits: MachineLimits | None = None, epoch: int = EPOCH) -> None:
        self.machine = Machine("job", epoch, limits or MachineLimits())
        self.now_s = 0.0
        self.slots = 0
        self.freed: list[SlotRef] = []
        self.given: list[SlotRef] = []

    def do(self, event: Event, after_s: float = 0.001) -> list[Effect]:
        self.now_s += after_s
        effects = self.machine.handle(event, self.now_s)
        self.machine.check_invariants()
        self.freed += [effect.slot for effect in effects if isinstance(effect, FreeSlot)]
        assert len(set(self.freed)) == len(self.freed), "a slot was freed twice"
        return effects

    def join(self, name: str, connection: str = "1", accepted: int = 100, **figures: float) -> list[Effect]:
        joined = Joined(
            device=name, connection=f"{name}-{connection}", gateway="gw0", flops=figures.get("flops", 1e9),
            memory_bytes=int(figures.get("memory", 1 << 30)), workers=1, rtt_s=figures.get("rtt", 0.001),
            down_bps=1e8, up_bps=1e8, accepted=accepted, rejects=int(figures.get("rejects", 0)),
        )  # fmt: skip
        return self.do(joined)

    def submit(self, number: int = 0, size: int = 512, k: int = 512) -> list[Effect]:
        return self.do(GemmSubmitted(number, 0, 1, size, size, k, "/a", 64, "/b", 128))

    def result(
        self, lease: SendLease, device: str = "", connection: str = "", after_s: float = 0.01, seconds: float = 0.005
    ) -> list[Effect]:
        self.slots += 1
        slot = SlotRef("gw0", self.slots, "/slots", 0, 0)
        self.given.append(slot)
        return self.do(
            ResultArrived(
                device or lease.device, connection or lease.connection, lease.lease.lease, seconds, 0.001, slot
            ),
            after_s,
        )

    def complete(self, lease: SendLease, connection: str = "") -> list[Effect]:
        """Result, check and store of one lease: all effects."""
        effects = self.result(lease, connection=connection)
        effects += self.do(Checked(lease.lease.lease, Check.GOOD))
        return effects + self.do(Stored(lease.lease.lease, True))

    def silence(self, seconds: float) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(int(seconds / 0.5)):
            effects += self.do(Tick(), 0.5)
        return effects


def only(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    (found,) = only(kind, effects)
    return found


def two_tiles(**limits: object) -> tuple[Harness, list[SendLease]]:
    """One trusted device with leases of a GEMM of several tiles."""
    harness = Harness(MachineLimits(**limits))  # type: ignore[arg-type]
    harness.join("ann")
    leases = only(SendLease, harness.submit())
    assert len(leases) >= 2
    return harness, leases


# ---- the plain way -----------------------------------------------------------------------------------------------


def test_a_lease_names_its_panels_and_its_epoch() -> None:
    harness = Harness()
    harness.join("ann")
    effects = harness.submit()
    first = only(SendLease, effects)[0]
    lease = first.lease
    assert lease.lease == EPOCH * 2**32
    assert (lease.job, lease.batch, lease.k) == ("job", 1, 512)
    assert lease.a == first.a.panel == f"job.{EPOCH}.0.a.0-{lease.m - 1}"
    assert (first.a.path, first.a.offset, first.a.rows, first.a.k) == ("/a", 64, lease.m, 512)
    assert (first.b.path, first.b.offset, first.b.rows) == ("/b", 128, lease.n)
    assert lease.deadline_s > 1.5
    second = only(SendLease, effects)[1]
    assert second.lease.deadline_s > lease.deadline_s, "the second lease waits behind the first"
    assert isinstance(effects[effects.index(first) + 1], PrepareCheck)


def test_a_gemm_runs_to_its_end_and_every_flop_is_credited_once() -> None:
    harness = Harness()
    harness.join("ann")
    waiting = only(SendLease, harness.submit())
    credited, done = 0, []
    while waiting:
        effects = harness.complete(waiting.pop(0))
        credited += sum(ack.flop for ack in only(SendAck, effects))
        waiting += only(SendLease, effects)
        done += only(GemmDone, effects)
        drops = only(DropPanels, effects)
    assert credited == 2 * 512**3 == harness.machine.progress().flop_done
    assert [entry.gemm for entry in done] == [0]
    assert done[0].tiles == harness.machine.progress().tiles_done
    assert len(drops) == 1, "panels are dropped when the GEMM is done"
    assert set(harness.freed) == set(harness.given)
    assert not harness.machine.book.leases


def test_stored_is_answered_by_ack_then_slot_then_the_next_lease() -> None:
    harness, leases = two_tiles()
    harness.result(leases[0])
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    effects = harness.do(Stored(leases[0].lease.lease, True))
    assert [type(effect) for effect in effects[:2]] == [SendAck, FreeSlot]


def test_store_carries_the_believed_and_the_servers_seconds() -> None:
    harness, leases = two_tiles()
    harness.result(leases[0], seconds=99.0, after_s=0.5)
    store = one(Store, harness.do(Checked(leases[0].lease.lease, Check.GOOD)))
    assert store.seconds == store.span_s == pytest.approx(0.5)
    assert store.flop == store.rect.flop(512)


def test_work_waits_for_a_device_and_an_idle_one_that_joins_takes_part_at_once() -> None:
    harness = Harness()
    assert harness.submit(size=1024) == []
    assert harness.machine.progress().waiting == "waiting for volunteers"
    assert only(SendLease, harness.join("ann"))
    assert harness.machine.progress().waiting == ""
    assert {lease.device for lease in only(SendLease, harness.join("bob"))} == {"bob"}


def test_the_oldest_gemm_goes_first() -> None:
    harness = Harness()
    harness.submit(number=5)
    harness.submit(number=4)
    leases = only(SendLease, harness.join("ann"))
    assert {lease.a.panel.split(".")[2] for lease in leases} == {"5"}


# ---- caps and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "rejects", "rtt", "cap"),
    [(0, 0, 1.0, 2), (0, 1, 1.0, 1), (3, 2, 1.0, 2), (100, 0, 1e-3, 2), (100, 0, 1.0, 8)],
)
def test_the_cap_follows_standing_and_round_trip(accepted: int, rejects: int, rtt: float, cap: int) -> None:
    harness = Harness(MachineLimits(plan=PlanLimits(result_bytes_max=1 << 14)))
    harness.join("ann", accepted=accepted, rejects=rejects, rtt=rtt)
    leases = only(SendLease, harness.submit(size=1024))
    for _ in range(20):
        leases += only(SendLease, harness.do(Tick(), 0.001))
    assert len(leases) == cap


def test_panels_that_no_lease_needs_make_room_for_new_ones() -> None:
    harness = Harness(MachineLimits(memory_bytes_min=1 << 16))
    harness.join("ann", memory=400_000)
    waiting = only(SendLease, harness.submit(size=256, k=256))
    dropped, done = 0, False
    while waiting and not done:
        effects = harness.complete(waiting.pop(0))
        targeted = [drop for drop in only(DropPanels, effects) if drop.connection]
        assert all(drop.device == "ann" for drop in targeted)
        dropped += len(targeted)
        waiting += only(SendLease, effects)
        done = bool(only(GemmDone, effects))
    assert done
    assert dropped > 0


def test_a_product_that_fits_no_device_fails_with_the_numbers() -> None:
    harness = Harness()
    harness.join("ann", memory=20 << 20)
    failed = one(GemmFailed, harness.submit(size=8, k=8 << 20))
    assert "8388608" in failed.reason
    assert str(2 * 4 * (2 * (8 << 20) + 1)) in failed.reason


def test_a_device_without_any_memory_to_speak_of_is_told_so_and_fails_nothing() -> None:
    harness = Harness()
    harness.join("ann", memory=1000)
    assert harness.submit() == []
    assert "memory" in harness.machine.progress().waiting


# ---- silence -----------------------------------------------------------------------------------------------------


def test_an_expired_lease_takes_all_leases_of_its_device_with_it_and_others_get_the_tiles() -> None:
    harness, leases = two_tiles()
    harness.silence(1.0)
    harness.join("bob")
    effects = harness.silence(10)
    lost = only(LeaseLost, effects)
    assert {entry.lease for entry in lost} >= {lease.lease.lease for lease in leases}
    assert {entry.why for entry in lost if entry.device == "ann"} == {"expired"}
    assert "ann" not in {lease.device for lease in only(SendLease, effects)}
    assert not only(SendRevoke, effects), "a result that still comes is welcome"


def test_a_late_result_of_an_open_tile_is_used_and_clears_the_suspicion() -> None:
    harness, leases = two_tiles()
    assert not only(SendLease, harness.silence(10))
    assert "silent" in harness.machine.progress().waiting
    effects = harness.result(leases[0])
    assert one(StartCheck, effects).lease == leases[0].lease.lease
    assert only(SendLease, effects), "it answered, so it gets work again"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).verdict == "accepted"


def test_a_silent_device_gets_one_trial_lease_after_a_while() -> None:
    harness, _ = two_tiles(suspect_s=5.0)
    effects = harness.silence(12)
    assert len(only(SendLease, effects)) == 1
    assert only(LeaseLost, effects)


def test_the_second_lease_counts_from_the_answer_to_the_first() -> None:
    harness, leases = two_tiles(leases_new_device_max=2)
    harness.silence(1.5)
    harness.result(leases[0])
    assert not only(LeaseLost, harness.silence(1.4))


def test_a_stall_of_the_server_is_not_held_against_devices() -> None:
    harness, leases = two_tiles()
    assert not only(LeaseLost, harness.do(Tick(), 60.0))
    assert only(StartCheck, harness.result(leases[0], after_s=0.5))


def test_an_idle_device_backs_up_a_straggler_and_the_first_valid_result_wins() -> None:
    harness = Harness(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("slow")
    first = one(SendLease, harness.submit(size=64))
    backup = one(SendLease, [*harness.join("bob"), *harness.silence(2.5)])
    assert (backup.device, backup.a) == ("bob", first.a)
    effects = harness.complete(backup)
    assert one(SendRevoke, effects).leases == (first.lease.lease,)
    assert only(GemmDone, effects)
    late = harness.result(first)
    assert one(SendAck, late).verdict == "late"
    assert only(FreeSlot, late)


def test_two_results_of_one_tile_in_check_give_one_store() -> None:
    harness = Harness(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("slow")
    first = one(SendLease, harness.submit(size=64))
    backup = one(SendLease, [*harness.join("bob"), *harness.silence(2.5)])
    harness.result(first)
    harness.result(backup)
    assert only(Store, harness.do(Checked(backup.lease.lease, Check.GOOD)))
    assert one(SendAck, harness.do(Checked(first.lease.lease, Check.GOOD))).verdict == "late"
    assert only(GemmDone, harness.do(Stored(backup.lease.lease, True)))
    assert set(harness.freed) == set(harness.given)


# ---- connections -------------------------------------------------------------------------------------------------


def test_a_closed_connection_returns_its_leases_and_its_result_counts_over_the_next_one() -> None:
    harness, leases = two_tiles()
    lost = only(LeaseLost, harness.do(Left("ann", "ann-1", "closed")))
    assert len(lost) == len(leases)
    harness.join("ann", connection="2", accepted=0)
    effects = harness.complete(leases[-1], connection="ann-2")
    assert one(SendAck, effects).connection == "ann-2"
    assert one(SendAck, effects).verdict == "accepted"


def test_the_end_of_an_older_connection_and_a_repeated_join_change_nothing() -> None:
    harness, _ = two_tiles()
    out = harness.machine.progress().leases_out
    assert harness.do(Left("ann", "ann-0", "closed")) == []
    assert harness.join("ann") == []
    assert harness.machine.progress().leases_out == out


def test_a_restarted_gateway_returns_the_leases_of_all_its_devices() -> None:
    harness, leases = two_tiles()
    assert len(only(LeaseLost, harness.do(GatewayRestarted("gw0")))) == len(leases)
    assert harness.machine.progress().devices == 0


def test_an_answer_goes_to_the_newest_connection_that_sent_the_result() -> None:
    harness, leases = two_tiles()
    harness.result(leases[0])
    harness.do(Left("ann", "ann-1", "closed"))
    harness.join("ann", connection="2")
    assert not only(SendAck, harness.result(leases[0], connection="ann-2")), "the verdict is still to come"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).connection == "ann-2"


def test_a_paused_device_gets_nothing_until_it_is_ready() -> None:
    harness = Harness()
    harness.join("ann")
    harness.do(StatusChanged("ann", "ann-1", False, "hidden"))
    assert harness.submit() == []
    assert "hidden" in harness.machine.progress().waiting
    assert only(SendLease, harness.do(StatusChanged("ann", "ann-1", True, "")))


# ---- attacks and answers -----------------------------------------------------------------------------------------


def test_a_wrong_result_is_rejected_blamed_and_its_tile_goes_to_another_device() -> None:
    harness, leases = two_tiles()
    harness.join("bob")
    harness.result(leases[0])
    effects = harness.do(Checked(leases[0].lease.lease, Check.BAD, "off by 3"))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SendAck) < kinds.index(FreeSlot) < kinds.index(Blame)
    assert one(SendAck, effects).verdict == "rejected"
    assert one(Blame, effects).reason == "wrong result: off by 3"
    assert not [lease for lease in only(SendLease, effects) if lease.device == "ann"]
    assert harness.machine.book.devices["ann"].why_not(harness.now_s) == "wrong result: off by 3"


def test_a_spoiled_tile_returns_to_its_device_only_where_there_is_no_other() -> None:
    for others in (0, 1):
        harness = Harness()
        harness.join("ann")
        first = one(SendLease, harness.submit(size=64))
        for number in range(others):
            harness.join(f"bob{number}")
        effects = harness.do(LeaseFail("ann", "ann-1", first.lease.lease, "kernel", "trap"))
        assert one(SendLease, effects).device == ("bob0" if others else "ann")


def test_fails_in_a_row_bar_a_device_without_blame() -> None:
    harness = Harness()
    harness.join("ann")
    effects = harness.submit(size=64)
    for _ in range(3):
        lease = one(SendLease, effects)
        effects = harness.do(LeaseFail("ann", "ann-1", lease.lease.lease, "kernel", "trap"))
        assert not only(Blame, effects)
    assert not only(SendLease, effects)
    assert "failed 3 leases in a row, last: kernel trap" in harness.machine.progress().waiting
    assert only(SendLease, harness.join("ann", connection="2")), "a new connection starts anew"


def test_a_malformed_result_is_blamed() -> None:
    harness, leases = two_tiles()
    effects = harness.do(LeaseFail("ann", "ann-1", leases[0].lease.lease, "unsupported", "7 bytes", bad=True))
    assert "7 bytes" in one(Blame, effects).reason


def test_stopped_is_neither_blamed_nor_counted() -> None:
    harness, leases = two_tiles()
    effects = harness.do(LeaseFail("ann", "ann-1", leases[0].lease.lease, "stopped", ""))
    assert not only(Blame, effects) + only(SendLease, effects)
    assert harness.machine.book.devices["ann"].fails == 0


def test_operands_that_are_not_finite_fail_the_gemm_and_blame_nobody() -> None:
    harness, leases = two_tiles()
    harness.result(leases[0])
    harness.result(leases[1])
    effects = harness.do(Checked(leases[0].lease.lease, Check.OPERANDS_NOT_FINITE, "row 3 of A"))
    assert "row 3 of A" in one(GemmFailed, effects).reason
    assert not only(Blame, effects)
    effects = harness.do(Checked(leases[1].lease.lease, Check.BAD))
    assert not only(Blame, effects), "the operands may have been overwritten by now"
    assert set(harness.freed) == set(harness.given)
    assert not harness.machine.book.leases


@pytest.mark.parametrize("lease", [0, 7, EPOCH * 2**32 + 999, (EPOCH - 1) * 2**32, 2**53 - 1])
def test_results_of_unknown_and_stale_leases_are_late(lease: int) -> None:
    harness, _ = two_tiles()
    slot = SlotRef("gw9", 1, "/s", 0, 0)
    effects = harness.do(ResultArrived("eve", "eve-1", lease, 1.0, 1.0, slot))
    assert [type(effect) for effect in effects] == [SendAck, FreeSlot]
    ack = one(SendAck, effects)
    assert (ack.verdict, ack.gateway, ack.connection, ack.flop) == ("late", "gw9", "eve-1", 0)


def test_another_devices_lease_is_refused_and_stays_its_own() -> None:
    harness, leases = two_tiles()
    effects = harness.result(leases[0], device="eve", connection="eve-1")
    assert one(SendAck, effects).verdict == "rejected"
    assert only(SendAck, harness.complete(leases[0]))[-1].verdict == "accepted"
    assert harness.do(LeaseFail("eve", "eve-1", leases[1].lease.lease, "kernel", "")) == []


def test_a_result_sent_twice_is_credited_once() -> None:
    harness, leases = two_tiles()
    harness.result(leases[0])
    assert one(SendAck, harness.result(leases[0])).verdict == "duplicate"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).flop > 0
    again = harness.result(leases[0])
    assert (one(SendAck, again).verdict, one(SendAck, again).flop) == ("duplicate", 0)
    assert set(harness.freed) == set(harness.given)


def test_a_duplicate_is_still_a_duplicate_after_its_gemm_and_the_memory_of_it_is_bounded() -> None:
    harness = Harness(MachineLimits(ended_leases_max=2))
    harness.join("ann")
    sent = [one(SendLease, harness.submit(number=number, size=64)) for number in range(1)]
    harness.complete(sent[0])
    assert one(SendAck, harness.result(sent[0])).verdict == "duplicate"
    for number in (1, 2):
        harness.complete(one(SendLease, harness.submit(number=number, size=64)))
    assert one(SendAck, harness.result(sent[0])).verdict == "late"
    assert len(harness.machine.book.ended) == 2


def test_a_rectangle_credited_before_is_a_duplicate_and_done() -> None:
    harness = Harness()
    harness.join("ann")
    lease = one(SendLease, harness.submit(size=64))
    harness.result(lease)
    harness.do(Checked(lease.lease.lease, Check.GOOD))
    effects = harness.do(Stored(lease.lease.lease, False))
    assert (one(SendAck, effects).verdict, one(SendAck, effects).flop) == ("duplicate", 0)
    assert only(GemmDone, effects)
    assert harness.machine.progress().flop_done == 0


def test_a_lying_claim_of_speed_does_not_win_a_queue() -> None:
    harness = Harness()
    harness.join("boast", flops=1e14)
    waiting = only(SendLease, harness.submit(size=1024, k=1024))
    for _ in range(5):
        lease = waiting.pop(0)
        effects = harness.result(lease, after_s=0.9, seconds=1e-9)
        effects += harness.do(Checked(lease.lease.lease, Check.GOOD))
        waiting += only(SendLease, effects + harness.do(Stored(lease.lease.lease, True)))
    tile = next(iter(harness.machine.book.gemms[0].tiles.values()))
    planned = harness.machine.book.devices["boast"].planned()
    fresh = sum(tile.panels.values())
    assert 0.5 < tile_seconds(tile.rect, tile.gemm.shape, planned, fresh, 0.0) < 3, "the server's clock says 0.9 s"


def test_a_tile_too_long_for_the_next_device_is_re_cut_and_its_parent_is_late() -> None:
    harness = Harness(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("ann", flops=1e12)
    first = one(SendLease, harness.submit(size=64, k=8192))
    harness.do(Left("ann", "ann-1", "closed"))
    pieces = only(SendLease, harness.join("phone", flops=1e7))
    assert pieces
    assert all(piece.lease.m * piece.lease.n < 64 * 64 for piece in pieces)
    late = harness.result(first)
    assert one(SendAck, late).verdict == "late"


# ---- our own bugs ------------------------------------------------------------------------------------------------


def test_answers_that_nobody_asked_for_are_our_bug() -> None:
    harness, leases = two_tiles()
    for event in (Checked(12345, Check.GOOD), Stored(12345, True), Checked(leases[0].lease.lease, Check.GOOD)):
        with pytest.raises(LeaseError):
            harness.machine.handle(event, harness.now_s)


def test_every_state_and_event_is_decided() -> None:
    for state in LeaseState:
        for event in LeaseEvent:
            if (state, event) in TRANSITIONS:
                assert advance(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(LeaseError):
                    advance(state, event)
        answered = (state, LeaseEvent.RESULT) not in TRANSITIONS
        assert (state in ANSWERS) == answered, f"a RESULT in {state.value} is neither taken nor answered"
        if state in ENDED:
            assert not [event for event in LeaseEvent if (state, event) in TRANSITIONS]
