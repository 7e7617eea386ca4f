"""Who multiplies: the one interface between the script's operators and whatever computes a batch of products.

The idea: operands come as strided views and are written once into memory that the multiplier owns, in the wire's
elements (stored.py). `start` returns at once, so that a caller may have many products under way; each is read out of
memory that is only lent for the duration of one call, so that a result never aliases shared memory that a forked child,
or a late write, could change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tileweave.protocol.elements import WIRES, Wire
from tileweave.script.arena import Arena, ArenaFullError, Block
from tileweave.script.channel import Channel
from tileweave.script.stored import BY_LINES, Layout, Stored, exponents, store
from tileweave.script.wire import GemmRequest, Part

Read = Callable[[Tensor], None]


class Pending(Protocol):
    """A product under way."""

    def read(self, read: Read) -> None:
        """Waits for the product, then calls `read` once with it, (batch, m, n) float32, contiguous and valid during
        that call only."""


class Multiplier(Protocol):
    """Computes C_i = A_i B_i, or the sum of several such products."""

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        """For each part a: (batch, m, k), bt: (batch, n, k), that is B transposed; CPU tensors of floating point with
        any strides; they are read before this returns. With several parts, whose products are added up, batch is 1.
        `uses`: products that B is expected to be part of; with more than one, A is expected again too."""

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

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        """See Multiplier."""
        products = (torch.bmm(x.float(), y.float().transpose(1, 2)) for x, y in zip(a, bt, strict=True))
        return _Computed(sum(products, start=next(products)))

    def finished(self, pending: Collection[Pending], block: bool) -> Sequence[Pending]:
        """See Multiplier."""
        return list(pending)


class _InArena:
    """A product that devices compute, times 2^exponent. After an error its regions are not used again: the coordinator
    may still be reading or writing them."""

    def __init__(
        self, channel: Channel, arena: Arena, gemm: int, shape: tuple[int, int, int], blocks: list[Block], exponent: int
    ) -> None:
        self.gemm = gemm
        self._channel, self._arena = channel, arena
        self._shape = shape
        self._blocks = blocks
        self._exponent = exponent

    def read(self, read: Read) -> None:
        """See Pending. Raises GemmError, JobCancelled or JobLost."""
        self._channel.wait_product(self.gemm)
        try:
            product = self._blocks[-1].floats.view(self._shape)
            if self._exponent:
                product *= math.ldexp(1.0, -self._exponent)
            read(product)
        finally:
            for block in self._blocks:
                self._arena.free(block)


class ArenaMultiplier:
    """Writes operands to the arena, asks the coordinator, and lends the product out of the arena. Thread-safe."""

    def __init__(self, channel: Channel, arena: Arena, wire: Wire) -> None:
        self._channel = channel
        self._arena = arena
        self._elements = WIRES[wire]
        self._ids = itertools.count(1)
        self.step = 0
        """The step under way: it is named in every request."""

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        """See Multiplier. Raises ArenaFullError or JobLost."""
        batch, m, k = a[0].shape
        n = bt[0].shape[1]
        # By k only where it is wanted again: one product alone is divided better among devices by lines.
        a_layout, b_layout = (Layout.of(a), Layout.of(bt)) if uses > 1 else (BY_LINES, BY_LINES)
        blocks: list[Block] = []
        powers = exponents(a, bt) if self._elements.panels == "f16" else (0, 0)
        try:
            a_parts = [self._store(part, a_layout, powers[0], blocks) for part in a]
            b_parts = [self._store(part, b_layout, powers[1], blocks) for part in bt]
            blocks.append(self._arena.allocate(4 * batch * m * n))
        except ArenaFullError:
            for block in blocks:
                self._arena.free(block)
            raise
        gemm = next(self._ids)
        request = GemmRequest(
            id=gemm, step=self.step, batch=batch, m=m, n=n, k=k, a=a_parts, b=b_parts, c=blocks[-1].region,
            a_by_k=a_layout.by_k, b_by_k=b_layout.by_k, b_uses=uses,
        )  # fmt: skip
        self._channel.send(request)
        return _InArena(self._channel, self._arena, gemm, (batch, m, n), blocks, sum(powers))

    def _store(self, part: Tensor, layout: Layout, exponent: int, blocks: list[Block]) -> Part:
        stored: Stored = store(self._arena, part, layout, self._elements.panels, exponent)
        blocks.append(stored.block)
        return Part(stored.block.region, stored.content, stored.block.stamp_offset, stored.block.stamp)

    def finished(self, pending: Collection[Pending], block: bool) -> Sequence[Pending]:
        """See Multiplier. Raises JobCancelled or JobLost."""
        ours = {one.gemm: one for one in pending if isinstance(one, _InArena)}
        return [ours[gemm] for gemm in self._channel.answered(ours, block)]
