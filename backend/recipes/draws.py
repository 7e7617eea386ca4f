"""Random draws that are a function of a seed and a number: batch 7 is the same whether or not batch 6 was drawn."""

from __future__ import annotations

import torch


def generator(seed: int, number: int) -> torch.Generator:
    """A generator of its own for the draw of this number."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 63))
