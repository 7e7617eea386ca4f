"""`tileweave bench e2e`: one Chromium, one compute Worker, one GEMM of 2048^3 in float32 over loopback.

How much of the kernel's speed survives the way there and back: panels down, results up, the queue, the check, the
ledger. The peer is tfjs-backend-wasm's own matmul, on data already in its memory, in the same browser just before. The
server's CPU time is that of its processes while the GEMM ran, the script's excluded (it is the user's).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from backend.bench.cpu import cpu_seconds
from backend.bench.peer import PeerServer
from backend.swarm import Swarm

N = 2048
RUNS = 5
PEER_RUNS = 3
PEER_S_MAX = 120.0
# The uploaded factors are the same for every run; the product is compared with NumPy's once, so that speed is not all.
TOLERANCE = 2e-6


def e2e(n: int = N, runs: int = RUNS) -> dict[str, Any]:
    """Median of `runs` GEMMs. Returns kernel_gflops, end_to_end_gflops, efficiency, ratio_tfjs_wasm,
    server_cpu_us_per_tile and each run's figures."""
    flop = 2 * n**3
    with Swarm() as swarm, PeerServer() as peer, tempfile.TemporaryDirectory() as folder:
        volunteer = f"{swarm.url}/?autostart=1&throwaway=1&threads=1&name=bench"
        swarm.add_page(peer.url(n, PEER_RUNS, volunteer))
        tfjs_gflops = flop / statistics.median(peer.figure(PEER_S_MAX)["seconds"]) / 1e9
        swarm.wait_devices(1)
        rng = np.random.default_rng(3)
        a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        paths = [Path(folder) / name for name in ("a.npy", "b.npy")]
        np.save(paths[0], a)
        np.save(paths[1], b)
        rows = [_run(swarm, paths, flop) for _ in range(runs)]
        error = _error(swarm, rows[-1]["job"], a, b, Path(folder))
    end_to_end = statistics.median(row["end_to_end_gflops"] for row in rows)
    return {
        "n": n,
        "kernel_gflops": statistics.median(row["kernel_gflops"] for row in rows),
        "end_to_end_gflops": end_to_end,
        "efficiency": statistics.median(row["end_to_end_gflops"] / row["kernel_gflops"] for row in rows),
        "tfjs_wasm_gflops": tfjs_gflops,
        "ratio_tfjs_wasm": end_to_end / tfjs_gflops,
        "server_cpu_us_per_tile": statistics.median(row["server_cpu_us_per_tile"] for row in rows),
        "max_error_over_largest_element": error,
        "correct": error <= TOLERANCE,
        "runs": rows,
    }


def _run(swarm: Swarm, paths: list[Path], flop: int) -> dict[str, Any]:
    client = swarm.client
    job = client.submit_gemm(paths[0], paths[1])
    roles = ("backend.gateway", "valkey", "backend.cli serve")
    before = sum(cpu_seconds(pid) for role in roles for pid in swarm.pids(role))
    gemm: dict[str, Any] | None = None
    for event, data in client.events(job["id"]):
        if event == "gemm":
            gemm = data
    if gemm is None:
        raise RuntimeError(f"job {job['id']} ended without a product: {client.job(job['id'])['reason']}")
    after = sum(cpu_seconds(pid) for role in roles for pid in swarm.pids(role))
    return {
        "job": job["id"],
        "tiles": gemm["tiles"],
        "kernel_gflops": flop / gemm["kernel_seconds"] / 1e9,
        "end_to_end_gflops": flop / gemm["span_s"] / 1e9,
        "server_cpu_us_per_tile": (after - before + gemm["cpu_s"]) / gemm["tiles"] * 1e6,
    }


def _error(swarm: Swarm, job: str, a: Any, b: Any, folder: Path) -> float:
    path = folder / "c.npy"
    swarm.client.download_result(job, path)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(np.load(path) - expected).max() / np.abs(expected).max())
