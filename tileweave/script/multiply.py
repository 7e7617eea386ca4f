"""Who multiplies: the one interface between the offload mode and whatever computes a batch of products.

The idea: operands come as strided views, are written once into memory that the multiplier owns (contiguous: straight
copies; transposed: torch's blocked copy), and the product is read out of memory that is only lent for the duration of
one call. So a result never aliases shared memory that a forked child, or a late write, could change.
Left out: several GEMMs in flight from one thread. A training loop asks for one product at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tileweave.script.arena import Arena
from tileweave.script.channel import Channel
from tileweave.script.wire import GemmRequest


class Multiplier(Protocol):
    """Computes C_i = A_i B_i."""

    def multiply(self, a: Tensor, bt: Tensor, read: Callable[[Tensor], None]) -> None:
        """a: (batch, m, k), bt: (batch, n, k), that is B transposed; float32 CPU tensors with any strides.
        Calls `read` once with the product, (batch, m, n), contiguous and valid during that call only."""


class PlainMultiplier:
    """Multiplies in this process: what a run by hand uses."""

    def multiply(self, a: Tensor, bt: Tensor, read: Callable[[Tensor], None]) -> None:
        """See Multiplier."""
        read(torch.bmm(a, bt.transpose(1, 2)))


class ArenaMultiplier:
    """Writes operands to the arena, asks the coordinator, and lends the product out of the arena. Thread-safe."""

    def __init__(self, channel: Channel, arena: Arena) -> None:
        self._channel = channel
        self._arena = arena
        self._ids = itertools.count(1)
        self.step = 0
        """The step under way: it is named in every request."""

    def multiply(self, a: Tensor, bt: Tensor, read: Callable[[Tensor], None]) -> None:
        """See Multiplier. Raises ArenaFullError, GemmError, JobCancelled or JobLost.

        After an error the regions are not used again: the coordinator may still be reading or writing them."""
        batch, m, k = a.shape
        n = bt.shape[1]
        block_a = self._arena.allocate(a.numel())
        block_b = self._arena.allocate(bt.numel())
        block_c = self._arena.allocate(batch * m * n)
        block_a.floats.view(a.shape).copy_(a)
        block_b.floats.view(bt.shape).copy_(bt)
        gemm = next(self._ids)
        self._channel.send(
            GemmRequest(
                id=gemm, step=self.step, batch=batch, m=m, n=n, k=k,
                a=block_a.region, b=block_b.region, c=block_c.region,
            )
        )  # fmt: skip
        self._channel.wait_product(gemm)
        read(block_c.floats.view(batch, m, n))
        for block in (block_a, block_b, block_c):
            self._arena.free(block)
