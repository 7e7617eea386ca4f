"""The coordinator's core and those who would cheat it: wrong, repeated, late and stolen answers; our own bugs."""

from __future__ import annotations

from typing import Any

import pytest

from backend.coordinator.events import (
    Blame,
    Check,
    Checked,
    FreeSlot,
    GemmDone,
    GemmFailed,
    LeaseFail,
    Left,
    ResultArrived,
    SendAck,
    SendLease,
    StartCheck,
    Stored,
)
from backend.coordinator.fleet import MachineLimits
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

# ---- attacks and answers -----------------------------------------------------------------------------------------


def test_a_wrong_result_is_rejected_blamed_and_its_tile_goes_to_another_device(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.join("bob")
    harness.result(leases[0])
    effects = harness.do(Checked(leases[0].lease.lease, Check.BAD, "off by 3"))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SendAck) < kinds.index(FreeSlot) < kinds.index(Blame)
    assert bench.one(SendAck, effects).verdict == "rejected"
    assert bench.one(Blame, effects).reason == "wrong result: off by 3"
    assert not [lease for lease in bench.only(SendLease, effects) if lease.device == "ann"]
    assert harness.machine.book.devices["ann"].why_not(harness.now_s) == "wrong result: off by 3"


def test_a_spoiled_tile_returns_to_its_device_only_where_there_is_no_other(bench: Any) -> None:
    for others in (0, 1):
        harness = bench()
        harness.join("ann")
        first = bench.one(SendLease, harness.submit(size=64))
        for number in range(others):
            harness.join(f"bob{number}")
        effects = harness.do(LeaseFail("ann", "ann-1", first.lease.lease, "kernel", "trap"))
        assert bench.one(SendLease, effects).device == ("bob0" if others else "ann")


