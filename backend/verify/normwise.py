"""How far a norm-wise product may be off: what Strassen-like algorithms add to the bounds of freivalds.py.

A fast algorithm multiplies sums of blocks, so that a row of C carries rounding of other rows of A and of all columns of
B: its error is small beside the largest of them, not beside itself (Higham, Accuracy and Stability, 2nd ed., 23.2.2: u
times a factor for each level times the sizes of A and B). Every row of a tile is therefore allowed, besides its own
bounds, one width that the tile's operands alone decide, whatever the device sent:

    spread  P = max_i |A_i| |B|_F                           2-norm of the longest row, Frobenius norm
    bulk    M = sqrt(k) max over i, q, q' of 4 |A_iq B_q'|  q, q' the quarters of k, which two levels mix
    width   W = u sqrt(P^2 + M^2)                           where terms are alike, errors of long sums have one sign

    |d| <= 8 (T + u P): good. The rest is computed again in float64: good if |C_i - (A B)_i| <= 3 W, or good row-wise;
    bad beyond 64 W; between, unsure: refused, nobody is blamed, and the GEMM's tiles are row-wise from then on, so
    that who lies again is found out.

(T and d as there; what subnormals change is added.) Measured, |C_i - (A B)_i| over u P: ordinary sums 0.1 to 0.8,
Strassen-Winograd one level 0.2 to 0.8, two levels 0.4 to 1.6; constant matrices 4 to 60, but over W at most 2.9. Blocks
that are constant but for their signs reach 26 W with two levels; operands rounded to f16 err by 66 W at k = 1024.

A width that all rows share lets a lie pass in rows that are far shorter than the longest, and sums of blocks overflow
sooner than the product: a GEMM whose operands are like that is row-wise from the start (`suits`).

Left out: more than two levels, and a bound that is proved: no rounding comes near it, and much else would. Columns that
are far shorter than others: that an error is small beside its whole row is all that row-wise products promise too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-24
BULK_PROBES = 32  # a norm is known to about an eighth: enough for a bound, and never far too small
QUARTERS = 4  # of k: what two levels multiply with each other
BULK_SEED = 1  # no secret: the operands are not the devices'
INTERMEDIATE = 2.0**10  # times max_i |A_i| max_j |B_j|: no number inside two levels is larger
ROWS_APART_MAX = 2.0**6  # longest over shortest row of A: operands rounded to bf16 still show in the shortest
SETTLE = 3.0  # times the width: what fast products are known to stay below but for blocks of one sign
UNSURE = 64.0  # times the width: beyond any honest product seen (26)
BLOCK_ROWS = 1024  # of which float64 copies are made at a time


class Allowance(NamedTuple):
    """What each row of a tile is allowed besides its own bounds: u P and W, subnormals included; 0 where nothing is."""

    spread: float
    width: float


NOTHING = Allowance(0.0, 0.0)


def rows_size(a: F32) -> F64:
    """max_i |A_i| (batch,) from A (batch, m, k). May overflow to infinity or underflow; neither lets a row pass."""
    with np.errstate(all="ignore"):
        size: F64 = np.sqrt(np.vecdot(a, a).max(axis=1), dtype=np.float64)
        return size


def columns_size(bt: F32) -> F64:
    """|B|_F (batch,) from B^T (batch, n, k); as `rows_size`."""
    with np.errstate(all="ignore"):
        size: F64 = np.sqrt(np.vecdot(bt, bt).sum(axis=1, dtype=np.float64))
        return size


def spread(rows: F64, columns: F64) -> F64:
    """u P (batch,)."""
    return UNIT_ROUNDOFF * rows * columns


def allowance(a: F32, bt: F32, flushed: float) -> Allowance:
    """Of one batch entry, A (m, k) and B^T (n, k), both finite. `flushed`: what subnormals may change in a row."""
    k = a.shape[1]
    r = np.random.default_rng(BULK_SEED).standard_normal((len(bt), BULK_PROBES))
    quarter = -(-k // QUARTERS)
    br = np.zeros((quarter * QUARTERS, BULK_PROBES))
    columns = 0.0
    for first in range(0, len(bt), BLOCK_ROWS):
        b = bt[first : first + BLOCK_ROWS].astype(np.float64)
        br[:k] += b.T @ r[first : first + BLOCK_ROWS]
        columns += float(np.square(b).sum())
    rows = bulk = 0.0
    for first in range(0, len(a), BLOCK_ROWS):
        block = np.zeros((len(a[first : first + BLOCK_ROWS]), quarter * QUARTERS))
        block[:, :k] = a[first : first + BLOCK_ROWS]
        rows = max(rows, float(np.square(block).sum(axis=1).max()))
        for a_part in np.hsplit(block, QUARTERS):
            for b_part in np.vsplit(br, QUARTERS):
                bulk = max(bulk, float(np.square(a_part @ b_part).mean(axis=1).max()))
    square = rows * columns
    return Allowance(
        UNIT_ROUNDOFF * math.sqrt(square) + flushed,
        UNIT_ROUNDOFF * math.sqrt(square + k * QUARTERS**2 * bulk) + flushed,
    )


def suits(a: F32, bt: F32) -> bool:
    """May the product of A (batch, m, k) and B^T (batch, n, k) be norm-wise? Not where a row of A is far shorter than
    another, nor where sums of blocks may pass float32's range, nor where a number is not finite."""
    with np.errstate(all="ignore"):
        rows, columns = np.sqrt(np.vecdot(a, a)), np.sqrt(np.vecdot(bt, bt))
        longest, widest = rows.max(axis=1).astype(np.float64), columns.max(axis=1).astype(np.float64)
        shortest = np.where(rows > 0, rows, np.inf).min(axis=1)
        reach = INTERMEDIATE * np.maximum.reduce([longest * widest, longest, widest])
        return bool(((longest <= ROWS_APART_MAX * shortest) & (reach < np.finfo(np.float32).max)).all())
