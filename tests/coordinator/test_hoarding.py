"""Devices that take leases and never answer: connecting anew does not clear their record."""

from __future__ import annotations

from typing import Any

from backend.coordinator.events import Left, SendLease


def test_leaving_with_leases_out_means_one_lease_until_it_is_answered(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.do(Left("ann", leases[0].connection, "gone"))
    again = bench.only(SendLease, harness.join("ann", "2"))
    assert len(again) == 1  # at once, since a page may be loaded anew at any moment
    assert len(bench.only(SendLease, harness.complete(again[0]))) >= 2


def test_a_device_that_lets_its_leases_expire_twice_waits_however_often_it_connects(bench: Any) -> None:
    harness, leases = bench.two_tiles()
    harness.silence(30)  # the first expiry
    connection = leases[0].connection
    for number in range(2, 5):
        harness.do(Left("ann", connection, "gone"))
        given = bench.only(SendLease, harness.join("ann", str(number)))
        connection = f"ann-{number}"
        if not given:
            break
        harness.silence(10)
    assert not given
    assert bench.only(SendLease, harness.silence(60))  # in time it gets its trial
