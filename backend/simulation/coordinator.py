"""A simulated coordinator process: the real core, a shell on the virtual clock, and the script that feeds it GEMMs.

Each rule of the real shell that the core relies on is an assertion: a slot is not freed while it is read, credit is
granted once per rectangle and only for a right result, a GEMM that has ended is not checked, C is painted exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backend.coordinator import events as core
from backend.coordinator.machine import Machine
from backend.simulation.clock import Channel
from backend.switchboard.messages import JobReady, SlotRef
from planner.shapes import Rect

if TYPE_CHECKING:
    from backend.simulation.world import World

TICK_S = 0.5


class SimCoordinator:
    """A job's coordinator: the real core in a simulated shell, and the script that feeds it GEMMs."""

    def __init__(self, world: World, job: str, machine: Machine, gemms: list[core.GemmSubmitted], at_once: int) -> None:
        self.world = world
        self.job = job
        self.machine = machine
        self.waiting = list(reversed(gemms))
        self.open: dict[int, core.GemmSubmitted] = {}
        self.painted: dict[int, NDArray[Any]] = {}
        self.reading: dict[int, SlotRef] = {}
        self.ledger: set[tuple[int, Rect]] = set()
        self.stalled_until_s = 0.0
        self.stream = Channel(world.clock)
        self.at_once = at_once
        self.done = 0

    def start(self) -> None:
        """Take devices, and submit the first GEMMs."""
        self.world.allocate(JobReady(job=self.job, epoch=self.machine.book.epoch, weight=1.0))
        self._submit()
        self._tick()

    def deliver(self, event: core.Event) -> None:
        """An event reaches the core, now or when the server's stall is over."""
        if self.world.clock.now_s < self.stalled_until_s:
            self.world.clock.at(self.stalled_until_s, lambda: self.deliver(event))
            return
        self.world.events += 1
        effects = self.machine.handle(event, self.world.clock.now_s)
        self.machine.check_invariants()
        for effect in effects:
            self._carry_out(effect)

    def _tick(self) -> None:
        if self.job in self.world.coordinators:
            self.deliver(core.Tick())
            self.world.clock.after(TICK_S, self._tick)

    def _submit(self) -> None:
        while self.waiting and len(self.open) < self.at_once:
            gemm = self.waiting.pop()
            self.open[gemm.gemm] = gemm
            self.painted[gemm.gemm] = np.zeros((gemm.batch, gemm.m, gemm.n, gemm.k), dtype=np.uint8)
            self.deliver(gemm)

    def _carry_out(self, effect: core.Effect) -> None:
        world = self.world
        match effect:
            case core.SendLease():
                world.push(self.job, effect)
            case core.SendAck():
                world.credit(effect.device, effect.flop)
                world.tell(effect, lambda connection: connection.device.acknowledged(effect.lease))
            case core.SendRevoke():
                world.tell(effect, lambda connection: connection.device.revoked(effect.leases))
            case core.DropPanels():
                world.drop(effect)
            case core.FreeSlot():
                assert effect.slot not in self.reading.values(), f"{effect.slot} is freed while it is read"
                world.free(effect.slot)
            case core.StartCheck():
                self._check(effect)
            case core.Store():
                self._store(effect)
            case core.Blame():
                world.devices[effect.device].blamed()
            case core.GemmDone():
                painted = self.painted.pop(effect.gemm)
                assert bool((painted == 1).all()), f"GEMM {effect.gemm} is done, but C is not painted exactly once"
                self._gemm_ended(effect.gemm)
            case core.GemmFailed():
                raise AssertionError(f"GEMM {effect.gemm} failed: {effect.reason}")
            case core.LeaseLost() | core.PrepareCheck():
                pass

    def _check(self, effect: core.StartCheck) -> None:
        assert effect.gemm in self.open, f"a check of GEMM {effect.gemm}, whose operands may be gone"
        self.reading[effect.lease] = effect.slot
        upload = self.world.uploads[effect.slot]
        verdict = core.Check.GOOD if upload.right else core.Check.BAD

        def checked() -> None:
            del self.reading[effect.lease]
            self.deliver(core.Checked(effect.lease, verdict, "" if upload.right else "does not match"))

        self.world.clock.after(self.world.work_s(), checked)

    def _store(self, effect: core.Store) -> None:
        upload = self.world.uploads[effect.slot]
        assert upload.right, f"a wrong result of {effect.device} is stored"
        assert effect.flop == effect.rect.flop(self.open[effect.gemm].shape), "credit is not the rectangle's FLOP"
        key = (effect.gemm, effect.rect)
        assert key not in self.ledger, f"{key} is credited twice"
        self.ledger.add(key)
        rect = effect.rect
        k0, k1 = rect.k_run(self.open[effect.gemm].shape)
        self.painted[effect.gemm][rect.b0 : rect.b1, rect.m0 : rect.m1, rect.n0 : rect.n1, k0:k1] += 1
        self.reading[effect.lease] = effect.slot

        def stored() -> None:
            del self.reading[effect.lease]
            self.deliver(core.Stored(effect.lease, True))

        self.world.clock.after(self.world.work_s(), stored)

    def _gemm_ended(self, number: int) -> None:
        gemm = self.open.pop(number)
        self.world.flop_due += gemm.shape.flop
        self.done += 1
        if self.waiting:
            self.world.clock.after(self.world.latency_s(), self._submit)
        elif not self.open:
            self.world.job_ended(self.job)
