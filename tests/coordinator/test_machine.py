"""The coordinator's core, event by event: work given out, caps and memory, silence, connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backend.coordinator.events import (
    Check,
    Checked,
    DropPanels,
    Effect,
    FreeSlot,
    GatewayRestarted,
    GemmDone,
    GemmFailed,
    GemmSubmitted,
    Joined,
    LeaseLost,
    Left,
    Matrix,
    PrepareCheck,
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
from planner.shapes import Gemm, PlanLimits
from tileweave.protocol.messages import Accuracy

# ---- the plain way -----------------------------------------------------------------------------------------------


def test_a_lease_names_its_panels_and_its_epoch(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    effects = harness.submit()
    first = bench.only(SendLease, effects)[0]
    lease = first.lease
    assert lease.lease == bench.EPOCH * 2**32
    (term,), (a, b) = lease.terms, first.panels
    assert (lease.job, lease.batch, term.k) == ("job", 1, 512)
    assert term.a == a.panel == f"a0.0-{lease.m - 1}"
    assert (term.b, term.b_row, term.b_column) == (b.panel, 0, 0)
    assert (a.path, a.offset, a.rows, a.columns) == ("/a", 64, lease.m, 512)
    assert (b.path, b.offset, b.rows) == ("/b", 128, lease.n)
    assert lease.deadline_s > 1.5
    second = bench.only(SendLease, effects)[1]
    assert second.lease.deadline_s > lease.deadline_s, "the second lease waits behind the first"
    assert isinstance(effects[effects.index(first) + 1], PrepareCheck)


@pytest.mark.parametrize("accuracy", ["rowwise", "normwise"])
def test_every_lease_says_what_its_gemm_accepts_and_its_check_asks_for_that(bench: Any, accuracy: Accuracy) -> None:
    harness = bench()
    harness.join("ann")
    leases = bench.only(SendLease, harness.submit(accuracy=accuracy))
    assert leases and {lease.lease.accuracy for lease in leases} == {accuracy}
    assert bench.one(StartCheck, harness.result(leases[0])).accuracy == accuracy


def test_a_gemm_runs_to_its_end_and_every_flop_is_credited_once(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    waiting = bench.only(SendLease, harness.submit())
    credited, done = 0, []
    while waiting:
        effects = harness.complete(waiting.pop(0))
        credited += sum(ack.flop for ack in bench.only(SendAck, effects))
        waiting += bench.only(SendLease, effects)
        done += bench.only(GemmDone, effects)
        assert not bench.only(DropPanels, effects), "what a device holds may serve other GEMMs"
    assert credited == 2 * 512**3 == harness.machine.progress().flop_done
    assert [entry.gemm for entry in done] == [0]
    assert done[0].tiles == harness.machine.progress().tiles_done
    assert set(harness.freed) == set(harness.given)
    assert not harness.machine.book.leases


def test_stored_is_answered_by_ack_then_slot_then_the_next_lease(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0])
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    effects = harness.do(Stored(leases[0].lease.lease, True))
    assert [type(effect) for effect in effects[:2]] == [SendAck, FreeSlot]


def test_store_carries_the_believed_and_the_servers_seconds(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0], seconds=99.0, after_s=0.5)
    store = bench.one(Store, harness.do(Checked(leases[0].lease.lease, Check.GOOD)))
    assert store.seconds == store.span_s == pytest.approx(0.5)
    assert store.flop == store.rect.flop(Gemm(1, 512, 512, 512))


def test_work_waits_for_a_device_and_an_idle_one_that_joins_takes_part_at_once(bench: Any) -> None:
    harness = bench()
    assert harness.submit(size=1024) == []
    assert harness.machine.progress().waiting == "waiting for volunteers"
    assert bench.only(SendLease, harness.join("ann"))
    assert harness.machine.progress().waiting == ""
    assert {lease.device for lease in bench.only(SendLease, harness.join("bob"))} == {"bob"}


def test_a_newcomer_of_unknown_links_is_tried_beside_a_fast_device_but_a_few_times_only(bench: Any) -> None:
    harness = bench()
    harness.join("ann", flops=3e10)
    harness.do(Joined("bob", "bob-1", "gw0", 3e10, 1 << 30, 1, 0.001, 0.0, 0.0, 100, 0))
    tried = 0
    for number in range(30):
        leases = bench.only(SendLease, harness.submit(number=number, size=256, k=128))
        while leases:
            tried += leases[0].device == "bob"
            # Bob's links are as slow as assumed.
            harness.now_s += 0.1 if leases[0].device == "bob" else 0.0
            leases = leases[1:] + bench.only(SendLease, harness.complete(leases[0]))
    assert tried == harness.machine.book.limits.trials_max


def test_the_oldest_gemm_goes_first(bench: Any) -> None:
    harness = bench()
    harness.submit(number=5)
    harness.submit(number=4)
    leases = bench.only(SendLease, harness.join("ann"))
    assert {lease.lease.terms[0].a.split(".")[0] for lease in leases} == {"a5"}


# ---- operands that are used again --------------------------------------------------------------------------------


def linear(number: int, kind: str, tokens: int = 256, inputs: int = 64, outputs: int = 128) -> GemmSubmitted:
    """Y = X W^T, dX = dY W and dW = dY^T X of one layer, W and the rest stored as they lie."""
    x = Matrix("x", "/arena", 64, tokens, inputs)
    w = Matrix("w", "/arena", 64, outputs, inputs)
    dy = Matrix("dy", "/arena", 64, tokens, outputs)
    match kind:
        case "forward":
            return GemmSubmitted(number, 0, 1, tokens, outputs, inputs, (x,), (w,), b_uses=2)
        case "dx":
            return GemmSubmitted(number, 0, 1, tokens, inputs, outputs, (dy,), (w,), b_by_k=True, b_uses=2)
        case _:
            return GemmSubmitted(number, 0, 1, outputs, inputs, tokens, (dy,), (x,), a_by_k=True, b_by_k=True)


def test_a_layers_numbers_go_to_each_device_once(bench: Any) -> None:
    harness = bench()
    names = ["ann", "bob", "cy"]
    for name in names:
        harness.join(name, flops=1e8)
    sent: dict[str, dict[str, int]] = {name: {} for name in names}
    for number, kind in enumerate(("forward", "dx", "dw")):
        waiting = bench.only(SendLease, harness.do(linear(number, kind)))
        assert waiting
        done: list[GemmDone] = []
        while waiting:
            lease = waiting.pop(0)
            for ref in lease.panels:
                sent[lease.device][ref.panel] = ref.size
            effects = harness.complete(lease)
            waiting += bench.only(SendLease, effects)
            done += bench.only(GemmDone, effects)
        assert len(done) == 1
    whole = {"x": 4 * 256 * 64, "w": 4 * 128 * 64, "dy": 4 * 256 * 128}
    for operand in ("x", "dy"):
        parts = [
            sum(size for panel, size in panels.items() if panel.startswith(f"{operand}.")) for panels in sent.values()
        ]
        assert sum(parts) == whole[operand], f"{operand} went out more than once"
        assert len([part for part in parts if part]) == 3
    for panels in sent.values():
        assert sum(size for panel, size in panels.items() if panel.startswith("w.")) == whole["w"]


def test_what_a_whole_step_had_no_use_for_is_dropped(bench: Any) -> None:
    harness = bench()
    harness.join("ann")

    def run(number: int, step: int, a: str) -> list[Effect]:
        request = replace(linear(number, "forward"), step=step)
        effects = harness.do(replace(request, a=(replace(request.a[0], content=a),)))
        waiting = bench.only(SendLease, effects)
        while waiting:
            more = harness.complete(waiting.pop(0))
            effects += more
            waiting += bench.only(SendLease, more)
        return effects

    run(0, 1, "x1")
    assert not bench.only(DropPanels, run(1, 2, "x2"))
    dropped = bench.one(DropPanels, run(2, 3, "x3")).panels
    assert dropped and all(panel.startswith("x1.") for panel in dropped), "W is used in every step"
    held = harness.machine.book.devices["ann"].held
    assert {panel.split(".")[0] for panel in held} == {"x2", "x3", "w"}


def test_what_a_device_holds_is_forgotten_when_it_leaves(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    waiting = bench.only(SendLease, harness.do(linear(0, "forward")))
    while waiting:
        waiting += bench.only(SendLease, harness.complete(waiting.pop(0)))
    held = set(harness.machine.book.devices["ann"].held)
    assert held
    drop = bench.one(DropPanels, harness.do(Left("ann", "ann-1", "another job's now")))
    assert set(drop.panels) == held


# ---- caps and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "rejects", "rtt", "cap"),
    [(0, 0, 1.0, 2), (0, 1, 1.0, 1), (3, 2, 1.0, 2), (100, 0, 1e-3, 2), (100, 0, 1.0, 8)],
)
def test_the_cap_follows_standing_and_round_trip(bench: Any, accepted: int, rejects: int, rtt: float, cap: int) -> None:
    harness = bench(MachineLimits(plan=PlanLimits(result_bytes_max=1 << 14)))
    harness.join("ann", accepted=accepted, rejects=rejects, rtt=rtt)
    leases = bench.only(SendLease, harness.submit(size=1024))
    for _ in range(20):
        leases += bench.only(SendLease, harness.do(Tick(), 0.001))
    assert len(leases) == cap


def test_panels_that_no_lease_needs_make_room_for_new_ones(bench: Any) -> None:
    harness = bench(MachineLimits(memory_bytes_min=1 << 16))
    harness.join("ann", memory=400_000)
    waiting = bench.only(SendLease, harness.submit(size=256, k=256))
    dropped, done = 0, False
    while waiting and not done:
        effects = harness.complete(waiting.pop(0))
        targeted = bench.only(DropPanels, effects)
        assert all(drop.device == "ann" for drop in targeted)
        dropped += len(targeted)
        waiting += bench.only(SendLease, effects)
        done = bool(bench.only(GemmDone, effects))
    assert done
    assert dropped > 0


def test_a_product_that_fits_no_device_fails_with_the_numbers(bench: Any) -> None:
    harness = bench()
    harness.join("ann", memory=20 << 20)
    failed = bench.one(GemmFailed, harness.submit(size=8, k=8 << 20))
    assert "8388608" in failed.reason
    assert str(2 * 4 * (2 * (8 << 20) + 1)) in failed.reason


def test_a_device_without_any_memory_to_speak_of_is_told_so_and_fails_nothing(bench: Any) -> None:
    harness = bench()
    harness.join("ann", memory=1000)
    assert harness.submit() == []
    assert "memory" in harness.machine.progress().waiting


# ---- silence -----------------------------------------------------------------------------------------------------


def test_an_expired_lease_takes_all_leases_of_its_device_with_it_and_others_get_the_tiles(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.silence(1.0)
    harness.join("bob")
    effects = harness.silence(10)
    lost = bench.only(LeaseLost, effects)
    assert {entry.lease for entry in lost} >= {lease.lease.lease for lease in leases}
    assert {entry.why for entry in lost if entry.device == "ann"} == {"expired"}
    assert "ann" not in {lease.device for lease in bench.only(SendLease, effects)}
    assert not bench.only(SendRevoke, effects), "a result that still comes is welcome"


def test_a_late_result_of_an_open_tile_is_used_and_clears_the_suspicion(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    assert not bench.only(SendLease, harness.silence(10))
    assert "silent" in harness.machine.progress().waiting
    effects = harness.result(leases[0])
    assert bench.one(StartCheck, effects).lease == leases[0].lease.lease
    assert bench.only(SendLease, effects), "it answered, so it gets work again"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert bench.one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).verdict == "accepted"


def test_a_silent_device_gets_one_trial_lease_after_a_while(bench: Any) -> None:
    harness, _ = bench.two_tiles(suspect_s=5.0)
    effects = harness.silence(12)
    assert len(bench.only(SendLease, effects)) == 1
    assert bench.only(LeaseLost, effects)


def test_the_second_lease_counts_from_the_answer_to_the_first(bench: Any) -> None:
    harness, leases = bench.two_tiles(leases_new_device_max=2)
    harness.silence(1.5)
    harness.result(leases[0])
    assert not bench.only(LeaseLost, harness.silence(1.4))


def test_a_stall_of_the_server_is_not_held_against_devices(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    assert not bench.only(LeaseLost, harness.do(Tick(), 60.0))
    assert bench.only(StartCheck, harness.result(leases[0], after_s=0.5))


def test_an_idle_device_backs_up_a_straggler_and_the_first_valid_result_wins(bench: Any) -> None:
    harness = bench(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("slow")
    first = bench.one(SendLease, harness.submit(size=64))
    backup = bench.one(SendLease, [*harness.join("bob"), *harness.silence(2.5)])
    assert (backup.device, backup.panels) == ("bob", first.panels)
    effects = harness.complete(backup)
    assert bench.one(SendRevoke, effects).leases == (first.lease.lease,)
    assert bench.only(GemmDone, effects)
    late = harness.result(first)
    assert bench.one(SendAck, late).verdict == "late"
    assert bench.only(FreeSlot, late)


def test_two_results_of_one_tile_in_check_give_one_store(bench: Any) -> None:
    harness = bench(MachineLimits(plan=PlanLimits(lease_seconds=1.0)))
    harness.join("slow")
    first = bench.one(SendLease, harness.submit(size=64))
    backup = bench.one(SendLease, [*harness.join("bob"), *harness.silence(2.5)])
    harness.result(first)
    harness.result(backup)
    assert bench.only(Store, harness.do(Checked(backup.lease.lease, Check.GOOD)))
    assert bench.one(SendAck, harness.do(Checked(first.lease.lease, Check.GOOD))).verdict == "late"
    assert bench.only(GemmDone, harness.do(Stored(backup.lease.lease, True)))
    assert set(harness.freed) == set(harness.given)


# ---- connections -------------------------------------------------------------------------------------------------


def test_a_closed_connection_returns_its_leases_and_its_result_counts_over_the_next_one(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    lost = bench.only(LeaseLost, harness.do(Left("ann", "ann-1", "closed")))
    assert len(lost) == len(leases)
    harness.join("ann", connection="2", accepted=0)
    effects = harness.complete(leases[-1], connection="ann-2")
    assert bench.one(SendAck, effects).connection == "ann-2"
    assert bench.one(SendAck, effects).verdict == "accepted"


def test_the_end_of_an_older_connection_and_a_repeated_join_change_nothing(bench: Any) -> None:
    harness, _ = bench.two_tiles()
    out = harness.machine.progress().leases_out
    assert harness.do(Left("ann", "ann-0", "closed")) == []
    assert harness.join("ann") == []
    assert harness.machine.progress().leases_out == out


def test_a_restarted_gateway_returns_the_leases_of_all_its_devices(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    assert len(bench.only(LeaseLost, harness.do(GatewayRestarted("gw0")))) == len(leases)
    assert harness.machine.progress().devices == 0


def test_an_answer_goes_to_the_newest_connection_that_sent_the_result(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.result(leases[0])
    harness.do(Left("ann", "ann-1", "closed"))
    harness.join("ann", connection="2")
    assert not bench.only(SendAck, harness.result(leases[0], connection="ann-2")), "the verdict is still to come"
    harness.do(Checked(leases[0].lease.lease, Check.GOOD))
    assert bench.one(SendAck, harness.do(Stored(leases[0].lease.lease, True))).connection == "ann-2"


def test_a_paused_device_gets_nothing_until_it_is_ready(bench: Any) -> None:
    harness = bench()
    harness.join("ann")
    harness.do(StatusChanged("ann", "ann-1", False, "hidden"))
    assert harness.submit() == []
    assert "hidden" in harness.machine.progress().waiting
    assert bench.only(SendLease, harness.do(StatusChanged("ann", "ann-1", True, "")))
