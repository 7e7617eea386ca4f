"""What the kernel bench multiplies, and how wrong a product is: the float64 truth about every product a page posts.

All contestants of a size multiply the same two square matrices A and B, drawn once from a normal distribution and then
rounded to the type that a contestant reads, so that rounding the input is not counted as its error. A contestant may
also compute a chain A B B ... of `factors` factors B in one call (see peers.js for who does and why).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SEED = 3
SCALE_BLOCK = 128  # elements of a line that share one scale of int8
INT8_MAX = 127

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Operand:
    """Lines as the wire carries them: `data` is what the page gets, `value` [n, n] what that means, both by lines."""

    data: bytes
    scales: bytes
    value: Floats


def encode(lines: Floats, dtype: str) -> Operand:
    """Round `lines` [n, k] to f32, bf16, f16 or i8 (with float32 scales, line-major). Raises ValueError for another."""
    if dtype == "f32":
        return Operand(lines.tobytes(), b"", lines)
    if dtype == "f16":
        return Operand(lines.astype(np.float16).tobytes(), b"", lines.astype(np.float16).astype(np.float32))
    if dtype == "bf16":
        # To nearest, ties to even, on the bits: numpy has no bfloat16.
        bits = lines.view(np.uint32)
        high = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return Operand(high.tobytes(), b"", (high.astype(np.uint32) << 16).view(np.float32))
    if dtype == "i8":
        rows, k = lines.shape
        blocks = -(-k // SCALE_BLOCK)
        padded = np.zeros((rows, blocks * SCALE_BLOCK), np.float32)
        padded[:, :k] = lines
        cut = padded.reshape(rows, blocks, SCALE_BLOCK)
        scales = (np.abs(cut).max(axis=2, keepdims=True) / INT8_MAX).astype(np.float32)
        whole = np.rint(cut / np.where(scales > 0, scales, 1)).astype(np.int8)
        value = (whole * scales).reshape(rows, -1)[:, :k]
        data = np.ascontiguousarray(whole.reshape(rows, -1)[:, :k])
        return Operand(data.tobytes(), scales.tobytes(), value)
    raise ValueError(f"got type {dtype}, expected f32, bf16, f16 or i8")


@cache
def operands(n: int, dtype: str) -> tuple[Operand, Operand]:
    """A [n, n] by rows and B^T [n, n] by columns of B, of that type."""
    rng = np.random.default_rng([SEED, n])
    return encode(rng.standard_normal((n, n), np.float32), dtype), encode(
        rng.standard_normal((n, n), np.float32), dtype
    )


@cache
def _truth(n: int, dtype: str, factors: int) -> NDArray[np.float64]:
    a, b = operands(n, dtype)
    left = a.value.astype(np.float64) if factors == 1 else _truth(n, dtype, factors - 1)
    return left @ b.value.astype(np.float64).T


def error(n: int, dtype: str, factors: int, product: bytes) -> float:
    """Largest error of the posted float32 product over the largest element; infinite for NaN or a wrong length."""
    got = np.frombuffer(product, np.float32)
    if got.size != n * n:
        return float("inf")
    expected = _truth(n, dtype, factors)
    found = float(np.abs(got.reshape(n, n) - expected).max() / np.abs(expected).max())
    return found if np.isfinite(found) else float("inf")
