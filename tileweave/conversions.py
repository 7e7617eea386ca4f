"""float32 to and from the wire's narrower elements (protocol/elements.py), in NumPy: what a volunteer, the server's
checks and the tests read and write panels and results with. Rounding is to nearest, ties to even; NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileweave.protocol.elements import SCALE_BLOCK, Dtype, ResultDtype, scales_offset, scales_per_row

F32 = NDArray[np.float32]
Bytes = bytes | bytearray | memoryview

SCALE_BITS_DROPPED = 0xFF  # of a scale's 24 significant bits; 16 stay
QUIET_NAN = np.uint16(0x40)
_STORED: dict[str, type[np.float32 | np.float16 | np.uint16]] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16,
}  # fmt: skip


def panel_floats(data: Bytes, rows: int, columns: int, dtype: Dtype) -> F32:
    """A panel's numbers (rows, columns), exactly; a view of `data` where it is f32."""
    return part_floats(data, rows, columns, dtype, 0, rows, 0, columns)


def part_floats(
    data: Bytes, rows: int, columns: int, dtype: Dtype, row: int, height: int, column: int, width: int
) -> F32:
    """Numbers (height, width) of a panel from `row` and `column` on, exactly; a view of `data` where it is f32."""
    part = slice(row, row + height), slice(column, column + width)
    if dtype != "i8":
        return _widened(np.frombuffer(data, _STORED[dtype], rows * columns).reshape(rows, columns)[part])
    q = np.frombuffer(data, np.int8, rows * columns).reshape(rows, columns)[part]
    blocks = scales_per_row(columns)
    scales = np.frombuffer(data, np.float32, rows * blocks, scales_offset(rows, columns)).reshape(rows, blocks)
    first, last = column // SCALE_BLOCK, scales_per_row(column + width)
    wide = np.repeat(scales[part[0], first:last], SCALE_BLOCK, axis=1)[:, column - first * SCALE_BLOCK :][:, :width]
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale: not a number, as it should be
        product: F32 = wide * q
        return product


def floats(data: Bytes, count: int, dtype: ResultDtype) -> F32:
    """`count` numbers of f32 (a view), bf16 or f16."""
    return _widened(np.frombuffer(data, _STORED[dtype], count))


def _widened(stored: NDArray[Any]) -> F32:
    """float32 as it is, binary16, or uint16 that is the upper half of float32."""
    if stored.dtype == np.uint16:
        wide: F32 = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        return wide
    return stored.astype(np.float32, copy=False)


def rounded(values: F32, dtype: ResultDtype) -> Bytes:
    """The numbers as a result carries them, in order."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "f32":
        return values.data.cast("B")
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16) if dtype == "f16" else _bfloat16(values)
    return narrow.data.cast("B")


def panel_of(values: F32, dtype: Dtype) -> Bytes:
    """A panel's bytes of numbers (rows, columns)."""
    if dtype != "i8":
        return rounded(values, dtype)
    rows, columns = values.shape
    blocks = scales_per_row(columns)
    padded = np.zeros((rows, blocks * SCALE_BLOCK), np.float32)
    padded[:, :columns] = values
    parts = padded.reshape(rows, blocks, SCALE_BLOCK)
    bits = (np.abs(parts).max(axis=2) / np.float32(127)).view(np.uint32)
    scales = ((bits + np.uint32(SCALE_BITS_DROPPED)) & ~np.uint32(SCALE_BITS_DROPPED)).view(np.float32)
    with np.errstate(all="ignore"):
        q = np.nan_to_num(np.rint(parts / scales[:, :, None])).clip(-127, 127).astype(np.int8)
    elements = q.reshape(rows, -1)[:, :columns].tobytes()
    return b"".join((elements, bytes(scales_offset(rows, columns) - len(elements)), scales.tobytes()))


def _bfloat16(values: F32) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    upper = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        upper[nan] = (bits[nan] >> 16).astype(np.uint16) | QUIET_NAN
    return upper
