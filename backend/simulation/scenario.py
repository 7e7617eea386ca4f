"""One scenario from one seed: jobs, devices and troubles drawn at random, run to its end on the virtual clock.

Troubles happen in the first `CHAOS_S`; at least one honest device always lives. Whatever happened, every GEMM must be
done by `END_S`, every slot free, and credit equal to the FLOP of every rectangle, none of it a liar's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from backend.coordinator.events import GemmSubmitted, Matrix
from backend.coordinator.fleet import MachineLimits
from backend.coordinator.machine import Machine
from backend.simulation.coordinator import SimCoordinator
from backend.simulation.devices import Manners, SimDevice
from backend.simulation.gateway import SimGateway
from backend.simulation.world import World
from planner.shapes import PlanLimits
from tileweave.protocol.messages import Profile

CHAOS_S = 30.0
END_S = 900.0

MachineMaker = Callable[[str, int, MachineLimits], Machine]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scenario came to: virtual seconds, events handled by cores, leases lost, GEMMs done."""

    seed: int
    seconds: float
    events: int
    leases_lost: int
    gemms: int


class SimulationError(AssertionError):
    """A scenario failed; the message says how to replay it."""


def run_seed(seed: int, make: MachineMaker = Machine) -> Outcome:
    """Run the scenario of `seed` with the core that `make` builds. Raises `SimulationError`."""
    world: World | None = None
    try:
        world, coordinators = _build(random.Random(seed), make)
        while world.coordinators:
            assert world.clock.step(), "nothing is left to happen, and a job is not done"
            assert world.clock.now_s < END_S, f"not done after {END_S} s: {_stuck(world)}"
        ended_s = world.clock.now_s
        _settle(world)
    except Exception as error:
        at = f" at {world.clock.now_s:.3f} s" if world is not None else ""
        raise SimulationError(f"{type(error).__name__}: {error}{at}\nreplay: make sim SEED={seed}") from error
    lost = sum(coordinator.machine.progress().leases_lost for coordinator in coordinators)
    return Outcome(seed, ended_s, world.events, lost, sum(coordinator.done for coordinator in coordinators))


def _settle(world: World) -> None:
    """After the last job, once everything under way has come to rest: the accounts."""
    while world.clock.step():
        pass
    assert not world.uploads, f"slots are never freed: {list(world.uploads)[:3]}"
    assert sum(world.credits.values()) == world.flop_due, f"{world.credits} credited, {world.flop_due} due"
    for name, flop in world.credits.items():
        assert not flop or world.devices[name].manners.lies < 1, f"{name} only lies and has {flop} FLOP"


def _stuck(world: World) -> str:
    return "; ".join(f"{job}: {entry.machine.progress()}" for job, entry in world.coordinators.items())


def _build(rng: random.Random, make: MachineMaker) -> tuple[World, list[SimCoordinator]]:
    world = World(rng)
    for i in range(rng.choice([1, 1, 2])):
        world.gateways[f"gw{i}"] = SimGateway(world, f"gw{i}")
    coordinators: list[SimCoordinator] = []
    for i in range(rng.choice([1, 1, 1, 2])):
        limits = MachineLimits(plan=PlanLimits(lease_seconds=0.002), memory_bytes_min=1 << 16, flops_min=1e4)
        machine = make(f"job{i}", rng.randint(1, 9), limits)
        coordinator = SimCoordinator(world, f"job{i}", machine, _gemms(f"job{i}", rng), rng.choice([1, 1, 2]))
        coordinators.append(coordinator)
        world.coordinators[coordinator.job] = coordinator
        world.clock.at(rng.uniform(0, 2), coordinator.start)
    for i in range(rng.randint(1, 6)):
        manners = _honest(rng) if i == 0 else _any_manners(rng)
        speed = manners.flops * rng.choice([1.0, 1.0, 1.0, 0.1, 10.0, 1e6])
        memory = rng.choice([64 << 20, 64 << 20, 1 << 20, 256 << 10])
        device = SimDevice(world, f"{manners.name}{i}", Profile(flops=speed, memory_bytes=memory), manners, rng)
        world.devices[device.name] = device
        world.clock.at(rng.choice([0.0, rng.uniform(0, CHAOS_S)]) if i else rng.uniform(0, 2), device.connect)
        if manners.dies_s is not None:
            world.clock.at(manners.dies_s, device.die)
    _troubles(world, rng)
    return world, coordinators


def _gemms(job: str, rng: random.Random) -> list[GemmSubmitted]:
    """Some alone, some that share operands with others: by lines or by k, and sums of several parts."""
    gemms = []
    for number in range(rng.randint(1, 3)):
        batch = rng.choice([1, 1, 1, rng.randint(2, 12)])
        m, n, k = (rng.choice([1, 8, 31, 64, 96, 128]) for _ in range(3))
        uses = rng.choice([1, 1, 2, 8])
        a_by_k, b_by_k = (uses > 1 and rng.random() < 0.5 for _ in range(2))
        parts = rng.choice([1, 1, 3]) if uses > 1 and batch == 1 else 1
        a = _operand(job, parts, rng.choice(["x", f"a{number}"]), batch, m, k, a_by_k)
        b = _operand(job, parts, rng.choice(["w", f"b{number}"]), batch, n, k, b_by_k)
        gemms.append(GemmSubmitted(number, 0, batch, m, n, k, a, b, a_by_k, b_by_k, uses))
    return gemms


def _operand(job: str, parts: int, name: str, batch: int, lines: int, k: int, by_k: bool) -> tuple[Matrix, ...]:
    rows, columns = (batch * k, lines) if by_k else (batch * lines, k)
    return tuple(Matrix(f"{job}.{name}.{part}.{rows}.{columns}", "arena", 0, rows, columns) for part in range(parts))


def _honest(rng: random.Random) -> Manners:
    """Always right in the end, though it may stutter, lose its socket or pause."""
    return Manners(
        "honest", 10.0 ** rng.uniform(6, 7.5), twice=rng.choice([0, 0, 0.3]), hiccup=rng.choice([0, 0, 0.05]),
        drops_socket=rng.choice([0, 0, 0.1]), pauses=rng.choice([0, 0, 0.1]),
    )  # fmt: skip


def _any_manners(rng: random.Random) -> Manners:
    flops = 10.0 ** rng.uniform(6, 7.5)
    return rng.choice([
        _honest(rng),
        Manners("slow", flops / 20, hiccup=0.1),
        Manners("liar", flops * 3, lies=1.0),
        Manners("sometimes-liar", flops, lies=0.3),
        Manners("malformed", flops, malformed=0.5),
        Manners("failing", flops, fails=0.5),
        Manners("forger", flops, forges=0.5, twice=0.5),
        Manners("dying", flops, dies_s=rng.uniform(0, CHAOS_S)),
        Manners("flaky", flops, drops_socket=0.3, hiccup=0.1, twice=0.1),
    ])  # fmt: skip


def _troubles(world: World, rng: random.Random) -> None:
    for gateway in world.gateways.values():
        if rng.random() < 0.3:
            world.clock.at(rng.uniform(0, CHAOS_S), gateway.restart)
    for coordinator in world.coordinators.values():
        if rng.random() < 0.3:
            start_s, length_s = rng.uniform(0, CHAOS_S), rng.uniform(1, 10)

            def stall(entry: SimCoordinator = coordinator, until_s: float = start_s + length_s) -> None:
                entry.stalled_until_s = until_s

            world.clock.at(start_s, stall)
