"""The allocator: weights, few moves, fences."""

from __future__ import annotations

import random

from backend.allocator.core import Allocator, Effect, TellCoordinator, TellGateway
from backend.switchboard.messages import (
    Assign,
    Census,
    DeviceJoined,
    DeviceLeft,
    DeviceOffline,
    DeviceOnline,
    GatewayUp,
    JobGone,
    JobReady,
)
from tileweave.protocol.messages import Profile


def online(number: int, connection: int = 1, gateway: str = "gw0") -> DeviceOnline:
    return DeviceOnline(device=f"d{number}", connection=f"c{number}-{connection}", gateway=gateway, profile=Profile())


def joins(effects: list[Effect]) -> list[tuple[str, str]]:
    return [
        (effect.job, effect.message.online.device)
        for effect in effects
        if isinstance(effect, TellCoordinator) and isinstance(effect.message, DeviceJoined)
    ]


def leaves(effects: list[Effect]) -> list[tuple[str, str]]:
    return [
        (effect.job, effect.message.device)
        for effect in effects
        if isinstance(effect, TellCoordinator) and isinstance(effect.message, DeviceLeft)
    ]


def counts(allocator: Allocator) -> dict[str | None, int]:
    jobs = list(allocator.jobs_of_devices().values())
    return {job: jobs.count(job) for job in set(jobs)}


def started(devices: int, **weights: float) -> Allocator:
    allocator = Allocator(100)
    for number in range(devices):
        allocator.handle(online(number), 0.0)
    for job, weight in weights.items():
        allocator.handle(JobReady(job=job, epoch=1, weight=weight), 0.0)
    return allocator


def test_devices_wait_for_a_job_and_then_join_it() -> None:
    allocator = Allocator(100)
    assert allocator.handle(online(0), 0.0) == []
    effects = allocator.handle(JobReady(job="a", epoch=7, weight=1.0), 1.0)
    assert effects == [
        TellGateway("gw0", Assign(device="d0", connection="c0-1", job="a", epoch=101)),
        TellCoordinator("a", DeviceJoined(online=online(0), epoch=7)),
    ]


def test_weights_decide_and_a_new_job_takes_only_its_part() -> None:
    allocator = started(8, a=1.0)
    effects = allocator.handle(JobReady(job="b", epoch=1, weight=3.0), 1.0)
    assert counts(allocator) == {"a": 2, "b": 6}
    assert len(joins(effects)) == len(leaves(effects)) == 6
    effects = allocator.handle(JobGone(job="b", epoch=1), 2.0)
    assert counts(allocator) == {"a": 8}
    assert len(joins(effects)) == 6
    assert leaves(effects) == []


def test_every_job_gets_a_device_where_there_are_enough() -> None:
    assert counts(started(3, big=1000.0, small=1.0)) == {"big": 2, "small": 1}


def test_one_device_coming_or_going_moves_at_most_one_other() -> None:
    rng = random.Random(3)
    allocator = started(10, a=1.0, b=1.0, c=2.0)
    present = set(range(10))
    for step in range(200):
        number = rng.randrange(20)
        if number in present:
            present.remove(number)
            message: DeviceOnline | DeviceOffline = DeviceOffline(
                device=f"d{number}", connection=f"c{number}-1", reason=""
            )
        else:
            present.add(number)
            message = online(number)
        moved = [device for _, device in joins(allocator.handle(message, float(step))) if device != f"d{number}"]
        assert len(moved) <= 1
        allocator.check_invariants()


def test_a_newer_connection_replaces_the_older_and_the_older_ones_end_is_ignored() -> None:
    allocator = started(1, a=1.0)
    effects = allocator.handle(online(0, connection=2, gateway="gw1"), 1.0)
    assert leaves(effects) == [("a", "d0")]
    assert joins(effects) == [("a", "d0")]
    assert allocator.handle(DeviceOffline(device="d0", connection="c0-1", reason=""), 2.0) == []
    assert counts(allocator) == {"a": 1}
    assert leaves(allocator.handle(DeviceOffline(device="d0", connection="c0-2", reason=""), 3.0)) == [("a", "d0")]
    assert counts(allocator) == {}


def test_messages_delivered_twice_change_nothing() -> None:
    allocator = started(2, a=1.0)
    for message in (online(0), JobReady(job="a", epoch=1, weight=1.0), JobGone(job="x", epoch=1)):
        assert allocator.handle(message, 1.0) == []
    assert allocator.handle(DeviceOffline(device="d9", connection="?", reason=""), 1.0) == []


def test_a_restarted_gateway_loses_its_devices_once() -> None:
    allocator = started(2, a=1.0)
    allocator.handle(online(2, gateway="gw1"), 0.0)
    up = GatewayUp(gateway="gw0", incarnation="2")
    assert sorted(leaves(allocator.handle(up, 1.0))) == [("a", "d0"), ("a", "d1")]
    allocator.handle(online(0, connection=2), 2.0)
    assert allocator.handle(up, 3.0) == []
    assert counts(allocator) == {"a": 2}


def test_a_restarted_coordinator_gets_its_devices_again_and_its_predecessor_is_fenced() -> None:
    allocator = started(2, a=1.0)
    effects = allocator.handle(JobReady(job="a", epoch=2, weight=1.0), 1.0)
    assert sorted(joins(effects)) == [("a", "d0"), ("a", "d1")]
    assert all(
        effect.message.epoch == 2 for effect in effects if isinstance(effect, TellCoordinator) and joins([effect])
    )
    assert allocator.handle(JobGone(job="a", epoch=1), 2.0) == []
    assert allocator.handle(JobReady(job="a", epoch=1, weight=9.0), 3.0) == []
    effects = allocator.handle(JobGone(job="a", epoch=2), 4.0)
    assert [effect.message.job for effect in effects if isinstance(effect.message, Assign)] == [None, None]


def test_epochs_only_grow() -> None:
    allocator = Allocator(5)
    seen = []
    for number in range(4):
        for message in (online(number), JobReady(job=f"j{number}", epoch=1, weight=1.0)):
            effects = allocator.handle(message, 0.0)
            seen += [effect.message.epoch for effect in effects if isinstance(effect.message, Assign)]
    assert seen == sorted(set(seen))
    assert seen[0] == 6


def test_the_job_that_waited_goes_first() -> None:
    allocator = started(1, a=1.0, b=1.0)
    assert counts(allocator) == {"a": 1}
    allocator.handle(DeviceOffline(device="d0", connection="c0-1", reason=""), 60.0)
    allocator.handle(online(0, connection=2), 61.0)
    assert counts(allocator) == {"b": 1}


def test_a_fresh_allocator_asks_for_a_census() -> None:
    assert Allocator(0).census(["gw0", "gw1"]) == [TellGateway("gw0", Census()), TellGateway("gw1", Census())]
