"""A multilayer perceptron that names images; `python mlp.py [data.safetensors]` trains it alone in this process.

Left out: normalization layers, which so few layers do without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import RECIPES, MlpConfig
from backend.recipes.images import image_task, read_images
from tileweave.script import loop
from tileweave.script.run import Run, attach


class Mlp(nn.Module):
    """Pixels in, logits of the class out."""

    def __init__(self, c: MlpConfig, pixels: int, classes: int) -> None:
        super().__init__()
        sizes = [pixels, *[c.width] * c.layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(c.width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W)
        """(B, C, H, W) -> (B, classes)."""
        x = images.flatten(1)
        for layer in self.layers:
            x = F.gelu(layer(x))  # (B, width)
        logits: Tensor = self.head(x)
        return logits


def train(run: Run, c: MlpConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    images = read_images(run.data, c.seed)
    torch.manual_seed(c.seed)
    model = Mlp(c, images.pixels[0].numel(), images.classes)
    return loop.train(run, image_task(model, images, c, run.steps))


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["mlp"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, MlpConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
