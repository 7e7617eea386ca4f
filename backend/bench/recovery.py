"""`tileweave bench recovery`: what the loss of a device costs in the middle of a step.

Two native volunteers of equal, emulated speed compute one large GEMM (the step). One of them is stopped (SIGSTOP), has
its link swallowed by a proxy that keeps the sockets open, or is killed. `detection_s` is from the fault to the moment
the coordinator takes the victim's leases back; `extra_step_s` is the step's time over the ideal, in which the survivor,
at the rate of the undisturbed step, does all that was left at the moment of the fault and loses nothing.
"""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend.bench.blackhole import Blackhole
from backend.swarm import NativeVolunteer, Swarm, wait_for

FAULTS = ("stop", "blackhole", "kill")
GFLOPS_EACH = 3.0
M, N, K = 1536, 1536, 4096


@dataclass(frozen=True)
class Step:
    """One GEMM as the server saw it; `start` and `end` are on this process' monotonic clock."""

    start: float
    end: float
    tile_s: float
    lost: list[tuple[float, dict[str, Any]]]

    @property
    def seconds(self) -> float:
        """From the first lease to the last tile stored."""
        return self.end - self.start


class Bench:
    """Server, proxy, operands on disk and the two volunteers."""

    def __init__(self, swarm: Swarm, hole: Blackhole, folder: Path) -> None:
        self.swarm, self.hole = swarm, hole
        rng = np.random.default_rng(7)
        self.a, self.b = folder / "a.npy", folder / "b.npy"
        np.save(self.a, rng.standard_normal((M, K), dtype=np.float32))
        np.save(self.b, rng.standard_normal((K, N), dtype=np.float32))
        self._add("survivor", swarm.url)
        self.add_victim()

    def _add(self, name: str, url: str) -> NativeVolunteer:
        return self.swarm.add_native(name, emulate=f"gflops={GFLOPS_EACH}", url=url)

    def add_victim(self) -> None:
        """A fresh victim behind the proxy; waits until both devices are online, and warms them with one step."""
        self.hole.open()
        self.victim = self._add("victim", self.hole.url)
        wait_for("both devices", lambda: self.online() == {"survivor", "victim"}, 60)
        self.step()

    def online(self) -> set[str]:
        """Names of the devices online."""
        return {device["name"] for device in self.swarm.client.devices() if device["online"]}

    def step(self, fault: str | None = None) -> tuple[Step, float]:
        """Run one GEMM; `fault` strikes once the first tiles are verified. Gives the step and when it struck."""
        client = self.swarm.client
        job = client.submit_gemm(self.a, self.b)
        struck = float("nan")
        lost: list[tuple[float, dict[str, Any]]] = []
        for event, data in client.events(job["id"]):
            now = time.monotonic()
            if event == "lease_lost":
                lost.append((now, data))
            elif event == "gemm":
                tile_s = data["kernel_seconds"] / data["tiles"]
                return Step(now - data["span_s"], now, tile_s, lost), struck
            elif fault and data.get("tiles"):
                struck, fault = self._strike(fault), None
        raise RuntimeError(f"job {job['id']} ended without a product: {client.job(job['id'])['reason']}")

    def _strike(self, fault: str) -> float:
        if fault == "blackhole":
            self.hole.swallow()
        else:
            self.victim.signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        return time.monotonic()

    def row(self, fault: str, undisturbed: Step) -> dict[str, Any]:
        """Strike in the middle of a step and compare with the ideal."""
        step, struck = self.step(fault)
        victims = [when for when, data in step.lost if when >= struck]
        before = struck - step.start
        # Both worked until the fault, then one: (work - rate before) / (rate / 2), with work = rate x undisturbed.
        ideal_s = before + 2 * (undisturbed.seconds - before)
        self.victim.close()
        return {
            "fault": fault,
            "detection_s": round(victims[0] - struck, 3) if victims else None,
            "extra_step_s": round(step.seconds - ideal_s, 3),
            "tile_s": round(undisturbed.tile_s, 3),
            "step_s": round(step.seconds, 3),
        }


def recovery() -> dict[str, Any]:
    """Run all three faults on one server. Returns rows {fault, detection_s, extra_step_s, tile_s, step_s}."""
    with Swarm() as swarm, Blackhole(swarm.port) as hole, tempfile.TemporaryDirectory() as folder:
        bench = Bench(swarm, hole, Path(folder))
        undisturbed, _ = bench.step()
        rows = []
        for fault in FAULTS:
            rows.append(bench.row(fault, undisturbed))
            bench.add_victim()
    return {
        "gemm": {"m": M, "n": N, "k": K},
        "gflops_each": GFLOPS_EACH,
        "undisturbed_step_s": round(undisturbed.seconds, 3),
        "rows": rows,
        "holds": all(_holds(row) for row in rows),
    }


def _holds(row: dict[str, Any]) -> bool:
    """The promise: noticed within 2 tile times + 2 s, and no more than 2 tile times lost beyond that."""
    noticed = row["detection_s"] is not None and row["detection_s"] <= 2 * row["tile_s"] + 2
    return bool(noticed and row["extra_step_s"] <= 2 * row["tile_s"])
