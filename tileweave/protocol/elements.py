"""Element types on the wire: what numbers a panel or a result may hold, and how many bytes they take.

    f32    float32                                      panels and results
    bf16   bfloat16: a float32 without its lower half   panels and results
    f16    IEEE binary16                                panels and results
    i8     int8 and scales                              panels

All little-endian, row-major, without gaps. An i8 panel is `rows` x `columns` int8, zeros up to a multiple of 4 bytes,
then `rows` x ceil(columns / 128) float32 scales: element (r, c) is q[r, c] * scale[r, c // 128]. A scale has at most 16
significant bits, so that this product is a float32, exactly.

A job's wire is one of WIRES: the type of its panels, and the type of its results.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Dtype = Literal["f32", "bf16", "f16", "i8"]
ResultDtype = Literal["f32", "bf16", "f16"]
Wire = Literal["f32", "bf16", "f16", "int8"]

ELEMENT_BYTES: Final[dict[Dtype, int]] = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}
SCALE_BLOCK: Final = 128
"""Elements of a row that share a scale in an i8 panel."""
SCALE_BYTES: Final = 4


class Elements(NamedTuple):
    """A wire's element types."""

    panels: Dtype
    results: ResultDtype


WIRES: Final[dict[Wire, Elements]] = {
    "f32": Elements("f32", "f32"),
    "bf16": Elements("bf16", "bf16"),
    "f16": Elements("f16", "f16"),
    "int8": Elements("i8", "bf16"),
}


def scales_per_row(columns: int) -> int:
    """Scales of one row of an i8 panel."""
    return -(-columns // SCALE_BLOCK)


def scales_offset(rows: int, columns: int) -> int:
    """Where an i8 panel's scales begin, in bytes."""
    return (rows * columns + 3) // 4 * 4


def panel_bytes(rows: int, columns: int, dtype: Dtype) -> int:
    """Bytes of a panel."""
    if dtype == "i8":
        return scales_offset(rows, columns) + rows * scales_per_row(columns) * SCALE_BYTES
    return rows * columns * ELEMENT_BYTES[dtype]


def result_bytes(elements: int, dtype: ResultDtype) -> int:
    """Bytes of a result of so many elements."""
    return elements * ELEMENT_BYTES[dtype]
