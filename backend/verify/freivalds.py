"""Is C the product of A and B? Freivalds' probabilistic check (1977), carried over to floating point.

For a secret random R[n,p] the check is A (B R) = C R: p columns instead of n, so a few per cent of the product's cost.
R is Gaussian: an error row e shows as e R ~ N(0, |e|^2), whatever e is, where a +-1 vector would miss two equal and
opposite errors half the time. In floating point the two sides differ by rounding, so what is asked is how large
d = A(BR) - CR may be. With u = 2^-24, beta_l = |row l of B| and root = u sqrt(k), row by row:

    tight  T_i = root sqrt(sum_l A_il^2 beta_l^2 + |C_i|^2)     rounding that adds up like a random walk
    loose  L_i = root sum_l |A_il| beta_l                       the same where the terms of the sum cancel

    |d| <= 8 T: good.  |d| > 8 sqrt(k) max(L, T): bad, since no order of summation errs as much.
    Between: nobody is blamed before the row has been computed again in float64 (`_settled`).

Honest products reach 1.45 T (1.95 T when d itself is computed in float32) unless the sum cancels, when they reach 29 T
but only 0.53 L, or its terms are all alike, when their rounding errors have one sign and a long sequential sum passes
8 L. What a false product may gain by the bounds is at the level of rounding.

Two stages. `passes` is float32 and looks at every row: honest rows have a wide margin below 8 T even with one half of
T alone (the A part and the C part are about equal unless the terms cancel), so it computes the half with fewer
elements, as a lower bound. Rows that do not pass go to `judge`: float64 throughout, the rules above. A
float32 overflow or underflow in the first stage therefore costs time, never a verdict. BR, A(BR) and CR are float32
products because their rounding is of T's own size (1.95 T instead of 1.45 T) and a float64 copy of A or C would cost
more than the check; d is subtracted in float64, for free.

Subnormals: a device may read or write numbers below 2^-126 as 0. `judge` adds what that can change (`flushed`) to both
bounds. A row whose exact product is zero must be exactly zero.

A result may be norm-wise, if its job accepts that: each row is then allowed a width besides these bounds, and there are
errors between rounding and lies (UNSURE) for which nobody is blamed either (normwise.py).

What a false product can gain is an error that a plain float32 sum of these very numbers might have made. Where terms
have one sign and k is long, that is as much as operands rounded to f16 make (uniform numbers, k > 1000), and where they
are all nearly alike (1 + 0.01 N) a product of rank one is as near. Such a product is no further from the truth than an
honest one may be, so it is let pass.

A result that the wire rounds to bf16 or f16 (unit v = 2^-8, 2^-11) is off by v |C_ij| at most, and by 2^-25 where f16
is subnormal: `rounding` is what that comes to in a row, and is added to each bound; ROUNDED times it where it is seen
through the probe, of which it is about 0.4. Rounding toward zero instead passes too: it errs less than twice as much.
Operands that the wire narrowed are what the product is of: they are compared as sent.

Left out: what is kept between tiles (verifier.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend.coordinator.events import Check
from backend.verify import normwise
from backend.verify.normwise import Allowance
from tileweave.protocol.elements import ResultDtype
from tileweave.protocol.messages import Accuracy

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

PROBES = 2  # columns of R: an error must hide from both
ACCEPT = 8.0  # times T or L
UNIT_ROUNDOFF = normwise.UNIT_ROUNDOFF
NORMAL_MIN = 2.0**-126
FLOAT32_MAX = float(np.finfo(np.float32).max)
EXACT_BYTES_MAX = 32 << 20  # float64 copies of the rows judged at once
SETTLE = 2.0  # times the bound on a whole row's error, which honest sums stay below 0.9 of
SETTLED_ROWS = 32  # at once, the worst first: a liar is found in the first run
PARTS = 17  # odd, so that data with a period of a power of two does not hide its peaks between them
LANES = 16  # the widest SIMD a kernel might sum along k with, in float32
SAMPLED = 8
RESULT_UNITS: dict[ResultDtype, tuple[float, float]] = {  # relative, and absolute where subnormal
    "f32": (0.0, 0.0),
    "bf16": (2.0**-8, 0.0),
    "f16": (2.0**-11, 2.0**-25),
}
ROUNDED = 3.0  # times a row's rounding: 7 standard deviations of what an honest one shows
ROUNDING_SLACK = 1.01  # what is rounded is not the product but a float32 sum near it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a product, and in `detail` why, where it is not good."""

    kind: Check
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExactColumns:
    """A column panel's side of the check in float64: BR (batch, k, p), beta and its part from subnormals (batch, k)."""

    br: F64
    beta: F64
    beta_subnormal: F64