def test_fails_in_a_row_bar_a_device_without_blame(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    effects = harness.submit(size=64)
    for _ in range(3):
        lease = bench.one(SendLease, effects)
        effects = harness.do(LeaseFail("ann", "ann-1", lease.lease.lease, "kernel", "trap"))
        assert not bench.only(Blame, effects)
    assert not bench.only(SendLease, effects)
    assert "failed 3 leases in a row, last: kernel trap" in harness.machine.progress().waiting
    assert bench.only(SendLease, harness.join("ann", connection="2")), "a new connection starts anew"


def test_a_malformed_result_is_blamed(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    effects = harness.do(LeaseFail("ann", "ann-1", leases[0].lease.lease, "unsupported", "7 bytes", bad=True))
    assert "7 bytes" in bench.one(Blame, effects).reason


def test_stopped_is_neither_blamed_nor_counted(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    effects = harness.do(LeaseFail("ann", "ann-1", leases[0].lease.lease, "stopped", ""))
    assert not bench.only(Blame, effects) + bench.only(SendLease, effects)
    assert harness.machine.book.devices["ann"].fails == 0


def test_operands_that_are_not_finite_fail_the_gemm_and_blame_nobody(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0])
    harness.result(leases[1])
    effects = harness.do(Checked(leases[0].lease.lease, Check.OPERANDS_NOT_FINITE, "row 3 of A"))
    assert "row 3 of A" in bench.one(GemmFailed, effects).reason
    assert not bench.only(Blame, effects)
    effects = harness.do(Checked(leases[1].lease.lease, Check.BAD))
    assert not bench.only(Blame, effects), "the operands may have been overwritten by now"
    assert set(harness.freed) == set(harness.given)
    assert not harness.machine.book.leases


def test_an_unsure_verdict_blames_nobody_and_makes_the_rest_of_the_gemm_row_wise(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    effects = harness.submit(accuracy="normwise")
    first, second = bench.only(SendLease, effects)[:2]
    effects += harness.result(first) + harness.result(second)
    before = len(bench.only(SendLease, effects))
    assert {check.accuracy for check in bench.only(StartCheck, effects)} == {"normwise"}
    refused = harness.do(Checked(first.lease.lease, Check.UNSURE, "much rounding"))
    assert not bench.only(Blame, refused)
    ack = bench.one(SendAck, refused)
    assert (ack.verdict, ack.flop) == ("late", 0) and "much rounding" in ack.reason
    effects += refused + harness.do(Checked(second.lease.lease, Check.GOOD))
    effects += harness.do(Stored(second.lease.lease, True))
    answered = 2
    while not bench.only(GemmDone, effects):
        effects += harness.complete(bench.only(SendLease, effects)[answered])
        answered += 1
    leases = bench.only(SendLease, effects)
    assert {lease.lease.accuracy for lease in leases[:before]} == {"normwise"}
    assert {lease.lease.accuracy for lease in leases[before:]} == {"rowwise"}
    assert [lease.panels for lease in leases[before:]].count(first.panels) >= 1
    assert set(harness.freed) == set(harness.given)


def test_a_wrong_result_says_nothing_about_a_devices_speed(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0], seconds=1e-9)
    device = harness.machine.book.devices["ann"]
    assert not device.measured and device.flops == 1e9
    harness.do(Checked(leases[0].lease.lease, Check.BAD, "zeros"))
    assert not device.measured and device.flops == 1e9
    harness, leases = bench.two_tiles()
    harness.complete(leases[0])
    assert harness.machine.book.devices["ann"].measured


@pytest.mark.parametrize("lease", [0, 7, 3 * 2**32 + 999, 2 * 2**32, 2**53 - 1])
def test_results_of_unknown_and_stale_leases_are_late(bench: Any, lease: int) -> None:
    harness, _ = bench.two_tiles()
    slot = SlotRef("gw9", 1, "/s", 0, 0)
    effects = harness.do(ResultArrived("eve", "eve-1", lease, 1.0, 1.0, slot))
    assert [type(effect) for effect in effects] == [SendAck, FreeSlot]
    ack = bench.one(SendAck, effects)
    assert (ack.verdict, ack.gateway, ack.connection, ack.flop) == ("late", "gw9", "eve-1", 0)


def test_another_devices_lease_is_refused_and_stays_its_own(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    effects = harness.result(leases[0], device="eve", connection="eve-1")
    assert bench.one(SendAck, effects).verdict == "rejected"
    assert bench.only(SendAck, harness.complete(leases[0]))[-1].verdict == "accepted"
    assert harness.do(LeaseFail("eve", "eve-1", leases[1].lease.lease, "kernel", "")) == []


def test_a_result_sent_twice_is_credited_once(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0])
    assert bench.one(SendAck, harness.result(leases[0])).verdict == "duplicate"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert bench.one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).flop > 0
    again = harness.result(leases[0])
    assert (bench.one(SendAck, again).verdict, bench.one(SendAck, again).flop) == ("duplicate", 0)
    assert set(harness.freed) == set(harness.given)


def test_a_duplicate_is_still_a_duplicate_after_its_gemm_and_the_memory_of_it_is_bounded(bench: Any) -> None:
    harness = bench(MachineLimits(ended_leases_max=2))
    harness.join("ann")
    sent = [bench.one(SendLease, harness.submit(number=number, size=64)) for number in range(1)]
    harness.complete(sent[0])
    assert bench.one(SendAck, harness.result(sent[0])).verdict == "duplicate"
    for number in (1, 2):
        harness.complete(bench.one(SendLease, harness.submit(number=number, size=64)))
    assert bench.one(SendAck, harness.result(sent[0])).verdict == "late"
    assert len(harness.machine.book.ended) == 2


def test_a_rectangle_credited_before_is_a_duplicate_and_done(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    lease = bench.one(SendLease, harness.submit(size=64))
    harness.result(lease)
    harness.do(Checked(lease.lease.lease, Check.GOOD))
    effects = harness.do(Stored(lease.lease.lease, False))
    assert (bench.one(SendAck, effects).verdict, bench.one(SendAck, effects).flop) == ("duplicate", 0)
    assert bench.only(GemmDone, effects)
    assert harness.machine.progress().flop_done == 0


def test_a_lying_claim_of_speed_does_not_win_a_queue(bench: Any) -> None:
    harness = bench()
    harness.join("boast", flops=1e14)
    waiting = bench.only(SendLease, harness.submit(size=1024, k=1024))
    for _ in range(5):
        lease = waiting.pop(0)
        effects = harness.result(lease, after_s=0.9, seconds=1e-9)
        effects += harness.do(Checked(lease.lease.lease, Check.GOOD))
        waiting += bench.only(SendLease, effects + harness.do(Stored(lease.lease.lease, True)))
    tile = next(iter(harness.machine.book.gemms[0].tiles.values()))
    planned = harness.machine.book.devices["boast"].planned()
    fresh = sum(tile.panels.values())
    assert 0.5 < tile_seconds(tile.rect, tile.gemm.shape, planned, fresh, 0.0) < 3, "the server's clock says 0.9 s"


def test_a_tile_too_long_for_the_next_device_is_re_cut_and_its_parent_is_late(bench: Any) -> None:
    harness = bench(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("ann", flops=1e12)
    first = bench.one(SendLease, harness.submit(size=64, k=8192))
    harness.do(Left("ann", "ann-1", "closed"))
    pieces = bench.only(SendLease, harness.join("phone", flops=1e7))
    assert pieces
    assert all(piece.lease.m * piece.lease.n < 64 * 64 for piece in pieces)
    late = harness.result(first)
    assert bench.one(SendAck, late).verdict == "late"


# ---- our own bugs ------------------------------------------------------------------------------------------------


def test_answers_that_nobody_asked_for_are_our_bug(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    for event in (Checked(12345, Check.GOOD), Stored(12345, True), Checked(leases[0].lease.lease, Check.GOOD)):
        with pytest.raises(LeaseError):
            harness.machine.handle(event, harness.now_s)


def test_every_state_and_event_is_decided(bench: Any) -> None:
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
