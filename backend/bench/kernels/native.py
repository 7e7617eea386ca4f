"""The native side of the kernel bench: torch and NumPy on one thread, `python -m backend.bench.kernels.native N ...`.

A process of its own, because the number of threads is fixed when the libraries start. Prints one JSON object with
`rows` like those of the browser's kernels and `fma_128`, the CPU's 128-bit peak, measured by a program of ours
(kernels_wasm/peak.c). Torch and NumPy may use wider vectors than 128 bits, so their peak_fraction may exceed 1. They
take turns; each figure is the median turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PEAK = ROOT / "build" / "bench" / "peak"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
ROUNDS = 9
TURN_S = 0.03
NATIVE_S_MAX = 120.0


def native(sizes: list[int]) -> dict[str, Any]:
    """Measure in a process with one thread. Raises RuntimeError with its last words where it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "backend.bench.kernels.native", *map(str, sizes)],
        cwd=ROOT, env={**os.environ, **dict.fromkeys(THREADS, "1")},
        capture_output=True, text=True, check=False, timeout=NATIVE_S_MAX,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the native measurement failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _turn(multiply: Callable[[], object]) -> float:
    """Seconds a call, over one turn."""
    start, calls = time.perf_counter(), 0
    while True:
        multiply()
        calls += 1
        if (elapsed := time.perf_counter() - start) > TURN_S:
            return elapsed / calls


def _measure(sizes: list[int]) -> dict[str, Any]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    peak = float(subprocess.run([PEAK], capture_output=True, text=True, check=True).stdout)
    rows = []
    rng = np.random.default_rng(3)
    for n in sizes:
        a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
        x, y = torch.from_numpy(a), torch.from_numpy(b)
        kernels: dict[str, Callable[[], object]] = {
            "torch": partial(torch.matmul, x, y),
            "numpy": partial(np.matmul, a, b),
        }
        turns: dict[str, list[float]] = {name: [] for name in kernels}
        for _ in range(ROUNDS + 1):
            for name, multiply in kernels.items():
                turns[name].append(_turn(multiply))
        for name, seconds in turns.items():
            gflops = 2 * n**3 / statistics.median(seconds[1:]) / 1e9
            row = {"engine": "native", "kernel": name, "n": n, "gflops": gflops, "ratios": {}}
            rows.append(row | {"peak_fraction": gflops / peak})
    return {"rows": rows, "fma_128": peak}


if __name__ == "__main__":
    print(json.dumps(_measure([int(text) for text in sys.argv[1:]])))
