"""An operand as it is stored for the devices: the wire's elements in the arena, named by their content.

The idea: what a device was sent once it need not be sent again, whatever it is multiplied with. So an operand that is
wanted again is stored as it lies in the script's memory (a weight W serves Y = X W^T by lines and dX = dY W by k), and
its name is a hash of the bytes: the same numbers have the same name in any GEMM, any step and any run.

    f32, bf16    the numbers, rounded to nearest
    f16          the numbers times a power of two, the same for all parts, that brings the largest to 1/16 .. 1: the
                 product is divided by it again. Powers come in steps of 2^4, so that one tensor has one name.
    i8           int8 and a scale for each 128 of a stored row (protocol/elements.py)

Numbers that are not finite stay so: whoever checks the product says it of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from tileweave.protocol.elements import SCALE_BLOCK, Dtype, panel_bytes, scales_offset, scales_per_row
from tileweave.script.arena import Arena, Block

EXPONENT_STEP = 4  # of the power of two that scales f16
F16_SUM_MAX = 32768.0  # what a product may come to, half of what f16 holds

_TORCH: dict[Dtype, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True, slots=True)
class Stored:
    """One part: its block and its name."""

    block: Block
    content: str


@dataclass(frozen=True, slots=True)
class Layout:
    """How an operand (batch, lines, k) lies: by lines, or by k, where a row holds all lines of one k."""

    by_k: bool

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Layout:
        """The one in which these tensors lie already, if any."""
        return cls(all(part.stride(1) == 1 and part.stride(2) != 1 for part in parts))

    def rows(self, part: Tensor) -> Tensor:
        """The stored matrix (batch, rows, columns), a view."""
        return part.transpose(1, 2) if self.by_k else part


BY_LINES = Layout(False)


def exponents(a: Sequence[Tensor], bt: Sequence[Tensor]) -> tuple[int, int]:
    """f16's powers of two for both operands: so that neither they nor their product leave its range."""
    largest = [max(float(part.abs().max()) for part in parts) for parts in (a, bt)]
    if not all(map(math.isfinite, largest)):
        return 0, 0
    powers = [_exponent(value) for value in largest]
    depth = len(a) * a[0].shape[2]
    while depth * math.prod(math.ldexp(1.0, p) * v for p, v in zip(powers, largest, strict=True)) > F16_SUM_MAX:
        powers[0] -= EXPONENT_STEP
    return powers[0], powers[1]


def _exponent(largest: float) -> int:
    if largest == 0:
        return 0
    return -EXPONENT_STEP * math.ceil(math.frexp(largest)[1] / EXPONENT_STEP)


def store(arena: Arena, part: Tensor, layout: Layout, dtype: Dtype, exponent: int = 0) -> Stored:
    """Writes one part (batch, lines, k) into a new block. Raises ArenaFullError."""
    matrix = layout.rows(part)
    batch, height, columns = matrix.shape
    rows = batch * height
    block = arena.allocate(panel_bytes(rows, columns, dtype))
    if dtype == "i8":
        _quantize(matrix.reshape(rows, columns), block)
    else:
        numbers = matrix if exponent == 0 else matrix.float() * math.ldexp(1.0, exponent)
        block.memory.view(_TORCH[dtype]).view(matrix.shape).copy_(numbers)
    digest = xxhash.xxh3_128(block.buffer)
    digest.update(f"{dtype} {rows} {columns}".encode())
    return Stored(block, digest.hexdigest())


def _quantize(matrix: Tensor, block: Block) -> None:
    """int8 and scales. A scale is rounded up to 16 significant bits, so that q times scale is exact."""
    rows, columns = matrix.shape
    blocks = scales_per_row(columns)
    parts = pad(matrix.float(), (0, blocks * SCALE_BLOCK - columns)).view(rows, blocks, SCALE_BLOCK)
    bits = (parts.abs().amax(dim=2) / 127).view(torch.int32)
    scales = ((bits + 0xFF) & ~0xFF).view(torch.float32)
    q = (parts / scales.unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127).to(torch.int8)
    border = scales_offset(rows, columns)
    block.memory[: rows * columns].view(torch.int8).view(rows, columns).copy_(q.view(rows, -1)[:, :columns])
    block.memory[rows * columns : border].zero_()
    block.memory[border:].view(torch.float32).view(rows, blocks).copy_(scales)
