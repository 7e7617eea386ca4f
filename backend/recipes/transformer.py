"""The block that gpt-bytes and vit are made of: pre-norm attention and MLP, as in GPT-2.

Left out: dropout (no recipe sees its data often enough), biases in the linear layers.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP; `causal`: a place sees only what is before it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x))  # (B, T, 3C)
        q, k, v = qkv.view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)  # each (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, T, C/H)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))  # (B, T, C)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))  # (B, T, C)
        return out


def init_weights(model: nn.Module, layers: int) -> None:
    """Draws every matrix as GPT-2 does: what is added to the residual stream of `layers` blocks keeps its size."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            residual = name.endswith(("proj.weight", "down.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
