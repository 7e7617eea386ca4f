"""What a job's pages show while it runs, counted from events and effects as they pass.

The idea: totals only grow; rates are over a sliding window; a step's row is the difference of two totals. Bytes down
are counted as the gateways count them: each panel once for each connection that it was not sent to before. Left out:
anything that decides something, which is the core's work.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from backend.coordinator.events import DropPanels, GemmDone, ResultArrived, SendLease
from backend.stores.jobs import StepRow
from planner.shapes import Gemm
from tileweave.script.wire import StepReport

WINDOW_S = 5.0


@dataclass(slots=True)
class Totals:
    """Since the job's start, as far as this epoch knows."""

    tiles: int = 0
    flop: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(slots=True)
class GemmTotals:
    """Of all finished GEMMs of this epoch."""

    gemms: int = 0
    tiles: int = 0
    span_s: float = 0.0
    kernel_seconds: float = 0.0
    predicted_s: float = 0.0


class Counters:
    """Counters of one epoch. `now_s` is monotonic everywhere but in rows."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.gemm_totals = GemmTotals()
        self.last_gemm: dict[str, Any] | None = None
        self._at_step = Totals()
        self._stored: deque[tuple[float, int]] = deque()  # (when, FLOP) within the window
        self._window_flop = 0
        self._worked: set[str] = set()  # devices with a stored tile since the last step
        self._panels_sent: dict[str, set[str]] = {}  # connection -> panels
        self._open: dict[int, tuple[Gemm, float]] = {}  # shape, and this process' CPU seconds at submission

    # ---- what passes -------------------------------------------------------------------------------------------------

    def go_on_from(self, tiles: int, flop: int) -> None:
        """Totals of earlier epochs, as far as they are still known."""
        self.totals = Totals(tiles=tiles, flop=flop)
        self._at_step = Totals(tiles=tiles, flop=flop)

    def gone(self, connected: set[str]) -> None:
        """Forget what was sent on connections that are not among these."""
        for connection in self._panels_sent.keys() - connected:
            del self._panels_sent[connection]

    def submitted(self, gemm: int, shape: Gemm) -> None:
        """The script waits for a product."""
        self._open[gemm] = (shape, time.process_time())

    def leased(self, effect: SendLease) -> None:
        """A lease goes out, after its missing panels."""
        sent = self._panels_sent.setdefault(effect.connection, set())
        for panel in effect.panels:
            if panel.panel not in sent:
                sent.add(panel.panel)
                self.totals.bytes_down += panel.size

    def dropped(self, effect: DropPanels) -> None:
        """The device forgets these panels."""
        self._panels_sent.get(effect.connection, set()).difference_update(effect.panels)

    def arrived(self, event: ResultArrived) -> None:
        """A result was uploaded, useful or not."""
        self.totals.bytes_up += event.slot.size

    def stored(self, device: str, flop: int, now_s: float) -> None:
        """A verified and credited tile is in C."""
        self.totals.tiles += 1
        self.totals.flop += flop
        self._stored.append((now_s, flop))
        self._window_flop += flop
        self._worked.add(device)

    def gemm_done(self, effect: GemmDone) -> dict[str, Any]:
        """A product is complete; its figures, for the `gemm` event. `cpu_s`: used here since its request."""
        shape, cpu_before_s = self._open.pop(effect.gemm)
        totals = self.gemm_totals
        totals.gemms += 1
        totals.tiles += effect.tiles
        totals.span_s += effect.span_s
        totals.kernel_seconds += effect.kernel_seconds
        totals.predicted_s += effect.predicted_s
        self.last_gemm = (
            asdict(effect) | asdict(shape) | {"flop": shape.flop, "cpu_s": time.process_time() - cpu_before_s}
        )
        return self.last_gemm

    def gemm_failed(self, gemm: int) -> None:
        """A product will not come."""
        self._open.pop(gemm, None)

    # ---- what is shown -----------------------------------------------------------------------------------------------

    def live(self, now_s: float) -> dict[str, Any]:
        """Totals and rates, for the job's live hash."""
        while self._stored and self._stored[0][0] < now_s - WINDOW_S:
            self._window_flop -= self._stored.popleft()[1]
        return {
            "tiles": self.totals.tiles,
            "flop": self.totals.flop,
            "gflops": self._window_flop / WINDOW_S / 1e9,
            "tiles_per_s": len(self._stored) / WINDOW_S,
        }

    def gemm_figures(self) -> dict[str, Any]:
        """The last product's figures and the sums over all, for benches."""
        return {"gemm_last": self.last_gemm, "gemm_totals": asdict(self.gemm_totals)}

    def step_row(self, report: StepReport, time_s: float) -> StepRow:
        """The step's row: what the script reported, and what was counted since the row before."""
        now, before = self.totals, self._at_step
        row = StepRow(
            step=report.step, loss=report.loss, seconds=report.seconds, samples=report.samples, unit=report.unit,
            tiles=now.tiles - before.tiles, flop_offloaded=report.flop_offloaded, flop_local=report.flop_local,
            bytes_down=now.bytes_down - before.bytes_down, bytes_up=now.bytes_up - before.bytes_up,
            devices=len(self._worked), time_s=time_s,
        )  # fmt: skip
        self._at_step = Totals(now.tiles, now.flop, now.bytes_down, now.bytes_up)
        self._worked.clear()
        return row
