"""How the recipes step: AdamW, and a learning rate that rises and then falls.

Left out: other optimizers, and other decay for some of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn, optim

from backend.recipes.configs import TrainConfig


def adamw(model: nn.Module, c: TrainConfig) -> optim.AdamW:
    """AdamW over what of the model is to be trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    print(f"model: {sum(p.numel() for p in trained):,} parameters", flush=True)
    return optim.AdamW(trained, lr=c.lr, betas=(0.9, 0.95), weight_decay=c.weight_decay)


def rate(c: TrainConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of step 1, 2, ... of `steps`: linear warm-up, then a cosine down to a tenth."""

    def at(step: int) -> float:
        if step <= c.warmup:
            return c.lr * step / c.warmup
        done = (step - c.warmup) / max(1, steps - c.warmup)
        return c.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    return at
