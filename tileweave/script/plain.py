"""Runs somebody's training script unmodified under a job: `python -P -m tileweave.script.plain train.py …`.

The idea: the script runs in this process as `python train.py` would run it, inside the job's offload mode. What a job
wants to know is learnt from torch itself: a step is a step of the optimizer with the most parameters, its loss the last
number that was differentiated. A cancelled job ends the script at its next GEMM or step by SystemExit.
Left out: checkpoints and resuming (the script's own business), GEMMs of threads that the script starts, and sharing the
script's compiled graphs: torch.compile is off, since it runs eagerly under a mode anyway.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch is imported

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tileweave.script.channel import JobCancelled
from tileweave.script.run import Run, attach


class Watch:
    """Sees the script's losses and optimizer steps, and reports them to its run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loss: torch.Tensor | None = None
        self._largest = 0
        self._steps = 0

    def install(self) -> None:
        """From now on, for the rest of the process."""
        backward = torch.autograd.backward

        def seen(tensors: Any, *args: Any, **kwargs: Any) -> None:
            first = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
            if isinstance(first, torch.Tensor) and first.numel() == 1 and first.is_floating_point():
                self._loss = first.detach().clone()
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = seen
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        if size < self._largest:
            return
        self._largest = size
        self._steps += 1
        loss = None if self._loss is None else float(self._loss)
        finite = loss is not None and torch.isfinite(torch.tensor(loss))
        self._run.step(self._steps, loss if finite else None, samples=0, unit="samples")


def main(arguments: list[str]) -> None:
    """Runs the script that `arguments` name, with the rest as its own. Raises what it raises."""
    run = attach()
    Watch(run).install()
    with run.offload():
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    run.finish()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as error:
        if error.code in (None, 0):
            attach().finish()
        elif not isinstance(error, JobCancelled):
            attach().fail(error)
        raise
