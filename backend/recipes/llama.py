"""A llama-style model over bytes; `python llama.py [data]` trains it alone in this process.

The idea: what differs from gpt-bytes is the block: RMSNorm (arXiv 1910.07467), the place told by turning queries and
keys (RoPE, arXiv 2104.09864), a gated MLP (SwiGLU, arXiv 2002.05202), and fewer heads of keys and values than of
queries (arXiv 2305.13245). Left out: a cache of keys and values, and longer contexts than trained on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import RECIPES, LlamaConfig
from backend.recipes.byte_text import VOCABULARY, byte_task, read_data
from backend.recipes.progressive import grow_in_stages
from backend.recipes.transformer import init_weights
from tileweave.script import loop
from tileweave.script.run import Run, attach

ROPE_BASE = 10_000.0
HIDDEN_MULTIPLE = 32


def angles(context: int, dim: int) -> Tensor:
    """(context, dim / 2): by how much each pair of a head's numbers is turned at each place."""
    frequencies = ROPE_BASE ** (-torch.arange(0, dim, 2) / dim)
    return torch.arange(context)[:, None] * frequencies


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of x (B, H, T, D) by the angles whose cos and sin, (T, D/2), are given."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """Pre-norm attention with grouped heads, and a gated MLP."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.dim, self.group = c.width // c.heads, c.heads // c.kv_heads
        hidden = -(-8 * c.width // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE  # as many weights as 4 C without a gate
        self.norm1, self.norm2 = nn.RMSNorm(c.width, eps=1e-5), nn.RMSNorm(c.width, eps=1e-5)
        self.q = nn.Linear(c.width, c.width, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * self.dim, bias=False)
        self.proj = nn.Linear(c.width, c.width, bias=False)
        self.gate = nn.Linear(c.width, hidden, bias=False)
        self.up = nn.Linear(c.width, hidden, bias=False)
        self.down = nn.Linear(hidden, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, C); (T, D/2) twice
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (part.view(b, t, -1, self.dim).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        k, v = (part.repeat_interleave(self.group, dim=1) for part in (turn(k, cos, sin), v))  # (B, H, T, D)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), k, v, is_causal=True)  # (B, H, T, D)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))  # (B, T, C)
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))  # (B, T, C)
        return out


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.depth = c.layers  # blocks in use (progressive.py)
        self.tokens = nn.Embedding(VOCABULARY, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width, eps=1e-5)
        self.head = nn.Linear(c.width, VOCABULARY, bias=False)
        turned = angles(c.context, c.width // c.heads)
        self.register_buffer("cos", turned.cos(), persistent=False)
        self.register_buffer("sin", turned.sin(), persistent=False)
        init_weights(self, c.layers)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T)
        """(B, T) bytes -> (B, T, 256) logits."""
        x = self.tokens(tokens)  # (B, T, C)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in islice(self.blocks, self.depth):
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))  # (B, T, 256)
        return logits


def train(run: Run, c: LlamaConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    data = read_data(run.data)
    torch.manual_seed(c.seed)
    model = Llama(c)
    task = byte_task(model, data, c, run.steps)
    grow_in_stages(task, model, c, run.steps)
    return loop.train(run, task)


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["llama"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, LlamaConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
