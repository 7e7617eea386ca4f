"""A matrix as it lies in bytes: web/types/engine.d.ts has the meaning of every field.

Left out: checks. JavaScript has the sizes, and a wrong one would be its own mistake.
"""

from __future__ import annotations

from typing import NamedTuple

F32, BF16, F16, I8 = range(4)
ELEMENT_BYTES = (4, 2, 2, 1)
BLOCK = 128  # elements along k that share a scale of an i8 line


class Operand(NamedTuple):
    """Lines of `buffer` from byte `offset` on; element l of line i is at i * across + l * along, in elements."""

    buffer: bytearray
    offset: int
    across: int
    along: int = 1
    type: int = F32
    scales: bytearray | None = None
