"""float32 to and from the wire's narrower elements (protocol/elements.py), in NumPy: what a volunteer, the server's
checks and the tests read and write panels and results with. Rounding is to nearest, ties to even; NaN stays NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tileweave.protocol.elements import SCALE_BLOCK, Dtype, ResultDtype, scales_offset, scales_per_row

F32 = NDArray[np.float32]
Bytes = bytes | bytearray | memoryview

SCALE_BITS_DROPPED = 0xFF  # of a scale's 24 significant bits; 16 stay
QUIET_NAN = np.uint16(0x40)


def panel_floats(data: Bytes, rows: int, columns: int, dtype: Dtype) -> F32:
    """A panel's numbers (rows, columns), exactly; a view of `data` where it is f32."""
    if dtype != "i8":
        return floats(data, rows * columns, dtype).reshape(rows, columns)
    q = np.frombuffer(data, np.int8, rows * columns).reshape(rows, columns)
    blocks = scales_per_row(columns)
    scales = np.frombuffer(data, np.float32, rows * blocks, scales_offset(rows, columns)).reshape(rows, blocks)
    return scaled(q, scales)


def scaled(q: NDArray[np.int8], scales: F32) -> F32:
    """i8 elements (rows, columns) times their scales (rows, blocks)."""
    wide: F32 = np.repeat(scales, SCALE_BLOCK, axis=1)[:, : q.shape[1]]
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale: not a number, as it should be
        return wide * q


def floats(data: Bytes, count: int, dtype: Dtype) -> F32:
    """`count` numbers of f32 (a view), bf16 or f16."""
    if dtype == "f32":
        return np.frombuffer(data, np.float32, count)
    if dtype == "f16":
        return np.frombuffer(data, np.float16, count).astype(np.float32)
    assert dtype == "bf16", f"got {dtype}, expected f32, bf16 or f16"
    return np.left_shift(np.frombuffer(data, np.uint16, count), 16, dtype=np.uint32).view(np.float32)


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
