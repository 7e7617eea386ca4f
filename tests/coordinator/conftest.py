"""A harness around the coordinator's core: events in, effects out, invariants checked after each."""

from __future__ import annotations

from typing import TypeVar

import pytest

from backend.coordinator.events import (
    Check,
    Checked,
    Effect,
    Event,
    FreeSlot,
    GemmSubmitted,
    Joined,
    Matrix,
    ResultArrived,
    SendLease,
    Stored,
    Tick,
)
from backend.coordinator.fleet import MachineLimits
from backend.coordinator.machine import Machine
from backend.switchboard.messages import SlotRef
from tileweave.protocol.messages import Accuracy

E = TypeVar("E")


class Harness:
    """A machine, a clock, and what has come out of it."""

    EPOCH = 3

    def __init__(self, limits: MachineLimits | None = None) -> None:
        self.machine = Machine("job", self.EPOCH, limits or MachineLimits())
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

    def submit(self, number: int = 0, size: int = 512, k: int = 512, accuracy: Accuracy = "rowwise") -> list[Effect]:
        a = Matrix(f"a{number}", "/a", 64, size, k)
        b = Matrix(f"b{number}", "/b", 128, size, k)
        return self.do(GemmSubmitted(number, 0, 1, size, size, k, (a,), (b,), accuracy=accuracy))

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

    @staticmethod
    def only(kind: type[E], effects: list[Effect]) -> list[E]:
        return [effect for effect in effects if isinstance(effect, kind)]

    @staticmethod
    def one(kind: type[E], effects: list[Effect]) -> E:
        (found,) = Harness.only(kind, effects)
        return found

    @classmethod
    def two_tiles(cls, **limits: object) -> tuple[Harness, list[SendLease]]:
        """One trusted device with leases of a GEMM of several tiles."""
        harness = cls(MachineLimits(**limits))  # type: ignore[arg-type]
        harness.join("ann")
        leases = cls.only(SendLease, harness.submit())
        assert len(leases) >= 2
        return harness, leases


@pytest.fixture
def bench() -> type[Harness]:
    """The harness: call it for a machine of one's own."""
    return Harness
