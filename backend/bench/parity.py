"""`tileweave bench parity`: does training on a browser give the losses of plain torch?

The same recipe, seed and data, 50 steps: once in a plain Python process, once as a job whose every sizeable GEMM is
computed by one Chromium. `max_relative_loss_difference` is over all steps. The same job is then run with its products
spoiled after the check (see spoiled.py), to show what the figure would say of a wrong sum or a narrow format.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from backend.bench.spoiled import ENTRY, KINDS, SPOIL_VARIABLE
from backend.recipes import GptBytesConfig
from backend.swarm import Swarm, wait_for

STEPS = 50
# At the recipe's own learning rate of 3e-3 training is chaotic: plain runs with one and two threads differ by 1.5e-4
# after 50 steps. At 1e-3 they agree to rounding, so that a difference says something; `control` is that of such a pair.
CONFIG = GptBytesConfig(layers=4, width=128, heads=4, context=128, batch=8, lr=1e-3, sample_tokens=0)
LIMIT, SHARE_MIN = 5e-6, 0.95
JOB_S_MAX = 600.0

# Runs the recipe as `python gpt_bytes.py` would, and prints its losses in full.
_PLAIN = """
import json, sys, torch
from backend.recipes import GptBytesConfig
from backend.recipes.gpt_bytes import train
from tileweave.script.run import Run, local_welcome
steps, config, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
losses = list(train(Run(local_welcome(steps, None)), GptBytesConfig(**config)))
print(json.dumps(losses))
"""


def parity(steps: int = STEPS, corrupt: Sequence[str] = KINDS, config: GptBytesConfig = CONFIG) -> dict[str, Any]:
    """Returns max_relative_loss_difference, offloaded_flop_share, `corrupt` by kind, and what the limits say."""
    plain = plain_losses(steps, config)
    control = relative_difference(plain, plain_losses(steps, config, threads=2))
    with Swarm() as swarm:
        swarm.add_browser("parity")
        rows = train_on(swarm, steps, config)
    difference = largest_difference(plain, rows)
    share = offloaded_share(rows)
    corrupted = {}
    for kind in corrupt:
        with Swarm(environment={SPOIL_VARIABLE: kind}, entry=ENTRY) as swarm:
            swarm.add_browser("parity")
            corrupted[kind] = largest_difference(plain, train_on(swarm, steps, config))
    return {
        "steps": steps,
        "config": config.model_dump(),
        "loss_first": plain[0],
        "loss_last": plain[-1],
        "max_relative_loss_difference": difference,
        "control": control,
        "offloaded_flop_share": share,
        "corrupt": corrupted,
        "holds": difference <= LIMIT and share >= SHARE_MIN and all(value > 1e-5 for value in corrupted.values()),
    }


def plain_losses(steps: int, config: GptBytesConfig, threads: int = 1) -> list[float]:
    """The loss of each step in a process of its own, with nothing of the server's."""
    argument = json.dumps([steps, config.model_dump(), threads])
    done = subprocess.run([sys.executable, "-c", _PLAIN, argument], capture_output=True, text=True, check=True)
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def train_on(swarm: Swarm, steps: int, config: GptBytesConfig) -> list[dict[str, Any]]:
    """Submit the job, wait for its end; gives its metrics. Raises RuntimeError unless it succeeded."""
    job = swarm.client.submit_train("gpt-bytes", config.model_dump(), steps=steps)
    job = wait_for(
        "the job to end",
        lambda: found if (found := swarm.client.job(job["id"]))["state"] not in ("queued", "running") else None,
        JOB_S_MAX,
    )
    if job["state"] != "succeeded":
        raise RuntimeError(f"job {job['id']} {job['state']}: {job['reason']}")
    return swarm.client.metrics(job["id"])


def largest_difference(plain: list[float], rows: list[dict[str, Any]]) -> float:
    """Largest |loss - plain| / |plain| of any step. Raises ValueError where steps are missing."""
    if [row["step"] for row in rows] != list(range(1, len(plain) + 1)):
        raise ValueError(f"got steps {[row['step'] for row in rows]}, expected 1 to {len(plain)}")
    return relative_difference(plain, [row["loss"] for row in rows])


def relative_difference(plain: Sequence[float], losses: Sequence[float]) -> float:
    """Largest |loss - plain| / |plain|."""
    return max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, plain, strict=True))


def offloaded_share(rows: list[dict[str, Any]]) -> float:
    """The part of all GEMM FLOP that volunteers computed."""
    offloaded = sum(row["flop_offloaded"] for row in rows)
    return float(offloaded / (offloaded + sum(row["flop_local"] for row in rows)))
