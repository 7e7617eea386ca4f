"""A vision transformer that names images; `python vit.py [data.safetensors]` trains it alone in this process.

The idea: an image is a row of square patches; the blocks are gpt-bytes' own, each patch seeing all others, and the
class is read off their mean. Left out: a class token, and sides that are not whole patches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from backend.recipes import RECIPES, VitConfig
from backend.recipes.images import image_task, read_images
from backend.recipes.transformer import Block, init_weights
from tileweave.script import loop
from tileweave.script.run import Run, attach


class Vit(nn.Module):
    """Images in, logits of the class out. Raises ValueError where the patches do not fill the image."""

    def __init__(self, c: VitConfig, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if height % c.patch or width % c.patch:
            raise ValueError(f"images of {height} x {width} cannot be cut into patches of {c.patch} x {c.patch}")
        self.patch = c.patch
        self.embed = nn.Linear(channels * c.patch**2, c.width)
        self.positions = nn.Parameter(torch.empty(height // c.patch * (width // c.patch), c.width))
        self.blocks = nn.ModuleList(Block(c.width, c.heads, causal=False) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, classes)
        init_weights(self, c.layers)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W)
        """(B, C, H, W) -> (B, classes)."""
        b, c, h, w = images.shape
        p = self.patch
        patches = images.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)  # (B, H/p, W/p, C, p, p)
        x = self.embed(patches.reshape(b, -1, c * p * p)) + self.positions  # (B, T, width)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def train(run: Run, c: VitConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    images = read_images(run.data, c.seed)
    torch.manual_seed(c.seed)
    return loop.train(run, image_task(Vit(c, images.shape, images.classes), images, c, run.steps))


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["vit"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, VitConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
