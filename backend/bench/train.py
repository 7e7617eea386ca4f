"""`tileweave bench train`: do the recipes train on volunteers as in plain torch, and how fast is a step?

Each recipe runs 50 steps in a plain Python process and as a job, once by each executor and once in each wire, every
sizeable GEMM on one Chromium; `max_relative_loss_difference` is over all steps. Beside it stands `control`, plain torch
with another number of threads: what a training makes of rounding differs from recipe to recipe. Then one recipe on a
volunteer behind a slow round trip, by both executors, and on volunteers so slow that computing is all that counts; a
training whose script or coordinator is killed again and again; and the bytes of a step (train_bytes.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backend.bench.parity import largest_difference, offloaded_share, relative_difference
from backend.bench.train_bytes import REDUCTION_MIN, bytes_of_steps
from backend.swarm import Swarm, wait_for

STEPS = 50
EXECUTORS = ("eager", "graph")
RUNS = [("f32", "eager"), ("f32", "graph"), ("bf16", "graph"), ("f16", "graph"), ("int8", "graph")]  # wire, executor
LIMIT = 1e-5
LIMITS = {"f32": LIMIT, "bf16": 1e-3, "f16": 1e-3, "int8": 1e-2}
SHARE_MIN = {"cnn": 0.9}
SHARE_MIN_DEFAULT = 0.95
JOB_S_MAX = 900.0

# Small, so that fifty steps take seconds, and with learning rates at which rounding is not blown up.
_TEXT: dict[str, Any] = {
    "layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 8, "lr": 1e-3, "sample_tokens": 0
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-bytes": _TEXT,
    "llama": _TEXT,
    "lora": {"batch": 8, "context": 128, "lr": 1e-3, "sample_tokens": 0},
    "mlp": {"width": 512, "batch": 128},
    "cnn": {"width": 16, "batch": 16, "lr": 1e-3},
    "vit": {"layers": 2, "batch": 32},
}
BASE = "base.safetensors"  # what lora fine-tunes: a checkpoint of gpt-bytes, made first

MICRO_BATCHES = 4
RTT_MS = 50
RTT_STEPS, RTT_ROUNDS = 4, 3
RTT_CONFIG = {**_TEXT, "context": 64, "batch": 16, "micro_batches": MICRO_BATCHES}
BUSY_GFLOPS, BUSY_DEVICES, BUSY_STEPS = 1.0, 2, 6
BUSY_CONFIG = {**_TEXT, "width": 256, "batch": 16, "micro_batches": MICRO_BATCHES, "executor": "graph"}

KILLS, KILL_SEED = 20, 1
KILLED = ("backend.jobs.coordinator", "gpt_bytes.py")
KILL_CONFIG = {**_TEXT, "width": 64, "context": 64, "executor": "graph"}
KILL_STEPS_APART = 4

_PLAIN = """
import importlib, json, sys, torch
from backend.recipes import RECIPES
from tileweave.script.run import Run, local_welcome
name, config, steps, data, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
recipe = RECIPES[name]
module = importlib.import_module("backend.recipes." + recipe.script.stem)
print(json.dumps(list(module.train(Run(local_welcome(steps, data)), recipe.config(**config)))))
"""


def train(steps: int = STEPS, recipes: tuple[str, ...] = tuple(CONFIGS)) -> dict[str, Any]:
    """Returns `rows`, `latency_speedup`, `busy_share` and what the limits say."""
    with Swarm() as swarm:
        swarm.add_browser("train")
        swarm.wait_devices(1)
        rows = [row for name in recipes for row in _recipe(swarm, name, steps)]
    latency = _latency()
    busy = _busy()
    kills = _kills()
    sizes = bytes_of_steps(_job)
    return {
        "steps": steps,
        "rows": rows,
        "latency_speedup": latency["speedup"],
        "latency": latency,
        "busy_share": busy["share"],
        "busy": busy,
        "kills": kills,
        "bytes_reduction": sizes["reduction"],
        "bytes": sizes,
        "holds": all(row["holds"] for row in rows)
        and latency["speedup"] >= 3
        and busy["share"] >= 0.8
        and kills["max_relative_loss_difference"] <= LIMIT
        and sizes["reduction"] >= REDUCTION_MIN,
    }


def _recipe(swarm: Swarm, name: str, steps: int) -> list[dict[str, Any]]:
    """One row for each wire and executor."""
    data, path = None, None
    if name == "lora":
        data, path = BASE, swarm.settings.datasets_dir / BASE
        if not path.exists():
            _make_base(swarm, path)
    config = CONFIGS[name]
    plain = _plain(name, config, steps, path)
    spread = relative_difference(plain, _plain(name, config, steps, path, threads=2))
    rows = []
    for wire, executor in RUNS:
        metrics = _job(swarm, name, {**config, "executor": executor}, steps, data, wire)
        difference, share = largest_difference(plain, metrics), offloaded_share(metrics)
        rows.append(
            {
                "recipe": name,
                "wire": wire,
                "executor": executor,
                "max_relative_loss_difference": difference,
                "control": spread,
                "offloaded_flop_share": share,
                "bytes_per_step": statistics.median(row["bytes_down"] + row["bytes_up"] for row in metrics),
                "step_seconds": statistics.median(row["seconds"] for row in metrics),
                "loss_first": plain[0],
                "loss_last": plain[-1],
                "holds": difference <= max(LIMITS[wire], spread) and share >= SHARE_MIN.get(name, SHARE_MIN_DEFAULT),
            }
        )
    return rows


def _plain(name: str, config: dict[str, Any], steps: int, data: Path | None, threads: int = 1) -> list[float]:
    """The loss of each step in a process of its own, with nothing of the server's."""
    argument = json.dumps([name, config, steps, None if data is None else str(data), threads])
    command = [sys.executable, "-c", _PLAIN, argument]
    with tempfile.TemporaryDirectory() as folder:  # a recipe run by hand leaves its result where it is run
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{name} in plain torch failed: {done.stderr[-2000:]}")
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def _job(
    swarm: Swarm, name: str, config: dict[str, Any], steps: int, data: str | None = None, wire: str = "f32"
) -> list[dict[str, Any]]:
    """The metrics of a job that succeeded. Raises RuntimeError where it did not."""
    job = swarm.client.submit_train(name, config, steps=steps, data=data, wire=wire)
    job = wait_for(
        "the job to end",
        lambda: found if (found := swarm.client.job(job["id"]))["state"] not in ("queued", "running") else None,
        JOB_S_MAX,
    )
    if job["state"] != "succeeded":
        raise RuntimeError(f"job {job['id']} ({name}) {job['state']}: {job['reason']}")
    return swarm.client.metrics(job["id"])


