"""Devices that claim, send or change far more than any device would, against a real gateway."""

from __future__ import annotations

import time

import pytest

from backend.gateway.security import network_of
from backend.switchboard.messages import Assign, DeviceOnline, DeviceStatus, ResultReady
from tileweave.protocol import Bye, Ping, Pong, Result, Status

MIB = 1 << 20


def returning(served, lease: int):
    """A device that comes back with a finished result, or so it says."""
    made = served.device().welcome
    return served.device(device=made.device, secret=made.secret, leases=[lease])


def answered(peer) -> None:
    """All that the peer sent before has been handled."""
    peer.send(Ping(nonce=77))
    while not isinstance(peer.receive()[0], Pong):
        pass


def test_results_claimed_without_a_lease_share_a_part_of_the_slots(make_served) -> None:
    served = make_served(slots_bytes_max=64 * MIB, slot_wait_s_max=0.2)
    job = served.world.running_job().id
    # Each claims a quarter of all slots and sends one byte of it.
    claim = Result(lease=1, job=job, seconds=0, offset=0, size=16 * MIB)
    first, *others = [returning(served, 1) for _ in range(4)]
    first.send(claim, b"x")
    answered(first)  # before the others claim: sockets are read in no particular order
    for other in others:
        other.send(claim, b"x")
    assert [other.expect("Bye").code for other in others] == ["busy"] * 3
    answered(first)


def test_a_device_made_just_now_has_no_results_to_send_again(make_served) -> None:
    served = make_served()
    job = served.world.running_job().id
    peer = served.device(leases=[1])
    peer.send(Result(lease=1, job=job, seconds=0, offset=0, size=4), bytes(4))
    assert peer.expect("Ack").verdict == "late"
    assert not [item for item in served.world.told_coordinator(job) if isinstance(item, ResultReady)]


def test_tiny_results_without_a_lease_count_as_messages(make_served) -> None:
    served = make_served(device_messages_per_s_max=50.0)
    peer = served.device()
    for _ in range(400):
        peer.send(Result(lease=1, job="j", seconds=0, offset=0, size=1), b"x")
    while not isinstance(message := peer.receive()[0], Bye):
        pass
    assert "messages a second" in message.reason


def test_a_status_that_changes_all_the_time_is_told_now_and_then_and_its_last_word_is(make_served) -> None:
    served = make_served(device_messages_per_s_max=1000.0)
    world, peer = served.world, served.device()
    job = world.running_job().id

    def online() -> DeviceOnline | None:
        return next((item for item in world.told_allocator() if isinstance(item, DeviceOnline)), None)

    def told() -> list[DeviceStatus]:
        return [item for item in world.told_coordinator(job) if isinstance(item, DeviceStatus)]

    connection = world.wait_until("the device", online).connection
    world.tell_gateway(Assign(device=peer.welcome.device, connection=connection, job=job, epoch=1))
    peer.send(Status(state="paused", reason="battery"))  # told with the next tick at the latest: now it is assigned
    world.wait_until("the assignment", told)
    started_s = time.monotonic()
    for number in range(500):
        peer.send(Status(state="paused" if number % 2 else "ready"))
    peer.send(Status(state="paused", reason="the last word"))
    world.wait_until("the last word", lambda: told()[-1].reason == "the last word")
    seconds = time.monotonic() - started_s
    assert len(told()) <= 20 + 8 * seconds  # 500 were sent; one tick and five changes a second are told


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_one_host_of_ipv6_is_one_address(address: str, network: str) -> None:
    assert network_of(address) == network
