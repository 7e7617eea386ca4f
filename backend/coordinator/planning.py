"""How a GEMM is divided among the devices of now: strips that find their panels again, or rectangles of its own.

A GEMM whose operands other products use too is cut in strips (planner/strips.py), by a team whose parts stay as they
are while the devices do: so each device is sent a token's numbers once. The team is formed anew when devices come or
go, or, between steps, when their speeds have drifted apart from what it was formed by. Any other GEMM is planned by
itself (planner/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from backend.coordinator.fleet import DeviceRecord
from backend.coordinator.records import GemmRun
from planner.panels import PanelRows, panels_bytes
from planner.plan import plan
from planner.shapes import Device, Plan, PlanLimits
from planner.strips import strips, team_of
from planner.tiles import result_bytes

DRIFT_MAX = 1.25
"""Devices whose speeds changed by factors further apart than this get other parts from the next step on: within a step
what a device has been sent is worth more than an even load."""

SMOOTHING = 0.02
"""Weight of a GEMM's measurement in those speeds: a step has hundreds of GEMMs, and each is told by a few tiles."""

STRIPS_WORTH = 1.25
"""Strips may cost this many times what the GEMM by itself would: what they leave on the devices saves more later."""


class Planning:
    """The team of one job, and the plans for its GEMMs."""

    def __init__(self, limits: PlanLimits) -> None:
        self._limits = limits
        self._team: dict[str, float] = {}
        self._speeds: dict[str, float] = {}  # of every device, FLOP/s over many GEMMs
        self._formed: dict[str, float] = {}  # the same when the team was formed, those left out included
        self._step = -1

    def plan(self, gemm: GemmRun, devices: Iterable[DeviceRecord]) -> Plan:
        """Shares for these devices; none where no device can take part."""
        records = {device.device: device for device in devices}
        fleet = {name: device.planned() for name, device in records.items()}
        shape = gemm.shape
        shared = shape.b_uses > 1 or shape.a_by_k or shape.b_by_k
        if not fleet or not shared:
            return plan(shape, list(fleet.values()), self._limits)
        self._form(gemm, fleet)

        def lacks(name: str, operand: int, panels: Sequence[PanelRows]) -> float:
            held = records[name].held
            return sum(ref.size for ref in (gemm.ref(operand, panel) for panel in panels) if ref.panel not in held)

        in_strips = strips(shape, self._team, fleet, self._limits, lacks)
        if in_strips is not None and shape.batch == 1 and (shape.a_by_k or shape.b_by_k):
            return in_strips[0]  # a rectangle by itself would need whole rows of it too
        alone = plan(shape, list(fleet.values()), self._limits)
        if in_strips is not None and (not alone.shares or in_strips[1] <= STRIPS_WORTH * self._cost_s(gemm, alone)):
            return in_strips[0]
        return alone

    def _cost_s(self, gemm: GemmRun, made: Plan) -> float:
        """As `strips` counts, but with nothing held."""
        sent = sum(
            sum(panels_bytes(tile, gemm.shape)[:2]) + result_bytes(tile, gemm.shape)
            for share in made.shares
            for tile in share.tiles
        )
        serial_s = len(made.shares) * self._limits.server_seconds
        return max(made.predicted_s, sent / self._limits.server_bps) + serial_s

    def _form(self, gemm: GemmRun, fleet: dict[str, Device]) -> None:
        """Keeps the team, or makes another."""
        speeds = {
            name: SMOOTHING * device.flops + (1 - SMOOTHING) * self._speeds.get(name, device.flops)
            for name, device in fleet.items()
        }
        self._speeds = speeds
        step = gemm.request.step
        if self._formed.keys() == speeds.keys():
            drift = [speed / self._formed[name] for name, speed in speeds.items()]
            if step == self._step or max(drift) <= DRIFT_MAX * min(drift):
                return
        self._team = team_of(gemm.shape, [replace(device, flops=speeds[name]) for name, device in fleet.items()])
        self._formed, self._step = speeds, step
