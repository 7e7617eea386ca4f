"""The product in pure Python, for a browser in which not even a side module loads: about 0.02 GFLOP/s.

Every type becomes lists of Python floats, which are doubles: an element of C is summed in double precision and rounded
once. Lines of B are unpacked some at a time, since a list of floats takes 32 bytes an element.
Left out: all cleverness.
"""

from __future__ import annotations

import struct
from array import array
from operator import mul

from tileweave_kernel.operand import BF16, BLOCK, ELEMENT_BYTES, F16, F32, Operand

ABREAST = 64  # lines of B unpacked at a time


class Plain:
    """Same methods as SideModule."""

    name = "python"

    def __init__(self, note: str) -> None:
        self.note = note

    def fast_scratch_bytes(self, m: int, n: int, k: int) -> int:
        """There is no faster way."""
        return 0

    def tile(
        self,
        batch: int,
        m: int,
        n: int,
        k: int,
        a: Operand,
        a_entry: int,
        b: Operand,
        b_entry: int,
        c: bytearray,
        accumulate: bool,
        scratch: bytearray | None,
    ) -> None:
        """C[i] (+)= A[i] B[i], the operands of each entry so many bytes behind those before."""
        for i in range(batch):
            operands = (x._replace(offset=x.offset + i * entry) for x, entry in ((a, a_entry), (b, b_entry)))
            self.multiply(m, n, k, *operands, memoryview(c)[4 * i * m * n :], n, accumulate, None)

    def multiply(
        self,
        m: int,
        n: int,
        k: int,
        a: Operand,
        b: Operand,
        c: bytearray | memoryview,
        c_row: int,
        accumulate: bool,
        bias: bytearray | None,
    ) -> None:
        """One product of any types and layouts."""
        out = memoryview(c).cast("f")
        added = memoryview(bias).cast("f").tolist() if bias else [0.0] * n
        for first in range(0, n, ABREAST):
            columns = [line(b, j, k) for j in range(first, min(first + ABREAST, n))]
            for i in range(m):
                row = line(a, i, k)
                at = i * c_row + first
                for j, column in enumerate(columns):
                    before = out[at + j] if accumulate else 0.0
                    out[at + j] = before + sum(map(mul, row, column)) + added[first + j]


def line(operand: Operand, index: int, k: int) -> list[float]:
    """The k elements of one line."""
    buffer, offset, across, along, kind, scales = operand
    size = ELEMENT_BYTES[kind]
    start = offset + size * index * across
    raw = memoryview(buffer)[start : start + size * ((k - 1) * along + 1)]
    if kind == F32:
        return list(raw.cast("f")[::along])
    if kind == BF16:  # the upper half of a float32
        widened = array("I", [bits << 16 for bits in raw.cast("H")[::along]])
        return list(memoryview(widened).cast("B").cast("f"))
    if kind == F16:
        return [value for (value,) in struct.iter_unpack("<e", raw)][::along]
    assert scales is not None, "i8 lines have scales"
    factors = memoryview(scales).cast("f")
    first = index * -(-k // BLOCK)
    return [value * factors[first + at // BLOCK] for at, value in enumerate(raw.cast("b")[::along])]
