"""Who multiplies: the one interface between the script's operators and whatever computes a batch of products.

The idea: operands come as strided views and are written once into memory that the multiplier owns (contiguous: straight
copies; transposed: torch's blocked copy). `start` returns at once, so that a caller may have many products under way;
each is read out of memory that is only lent for the duration of one call, so that a result never aliases shared memory
that a forked child, or a late write, could change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tileweave.script.arena import Arena, ArenaFullError, Block
from tileweave.script.channel import Channel
from tileweave.script.wire import GemmRequest

Read = Callable[[Tensor], None]


class Pending(Protocol):
    """A product under way."""

    def read(self, read: Read) -> None:
        """Waits for the product, then calls `read` once with it, (batch, m, n) float32, contiguous and valid during
        that call only."""


class Multiplier(Protocol):
    """Computes C_i = A_i B_i."""

    def start(self, a: Tensor, bt: Tensor) -> Pending:
        """a: (batch, m, k), bt: (batch, n, k), that is B transposed; CPU tensors of floating point with any strides;
        they are read before this returns, and computed with as float32."""

    def finished(self, pending: Collection[Pending], block: bool) -> Sequence[Pending]:
        """Those that can be read without waiting; if `block`, waits until there is one."""


class _Computed:
    """A product that is there."""

    def __init__(self, product: Tensor) -> None:
        self._product = product

    def read(self, read: Read) -> None:
        """See Pending."""
        read(self._product)


class PlainMultiplier:
    """Multiplies in this process: what a run by hand uses."""

    def start(self, a: Tensor, bt: Tensor) -> Pending:
        """See Multiplier."""
        return _Computed(torch.bmm(a.float(), bt.float().transpose(1, 2)))

    def finished(self, pending: Collection[Pending], block: bool) -> Sequence[Pending]:
        """See Multiplier."""
        return list(pending)


class _InArena:
    """A product that devices compute. After an error its regions are not used again: the coordinator may still be
    reading or writing them."""

    def __init__(
        self, channel: Channel, arena: Arena, gemm: int, shape: tuple[int, int, int], blocks: list[Block]
    ) -> None:
        self.gemm = gemm
        self._channel, self._arena = channel, arena
        self._shape = shape
        self._blocks = blocks

    def read(self, read: Read) -> None:
        """See Pending. Raises GemmError, JobCancelled or JobLost."""
        self._channel.wait_product(self.gemm)
        try:
            read(self._blocks[-1].floats.view(self._shape))
        finally:
            for block in self._blocks:
                self._arena.free(block)


class ArenaMultiplier:
    """Writes operands to the arena, asks the coordinator, and lends the product out of the arena. Thread-safe."""

    def __init__(self, channel: Channel, arena: Arena) -> None:
        self._channel = channel
        self._arena = arena
        self._ids = itertools.count(1)
        self.step = 0
        """The step under way: it is named in every request."""

    def start(self, a: Tensor, bt: Tensor) -> Pending:
        """See Multiplier. Raises ArenaFullError or JobLost."""
        batch, m, k = a.shape
        n = bt.shape[1]
        blocks: list[Block] = []
        try:
            for floats in (a.numel(), bt.numel(), batch * m * n):
                blocks.append(self._arena.allocate(floats))
        except ArenaFullError:
            for block in blocks:
                self._arena.free(block)
            raise
        blocks[0].floats.view(a.shape).copy_(a)
        blocks[1].floats.view(bt.shape).copy_(bt)
        regions = [block.region for block in blocks]
        gemm = next(self._ids)
        request = GemmRequest(
            id=gemm, step=self.step, batch=batch, m=m, n=n, k=k, a=regions[0], b=regions[1], c=regions[2]
        )
        self._channel.send(request)
        return _InArena(self._channel, self._arena, gemm, (batch, m, n), blocks)

    def finished(self, pending: Collection[Pending], block: bool) -> Sequence[Pending]:
        """See Multiplier. Raises JobCancelled or JobLost."""
        ours = {one.gemm: one for one in pending if isinstance(one, _InArena)}
        return [ours[gemm] for gemm in self._channel.answered(ours, block)]
