"""What a script trains, declared so that the loop and the executors can run it: a model, a loss function, its batches.

The idea: the loss of one micro-batch is a function of the model and of tensors whose first dimension is rows, and the
loss of a batch is the mean of its micro-batches'. So the same declaration is run as ordinary PyTorch, operator by
operator with its GEMMs offloaded, or captured as a graph (graph.py).
Left out: batches whose rows have unequal weights, and several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]


@dataclass(slots=True)
class Task:
    """One training task.

    `loss(model, *batch)` is the mean loss of the batch's rows, and `batch(i)` gives batch number i, from i alone: with
    it a resumed run sees the same data. `rate(step)` is the learning rate of step 1, 2, ...; None leaves the
    optimizer's own. A batch is cut into `micro_batches` equal parts. `samples` counts a batch in `unit`s. `validate`
    gives the loss, or what else is to become small, on data held out; `generate` text that the model writes."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[..., Tensor]
    batch: Callable[[int], Batch]
    samples: int
    unit: str
    rate: Callable[[int], float] | None = None
    micro_batches: int = 1
    clip: float | None = 1.0
    validate: Callable[[], float] | None = None
    validate_every: int = 50
    patience: int | None = None
    """Training ends when so many validations in a row were no better than the best one; None: it does not."""
    generate: Callable[[], str] | None = None
    generate_every: int = 50
    grow: Callable[[int], None] | None = None
    """Called before each step with its number; may change which part of the model is computed (see `variant`)."""
    variant: Callable[[], object] = lambda: None
    """What the loss depends on besides shapes (how many layers train now, say); captured anew when that changes."""


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """`batch` cut into `count` equal runs of rows. Raises ValueError where that cannot be."""
    rows = len(batch[0])
    if rows % count or any(len(tensor) != rows for tensor in batch):
        raise ValueError(f"a batch of {[len(tensor) for tensor in batch]} rows cannot be cut into {count} equal parts")
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))
