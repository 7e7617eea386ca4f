"""A small GPT over bytes, trained on volunteers' devices; `python gpt_bytes.py [data]` trains it alone in this process.

The idea: a script as anyone would write it: a model, and a Task that says how it is trained (byte_text.py). What is
Tileweave's are attach(), loop.train() and run.finish().
Left out: dropout (200 steps see no byte twice), tied weights, mixed precision.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from backend.recipes import RECIPES, GptBytesConfig
from backend.recipes.byte_text import VOCABULARY, byte_task, read_data
from backend.recipes.progressive import grow_in_stages
from backend.recipes.transformer import Block, init_weights
from tileweave.script import loop
from tileweave.script.run import Run, attach


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, c: GptBytesConfig) -> None:
        super().__init__()
        self.depth = c.layers  # blocks in use (progressive.py)
        self.tokens = nn.Embedding(VOCABULARY, c.width)
        self.positions = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c.width, c.heads, causal=True) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, VOCABULARY, bias=False)
        init_weights(self, c.layers)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T)
        """(B, T) bytes -> (B, T, 256) logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        for block in islice(self.blocks, self.depth):
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # (B, T, 256)
        return logits


def train(run: Run, c: GptBytesConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    data = read_data(run.data)
    torch.manual_seed(c.seed)
    model = Gpt(c)
    task = byte_task(model, data, c, run.steps)
    grow_in_stages(task, model, c, run.steps)
    return loop.train(run, task)


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["gpt-bytes"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, GptBytesConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
