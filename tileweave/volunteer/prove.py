"""Proves a native kernel on this machine before it touches anyone's work, as a browser proves its engines.

The shapes are those at which kernels have been seen to fail: one element, either side of a block, flat, a k beyond one
block, 500 rows and more; operands by lines and by k; and values outside the range of half precision. Known are the
answers to float64's accuracy, computed by einsum without BLAS, since a broken BLAS is among the things to be found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Multiply = Callable[[Floats, Floats], Floats]  # (batch, m, k), (batch, n, k) -> (batch, m, n)

UNIT_ROUNDOFF = 2.0**-24
BOUND = 16.0  # u |A_i| |B_j|: honest sums of numbers of mixed signs reach 2, half precision hundreds
SHAPES = [
    (1, 1, 1, 1), (1, 31, 33, 32), (1, 33, 31, 513), (3, 32, 32, 31), (1, 5, 8, 4), (2, 7, 3, 600), (1, 1, 499, 16),
    (1, 500, 5, 33), (1, 513, 1, 31), (1, 2, 513, 500), (16, 17, 8, 64), (1, 1, 1152, 384), (1, 257, 1152, 384),
    (1, 513, 499, 500),
]  # fmt: skip
"""batch, m, n, k"""
SCALES = (1.0, 1e-15, 1e9)  # of both operands, in turn


def first_fault(multiply: Multiply) -> str:
    """The first wrong product, in words; "" where all are right. An exception is a fault."""
    random = np.random.default_rng(1)
    for index, (batch, m, n, k) in enumerate(SHAPES):
        scale = SCALES[index % len(SCALES)]
        a = (scale * random.uniform(-1, 1, (batch, m, k))).astype(np.float32)
        bt = (scale * random.uniform(-1, 1, (batch, n, k))).astype(np.float32)
        if index % 2:
            a, bt = _by_k(a), _by_k(bt)
        shape = f"{batch}x{m}x{k} by {k}x{n}"
        try:
            c = multiply(a, bt)
        except Exception as error:  # whatever a kernel does wrong, the others may be right
            return f"{shape}: {type(error).__name__}: {error}"
        if c.shape != (batch, m, n):
            return f"{shape}: a product of shape {c.shape}"
        if fault := _fault(a.astype(np.float64), bt.astype(np.float64), c):
            return f"{shape}, {fault}"
    return ""


def _by_k(lines: Floats) -> Floats:
    """The same numbers, with those of one k beside each other."""
    return np.ascontiguousarray(lines.transpose(0, 2, 1)).transpose(0, 2, 1)


def _fault(a: NDArray[np.float64], bt: NDArray[np.float64], c: Floats) -> str:
    exact = np.einsum("bmk,bnk->bmn", a, bt, optimize=False)
    sizes = np.linalg.norm(a, axis=2)[:, :, None] * np.linalg.norm(bt, axis=2)[:, None, :]
    right = np.abs(c - exact) <= BOUND * UNIT_ROUNDOFF * sizes  # false for NaN
    if right.all():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(np.argmin(right)), right.shape))
    return f"element {at}: {c[at]:.9g}, expected {exact[at]:.9g}"
