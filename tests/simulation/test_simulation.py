"""Two thousand seeded scenarios against the real core; and broken cores, which the simulator must find."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from backend.coordinator.events import FreeSlot, ResultArrived
from backend.coordinator.fleet import DeviceRecord, MachineLimits
from backend.coordinator.machine import Machine
from backend.coordinator.records import RETURNED
from backend.coordinator.transitions import LeaseEvent, TileState
from backend.simulation.clock import Channel, Clock
from backend.simulation.scenario import SimulationError, run_seed


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_seeds(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + 250)]
    assert sum(outcome.gemms for outcome in outcomes) >= 250
    assert sum(outcome.leases_lost for outcome in outcomes) > 0


def test_a_seed_runs_the_same_each_time() -> None:
    assert run_seed(37) == run_seed(37)


class LosesTiles(Machine):
    """A lease that expires takes its tile with it."""

    def __init__(self, job: str, epoch: int, limits: MachineLimits) -> None:
        super().__init__(job, epoch, limits)
        lose_all = self.book.lose_all

        def lose(device: DeviceRecord, why: str) -> None:
            tiles = [lease.tile for lease in device.out.values()]
            lose_all(device, why)
            for tile in tiles:
                if tile.state is TileState.READY and tile.share == RETURNED:
                    tile.gemm.queues[RETURNED].pop(tile.number)

        self.book.lose_all = lose  # type: ignore[method-assign]


class FreesEarly(Machine):
    """A slot is free as soon as its result has come."""

    def _result(self, event: ResultArrived) -> None:
        super()._result(event)
        if not any(isinstance(effect, FreeSlot) for effect in self.book.effects):
            self.book.effects.append(FreeSlot(event.slot))


class BelievesAnything(Machine):
    """Another device's lease may be answered."""

    def _result(self, event: ResultArrived) -> None:
        lease = self.book.leases.get(event.lease)
        if lease is not None and lease.state.value in ("out", "lost"):
            lease.owner.device = event.device
        super()._result(event)


class ForgetsBackups(Machine):
    """The second lease of a tile that is done stays out."""

    def __init__(self, job: str, epoch: int, limits: MachineLimits) -> None:
        super().__init__(job, epoch, limits)
        move = self.book.move

        def moved(lease: object, event: LeaseEvent) -> None:
            if event is not LeaseEvent.CLOSE:
                move(lease, event)  # type: ignore[arg-type]

        self.book.move = moved  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("broken", [LosesTiles, FreesEarly, BelievesAnything, ForgetsBackups])
def test_a_broken_core_is_found_within_200_seeds(broken: type[Machine]) -> None:
    for seed in range(200):
        try:
            run_seed(seed, broken)
        except SimulationError as error:
            assert f"make sim SEED={seed}" in str(error)
            return
    raise AssertionError(f"{broken.__doc__} was not noticed")


def test_a_channel_keeps_order_whatever_the_latency() -> None:
    clock, got = Clock(), []
    channel = Channel(clock)
    for number, latency_s in enumerate((3.0, 1.0, 2.0)):
        channel.send(latency_s, lambda n=number: got.append((n, clock.now_s)))
    while clock.step():
        pass
    assert got == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_command_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "backend.simulation", "--seed", "5", "--seeds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    totals = json.loads(done.stdout)
    assert totals["seeds"] == 3
    assert totals["failure"] is None