def draw(n: int, seed: bytes) -> F32:
    """R (n, p), Gaussian, from a seed of at least 16 bytes that is used once."""
    return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal((n, PROBES), dtype=np.float32)


def root(k: int) -> float:
    """u sqrt(k), the rounding of a sum of k terms relative to their size."""
    return UNIT_ROUNDOFF * math.sqrt(k)


def columns_probe(bt: F32, r: F32) -> F32:
    """B R (batch, k, p) from B^T (batch, n, k)."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(np.matmul(np.ascontiguousarray(r.T), bt).transpose(0, 2, 1))


def columns_norms(bt: F32) -> F32:
    """beta (batch, k) from B^T (batch, n, k); may overflow or underflow, which `passes` can bear."""
    with np.errstate(all="ignore"):
        norms: F32 = np.sqrt(np.einsum("bnk,bnk->bk", bt, bt))
        return norms


def rows_probe(a: F32, br: F32) -> F32:
    """A (B R) (batch, m, p)."""
    with np.errstate(all="ignore"):
        probe: F32 = np.matmul(a, br)
        return probe


def rows_part(a: F32, beta: F32) -> F32:
    """The A part of (T / root)^2: sum_l A_il^2 beta_l^2 (batch, m). An underflow makes it smaller, an overflow inf or
    NaN: neither lets a row pass."""
    with np.errstate(all="ignore"):
        part: F32 = np.matmul(np.square(a), np.square(beta)[:, :, None])[:, :, 0]
        return part


def rounding(square: F32 | F64, n: int, dtype: ResultDtype) -> F64:
    """What rounding a row of n numbers to `dtype` may change in it, 2-norm, from the row's squared 2-norm."""
    relative, absolute = RESULT_UNITS[dtype]
    most: F64 = relative * np.sqrt(square, dtype=np.float64) + absolute * math.sqrt(n)
    return most


def passes(
    abr: F32, part: F32 | None, c: F32, r: F32, k: int, spread: F64 | None = None, dtype: ResultDtype = "f32"
) -> NDArray[np.bool_]:
    """Which rows (batch, m) are within 8 T for certain. `part` is `rows_part`; None: use the C part of T instead.
    `spread` (batch,) is normwise's u P, added to T where the job accepts that. `dtype`: what C was rounded to."""
    with np.errstate(all="ignore"):
        square = np.vecdot(c, c) if part is None or dtype != "f32" else None
        if part is None:
            part = square
        assert part is not None
        probes = np.abs(abr.astype(np.float64) - np.matmul(c, r))
        d = np.maximum.reduce([probes[:, :, probe] for probe in range(PROBES)])  # max(axis=2) takes longer than C R
        bound = ACCEPT * root(k) * np.sqrt(part, dtype=np.float64)
        if spread is not None:
            bound += ACCEPT * spread[:, None]
        if square is not None and dtype != "f32":
            bound += ROUNDED * rounding(square, c.shape[2], dtype) * (bound > 0)  # a zero row has to be zero
        good: NDArray[np.bool_] = np.isfinite(bound) & (d <= bound)
    zero = np.nonzero(good & (bound == 0.0))  # 0 <= 0 may be an underflow: what looks zero has to be
    good[zero] = ~c[zero].any(axis=1)
    return good


def exact_columns(bt: F32, r: F32) -> ExactColumns:
    """See ExactColumns. Not finite where B is not: float64 has room for any float32 squared."""
    batch, n, k = bt.shape
    exact = ExactColumns(np.zeros((batch, k, PROBES)), np.zeros((batch, k)), np.zeros((batch, k)))
    with np.errstate(all="ignore"):
        for entry in range(batch):
            for rows in _blocks(np.arange(n), k):
                b = bt[entry, rows].astype(np.float64)
                exact.br[entry] += b.T @ r[rows].astype(np.float64)
                exact.beta[entry] += np.square(b).sum(axis=0)
                exact.beta_subnormal[entry] += np.square(_subnormal(b)).sum(axis=0)
    np.sqrt(exact.beta, out=exact.beta)
    np.sqrt(exact.beta_subnormal, out=exact.beta_subnormal)
    return exact


