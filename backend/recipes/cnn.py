"""A small residual network that names images; `python cnn.py [data.safetensors]` trains it alone in this process.

The idea: stages of residual blocks, each stage with half the side and twice the channels of the one before.
GroupNorm, not batch norm: the loss of a batch stays the mean of its micro-batches'. Left out: everything larger.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import RECIPES, CnnConfig
from backend.recipes.images import image_task, read_images
from tileweave.script import loop
from tileweave.script.run import Run, attach

GROUPS = 4


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, before), nn.GroupNorm(GROUPS, after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, before, H, W)
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
        y = self.conv1(F.relu(self.norm1(x)))
        out: Tensor = self.shortcut(x) + self.conv2(F.relu(self.norm2(y)))
        return out


class Cnn(nn.Module):
    """Images in, logits of the class out."""

    def __init__(self, c: CnnConfig, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, c.width, 3, padding=1, bias=False)
        blocks: list[Residual] = []
        width = c.width
        for stage in range(c.layers):
            wider = c.width << stage
            for block in range(c.blocks):
                blocks.append(Residual(width, wider, stride=2 if stage and not block else 1))
                width = wider
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W)
        """(B, C, H, W) -> (B, classes)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.relu(self.norm(x)).mean((2, 3)))
        return logits


def train(run: Run, c: CnnConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    images = read_images(run.data, c.seed)
    torch.manual_seed(c.seed)
    return loop.train(run, image_task(Cnn(c, images.shape[0], images.classes), images, c, run.steps))


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["cnn"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, CnnConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
