"""Who computes a step's loss and gradients: the one interface between the training loop and the ways to run a graph.

Two ways give the same numbers: `Eager`, ordinary PyTorch under the run's offload mode, one GEMM at a time, for anything
that PyTorch runs; and `GraphExecutor` (graph.py), which captures the loss function once and keeps every ready GEMM of
every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tileweave.script.task import Batch, Task


class Executor(Protocol):
    """Computes gradients."""

    def gradients(self, batches: Sequence[Batch]) -> float:
        """The mean of the micro-batches' losses; its gradients are added to the parameters' `.grad`."""


class Eager:
    """Micro-batch after micro-batch, operator after operator, inside `offload()`."""

    def __init__(self, task: Task, offload: Callable[[], AbstractContextManager[object]]) -> None:
        self._task = task
        self._offload = offload

    def gradients(self, batches: Sequence[Batch]) -> float:
        """See Executor."""
        total = 0.0
        for batch in batches:
            with self._offload():
                loss = self._task.loss(self._task.model, *batch)
                (loss / len(batches) if len(batches) > 1 else loss).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total / len(batches)