def judge(
    a: F32,
    bt: F32,
    c: F32,
    r: F32,
    exact: ExactColumns,
    doubtful: NDArray[np.bool_],
    accuracy: Accuracy = "rowwise",
    dtype: ResultDtype = "f32",
) -> Verdict:
    """The rules of this module's head for the rows (batch, m) that are `doubtful`.

    Operands that are not finite, or whose product overflows float32, are nobody's fault: OPERANDS_NOT_FINITE.
    """
    fast = accuracy == "normwise"
    if not np.isfinite(exact.beta).all() or not np.isfinite(a[doubtful]).all():
        return Verdict(Check.OPERANDS_NOT_FINITE, "an operand holds NaN or infinity")
    unsure: Verdict | None = None
    for entry in np.flatnonzero(doubtful.any(axis=1)):
        columns = ExactColumns(exact.br[entry], exact.beta[entry], exact.beta_subnormal[entry])
        beside = normwise.NOTHING
        if fast:
            beside = normwise.allowance(a[entry], bt[entry], _flushed_most(a[entry], columns, len(bt[entry])))
        for rows in _blocks(np.flatnonzero(doubtful[entry]), max(a.shape[2], bt.shape[1])):
            verdict = _judge_rows(
                a[entry, rows].astype(np.float64), bt[entry], c[entry, rows], r, columns, beside, dtype
            )
            if verdict is None:
                continue
            verdict = Verdict(verdict.kind, f"batch entry {entry}, rows {rows[0]} to {rows[-1]}: {verdict.detail}")
            if verdict.kind is not Check.UNSURE:
                return verdict
            unsure = verdict
    return unsure or Verdict(Check.GOOD)


def _judge_rows(
    a: F64, bt: F32, c32: F32, r: F32, columns: ExactColumns, beside: Allowance, dtype: ResultDtype
) -> Verdict | None:
    """Rows (rows, k) of one batch entry; None: good. `beside`: what a norm-wise job allows them more."""
    if not np.isfinite(c32).all():
        return _judge_not_finite(a, bt, c32, columns.beta)
    k, n = a.shape[1], bt.shape[0]
    c = c32.astype(np.float64)
    d = np.abs(a @ columns.br - c @ r.astype(np.float64)).max(axis=1)
    part = np.square(a) @ np.square(columns.beta)
    flushed = _flushed(a, columns, n)
    square = np.square(c).sum(axis=1)
    rounded = np.where(part > 0, rounding(square, n, dtype), 0.0)
    tight = root(k) * np.sqrt(part + square) + flushed
    loose = root(k) * (np.abs(a) @ columns.beta) + flushed
    if beside == normwise.NOTHING and c[part == 0.0].any():
        return Verdict(Check.BAD, "numbers where the product is exactly zero")
    excess = d / (np.maximum(tight, loose) + beside.width + rounded)
    if (excess > ACCEPT * math.sqrt(k)).any():
        return Verdict(Check.BAD, f"the error is {excess.max():.3g} times what rounding explains (at most {ACCEPT:g})")
    allowed = ACCEPT * (tight + beside.spread) + ROUNDED * rounded
    worst_first = np.argsort(allowed / np.maximum(d, NORMAL_MIN))
    unsure = False
    for rows in _runs(worst_first[(d > allowed)[worst_first]], SETTLED_ROWS):
        beyond = _beyond(a[rows], bt, c[rows], part[rows], flushed[rows], normwise.SETTLE * beside.width, dtype)
        if (beyond > normwise.UNSURE * beside.width).any():
            return Verdict(Check.BAD, "not the product when computed again in float64")
        unsure |= len(beyond) > 0
    return Verdict(Check.UNSURE, "more rounding than a fast product is known to make") if unsure else None


def _flushed(a: F64, columns: ExactColumns, n: int) -> F64:
    """What a device that holds subnormals as 0 may change in each of these rows of C, 2-norm."""
    inputs: F64 = np.abs(_subnormal(a)) @ columns.beta + np.abs(a) @ columns.beta_subnormal
    inputs += 2 * a.shape[1] * NORMAL_MIN * math.sqrt(n)  # 2k operations, each of whose results may be flushed
    return inputs


def _flushed_most(a: F32, columns: ExactColumns, n: int) -> float:
    """The most of `_flushed` in any row of a tile's A (m, k); 0 for an empty product, which nothing changes."""
    if not columns.beta.any() or not a.any():
        return 0.0
    return max(
        float(_flushed(a[rows].astype(np.float64), columns, n).max()) for rows in _blocks(np.arange(len(a)), a.shape[1])
    )


