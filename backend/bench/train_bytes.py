"""The bytes of a training step, and what each measure saves: part of `tileweave bench train`.

gpt-mini in micro-batches on four devices, in three ways: with nothing kept (forgetful.py), with panels kept on the
devices, and with both that and half as many bytes a number. The devices are slow by emulation, so that their speeds are
what they are said to be and the plans hold still.
"""

from __future__ import annotations

import statistics
from typing import Any

from backend.bench.forgetful import ENTRY
from backend.swarm import Swarm

DEVICES, GFLOPS = 4, 8.0
STEPS, SKIPPED = 3, 1  # the first step measures the devices
# 10.8 million parameters.
GPT_MINI: dict[str, Any] = {
    "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 32, "micro_batches": 8, "lr": 1e-3,
    "executor": "graph", "sample_tokens": 0,
}  # fmt: skip
SERVE = ("-m", "backend.cli", "serve")
MEASURES = {"nothing": ("f32", ENTRY), "kept panels": ("f32", SERVE), "kept panels, bf16": ("bf16", SERVE)}
REDUCTION_MIN = 4.0


def bytes_of_steps(job: Any) -> dict[str, Any]:
    """A row for each measure, and the last one's reduction. `job(swarm, recipe, config, steps, wire=…)` runs a job and
    gives its metrics."""
    rows: list[dict[str, Any]] = []
    for measure, (wire, entry) in MEASURES.items():
        with Swarm(entry=entry) as swarm:
            for number in range(DEVICES):
                swarm.add_native(f"device {number}", emulate=f"gflops={GFLOPS}")
            swarm.wait_devices(DEVICES)
            metrics = job(swarm, "gpt-bytes", GPT_MINI, STEPS, wire=wire)[SKIPPED:]
        down, up, seconds = (
            statistics.median(row[name] for row in metrics) for name in ("bytes_down", "bytes_up", "seconds")
        )
        first = rows[0]["bytes_per_step"] if rows else down + up
        rows.append({
            "measure": measure, "wire": wire, "bytes_down": down, "bytes_up": up, "bytes_per_step": down + up,
            "reduction": first / (down + up), "step_seconds": seconds,
        })  # fmt: skip
    return {"devices": DEVICES, "rows": rows, "reduction": rows[-1]["reduction"]}