def _make_base(swarm: Swarm, path: Path) -> None:
    _job(swarm, "gpt-bytes", CONFIGS["gpt-bytes"], 20)
    path.parent.mkdir(parents=True, exist_ok=True)
    swarm.client.download_checkpoint(swarm.client.jobs()[0]["id"], path)


def _latency() -> dict[str, Any]:
    """Seconds of a step by each executor behind a round trip of RTT_MS, in alternating jobs."""
    seconds: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    losses: dict[str, list[float]] = {}
    with Swarm() as swarm:
        swarm.add_native("far", emulate=f"rtt_ms={RTT_MS}")
        swarm.wait_devices(1)
        for _ in range(RTT_ROUNDS):
            for executor in EXECUTORS:
                metrics = _job(swarm, "gpt-bytes", {**RTT_CONFIG, "executor": executor}, RTT_STEPS)
                seconds[executor] += [row["seconds"] for row in metrics[1:]]  # the first one captures
                losses[executor] = [row["loss"] for row in metrics]
    eager, graph = (statistics.median(seconds[executor]) for executor in EXECUTORS)
    return {
        "rtt_ms": RTT_MS,
        "micro_batches": MICRO_BATCHES,
        "eager_step_seconds": eager,
        "graph_step_seconds": graph,
        "speedup": eager / graph,
        "max_relative_loss_difference": relative_difference(losses["eager"], losses["graph"]),
    }


def _kills() -> dict[str, Any]:
    """A job whose script or coordinator is killed KILLS times at moments drawn by a seed, against plain torch."""
    draw = random.Random(KILL_SEED)
    steps = (KILLS + 1) * KILL_STEPS_APART
    with Swarm(environment={"TILEWEAVE_CHECKPOINT_EVERY_S": "0.2"}) as swarm:
        swarm.add_native("steady")
        swarm.wait_devices(1)
        job = swarm.client.submit_train("gpt-bytes", KILL_CONFIG, steps=steps)["id"]
        for kill in range(1, KILLS + 1):
            wait_for(f"step {kill * KILL_STEPS_APART}", lambda: _step(swarm, job) >= kill * KILL_STEPS_APART, JOB_S_MAX)  # noqa: B023
            time.sleep(draw.uniform(0, 0.3))
            for victim in swarm.pids(draw.choice(KILLED))[:1]:
                os.kill(victim, signal.SIGKILL)
        ended = wait_for(
            "the job to end", lambda: s if (s := swarm.client.job(job))["state"] != "running" else None, JOB_S_MAX
        )
        if ended["state"] != "succeeded":
            raise RuntimeError(f"the job {ended['state']}: {ended['reason']}")
        difference = largest_difference(_plain("gpt-bytes", KILL_CONFIG, steps, None), swarm.client.metrics(job))
    return {"kills": KILLS, "epochs": ended["epoch"], "steps": steps, "max_relative_loss_difference": difference}


def _step(swarm: Swarm, job: str) -> int:
    return swarm.client.job(job)["step"] or 0


def _busy() -> dict[str, Any]:
    """The share of their time that slow volunteers compute, by their emulated speed."""
    with Swarm() as swarm:
        for number in range(BUSY_DEVICES):
            swarm.add_native(f"slow {number}", emulate=f"gflops={BUSY_GFLOPS}")
        swarm.wait_devices(BUSY_DEVICES)
        metrics = _job(swarm, "gpt-bytes", BUSY_CONFIG, BUSY_STEPS)[2:]  # the first ones measure the devices
    ideal = [row["flop_offloaded"] / (BUSY_GFLOPS * 1e9 * BUSY_DEVICES) for row in metrics]
    seconds = [row["seconds"] for row in metrics]
    return {"gflops": BUSY_GFLOPS, "devices": BUSY_DEVICES, "share": sum(ideal) / sum(seconds)}