def _beyond(a: F64, bt: F32, c: F64, part: F64, flushed: F64, allowed_anyway: float, dtype: ResultDtype = "f32") -> F64:
    """The errors (2-norm) of those of these rows of C that do not stand up to the product in float64.

    A float32 sum errs by about u times the sizes of its partial sums, which T knows only the last of. Here the largest
    is looked for, in the usual orders: one sum along k, seen at PARTS places, and 2, 4 .. LANES interleaved ones. Each
    row must be within SETTLE of the bound that it gives. A row that is not, because the terms are alike and errors add
    up, must be no worse than SETTLE times what a float32 sum along k makes of a few of its elements. An
    error up to `allowed_anyway` (2-norm of a row) needs no such explanation, and rounding to `dtype` none besides.
    """
    k = a.shape[1]
    total = np.zeros_like(c)
    peak = np.zeros(len(a))
    for place in range(PARTS):
        run = slice(k * place // PARTS, k * (place + 1) // PARTS)
        total += a[:, run] @ bt[:, run].astype(np.float64).T
        peak = np.maximum(peak, np.square(total).sum(axis=1))
    lanes = [a[:, lane::LANES] @ bt[:, lane::LANES].astype(np.float64).T for lane in range(LANES)]
    while len(lanes) > 1:
        peak = np.maximum(peak, np.max([np.square(lane).sum(axis=1) for lane in lanes], axis=0))
        half = len(lanes) // 2  # lanes i and i + half are one lane of half as many
        lanes = [one + two for one, two in zip(lanes[:half], lanes[half:], strict=True)]
    allowed = SETTLE * (root(k) * np.sqrt(part + peak) + flushed)
    off = np.abs(c - total)
    error = np.sqrt(np.square(off).sum(axis=1))
    rounded = ROUNDING_SLACK * rounding(np.square(total).sum(axis=1), len(bt), dtype)
    far = error > np.maximum(allowed, allowed_anyway) + rounded
    if far.any():
        columns = np.argsort(off[far].max(axis=0))[-SAMPLED:]
        bias = _bias(a[far], bt[columns], total[far][:, columns])
        far[far] = error[far] > allowed[far] * bias + rounded[far]
    beyond: F64 = error[far]
    return beyond


def _bias(a: F64, bt: F32, total: F64) -> F64:
    """How far a sequential float32 sum along k is off in each of these rows, in units of T; at least 1.

    The columns are those in which the device erred most: any that were chosen before could be emptied by whoever made
    the operands. Processors differ in whether a product is rounded before it is added: the worse of both counts."""
    with np.errstate(all="ignore"):
        terms = a[:, None, :] * bt.astype(np.float64)  # (rows, columns, k), exact
        separate = np.cumsum(terms.astype(np.float32), axis=2)[:, :, -1]
        fused = np.zeros(total.shape, np.float32)
        for term in np.moveaxis(terms, 2, 0):
            fused = (fused + term).astype(np.float32)
        off = np.maximum(np.abs(separate - total), np.abs(fused - total))
        unit = np.square(terms).sum(axis=2) + np.square(total)
        ratio = off / (root(a.shape[1]) * np.sqrt(unit))
    worst: F64 = np.where(np.isfinite(ratio), ratio, 1.0).max(axis=1).clip(min=1.0)
    return worst


def _judge_not_finite(a: F64, bt: F32, c: F32, beta: F64) -> Verdict:
    """C holds NaN or infinity, A and B do not. Bad, unless a sum of that very element may pass float32's range."""
    suspects = np.abs(a) @ beta >= FLOAT32_MAX  # a row's beta bounds all of its elements; hardly ever one is left
    a, c = a[suspects], c[suspects]
    for columns in _blocks(np.arange(bt.shape[0]), bt.shape[1]):
        may_overflow = np.abs(a) @ np.abs(bt[columns].astype(np.float64)).T >= FLOAT32_MAX
        if (may_overflow & ~np.isfinite(c[:, columns])).any():
            return Verdict(Check.OPERANDS_NOT_FINITE, "the operands are so large that their product overflows float32")
    return Verdict(Check.BAD, "NaN or infinity where the operands are finite")


def _subnormal(x: F64) -> F64:
    """x where float32 holds it as a subnormal, else 0."""
    return np.where(np.abs(x) < NORMAL_MIN, x, 0.0)


def _blocks(indices: NDArray[np.intp], width: int) -> list[NDArray[np.intp]]:
    """The indices in runs of rows, each at most EXACT_BYTES_MAX as float64."""
    return _runs(indices, max(1, EXACT_BYTES_MAX // (8 * width)))


def _runs(indices: NDArray[np.intp], length: int) -> list[NDArray[np.intp]]:
    return [indices[i : i + length] for i in range(0, len(indices), length)]
