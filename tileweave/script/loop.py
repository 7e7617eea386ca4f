"""The training loop of a declared task: gradients by an executor, clipping, the optimizer, validation, samples.

    each step: learning rate -> batch i -> micro-batches -> executor: loss, gradients -> clip -> optimizer -> report

The executor is the only part that knows of devices (executor.py). Validation and samples run on the server, under the
run's own random state, so that how often they are made does not change the training.
Left out: validation on volunteers, schedules of anything but the learning rate, and patience across a resume, which
counts anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from tileweave.script.checkpoint import TrainState
from tileweave.script.run import Run
from tileweave.script.task import Task, micro_batches

T = TypeVar("T")


def train(run: Run, task: Task) -> Iterator[float]:
    """Trains `task` to the run's last step, or until its validation no longer improves; gives the loss of each step.

    Raises what the executor and the run's reports raise."""
    state = TrainState(task.model, task.optimizer)
    executor = run.executor(task)
    parameters = [p for group in task.optimizer.param_groups for p in group["params"]]
    best, worse = math.inf, 0
    for step in run.steps_left(state):
        if task.grow is not None:
            task.grow(step)
        if task.rate is not None:
            for group in task.optimizer.param_groups:
                group["lr"] = task.rate(step)
        task.optimizer.zero_grad()
        loss = executor.gradients(micro_batches(task.batch(state.position), task.micro_batches))
        if task.clip is not None:
            nn.utils.clip_grad_norm_(parameters, task.clip)
        task.optimizer.step()
        state.position += 1
        run.step(step, loss, task.samples, task.unit)
        last = step == run.steps
        if task.generate is not None and (last or step % task.generate_every == 0):
            run.sample(step, _aside(task.model, task.generate))
        if task.validate is not None and (last or step % task.validate_every == 0):
            value = _aside(task.model, task.validate)
            run.validated(step, value)
            best, worse = (value, 0) if value < best else (best, worse + 1)
        yield loss
        if task.patience is not None and worse >= task.patience:
            print(f"early stop after step {step}: {worse} validations were no better than {best:.4f}", flush=True)
            return


def _aside(model: nn.Module, make: Callable[[], T]) -> T:
    """What `make` gives with the model in evaluation mode and no gradients; the random state stays as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return make()
    finally:
        model.train(training)
