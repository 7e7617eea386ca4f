"""The check of jobs that accept norm-wise products: fast algorithms pass, lies do not, other jobs know none of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.coordinator.events import Check
from backend.verify import freivalds, normwise, verifier
from backend.verify.operand import Operand
from planner.shapes import Gemm
from tileweave.protocol.messages import Accuracy

F32 = NDArray[np.float32]
Make = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]
KC = 256  # terms a kernel sums at a time


def verdict(a: F32, bt: F32, c: F32, seed: int = 0, accuracy: Accuracy = "normwise") -> Check:
    """A (m, k), B^T (n, k), C (m, n) through a verifier of their own."""
    checker = verifier.Verifier(lambda size: (seed + 1).to_bytes(size, "little"))
    gemm = Gemm(1, len(a), len(bt), a.shape[1])
    checker.open_gemm(1, Operand.of(a[None]), Operand.of(bt[None]))
    return checker.check(1, gemm.whole, np.ascontiguousarray(c[None]), accuracy).kind


def blas(a: F32, b: F32) -> F32:
    with np.errstate(all="ignore"):
        return a @ b


def chains(a: F32, b: F32) -> F32:
    """Sums of KC terms in strict order, then the sum of the sums: a packed kernel's order."""
    c = np.zeros((len(a), b.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, a.shape[1], KC):
            part = np.zeros_like(c)
            for term in range(first, min(first + KC, a.shape[1])):
                part += a[:, term, None] * b[None, term]
            c += part
    return c


def strassen_winograd(a: F32, b: F32, levels: int, base: Callable[[F32, F32], F32]) -> F32:
    """7 products and 15 additions a level, in float32; a side that is odd is padded with zeros."""
    if levels == 0:
        return base(a, b)
    (m, k), n = a.shape, b.shape[1]
    a, b = np.pad(a, ((0, m % 2), (0, k % 2))), np.pad(b, ((0, k % 2), (0, n % 2)))
    (a11, a12), (a21, a22) = (np.hsplit(half, 2) for half in np.vsplit(a, 2))
    (b11, b12), (b21, b22) = (np.hsplit(half, 2) for half in np.vsplit(b, 2))
    with np.errstate(all="ignore"):
        s1, t1 = a21 + a22, b12 - b11
        s2, t2 = s1 - a11, b22 - t1
        pairs = [
            (a11, b11), (a12, b21), (a12 - s2, b22), (a22, t2 - b21), (s1, t1), (s2, t2), (a11 - a21, b22 - b12)
        ]  # fmt: skip
        p1, p2, p3, p4, p5, p6, p7 = (strassen_winograd(s, t, levels - 1, base) for s, t in pairs)
        u2 = p1 + p6
        u3 = u2 + p7
        c = np.block([[p1 + p2, u2 + p5 + p3], [u3 - p4, u3 + p5]])
    return c[:m, :n]


def every_other(size: float) -> Make:
    """Rows of `size` beside rows of 1: what a row-wise check never lets pass."""
    return lambda g, s: g.standard_normal(s) * np.where(np.arange(s[0]) % 2, size, 1.0)[:, None]


def lower_half(inner: Make, size: float) -> Make:
    """The second half of the rows are `size` times normal, so that a fast algorithm mixes them with the first."""

    def make(g: np.random.Generator, s: tuple[int, int]) -> NDArray[np.float64]:
        x = inner(g, s)
        x[s[0] // 2 :] = size * g.standard_normal((s[0] - s[0] // 2, s[1]))
        return x

    return make


KINDS: dict[str, Make] = {
    "gaussian": lambda g, s: g.standard_normal(s),
    "relu": lambda g, s: np.maximum(g.standard_normal(s), 0.0),
    "uniform": lambda g, s: g.random(s),
    "constant": lambda g, s: np.full(s, 0.3),
    "another_constant": lambda g, s: np.full(s, 0.99),
    "small_rows": every_other(1e-4),
    "tiny_rows": every_other(1e-12),
    "constant_beside_small": lower_half(lambda g, s: np.full(s, 0.3), 1e-4),
    "uniform_beside_small": lower_half(lambda g, s: g.random(s), 1e-6),
    "one_long_row": lambda g, s: g.standard_normal(s) * np.where(np.arange(s[0]) == 3, 1e4, 1.0)[:, None],
    "alternating": lambda g, s: (10.0 + g.random(s)) * (-1.0) ** np.arange(s[1]),
    "cancelling": lambda g, s: np.tile(g.standard_normal((s[0], (s[1] + 1) // 2)) * 1e3, 2)[:, : s[1]],
    "cancelled": lambda g, s: np.where(np.arange(s[1]) < s[1] // 2, 1.0, -1.0) * 0.7 * np.ones(s),
    "wide": lambda g, s: g.standard_normal(s) * 10.0 ** g.uniform(-8, 8, s),
    "lognormal": lambda g, s: np.exp(2 * g.standard_normal(s)),
    "heavy_tailed": lambda g, s: g.standard_cauchy(s),
    "sparse": lambda g, s: g.standard_normal(s) * (g.random(s) < 0.05),
    "zero_rows": lambda g, s: g.standard_normal(s) * (np.arange(s[0]) % 3 > 0)[:, None],
    "zeros": lambda g, s: np.zeros(s),
    "tiny": lambda g, s: g.standard_normal(s) * 1e-17,
    "subnormal": lambda g, s: g.standard_normal(s) * 1e-40,
    "huge": lambda g, s: g.standard_normal(s) * 1e15,
}
SHAPES = [(64, 48, 256), (96, 128, 64), (33, 47, 515), (24, 24, 2048), (128, 96, 17), (1, 40, 300), (5, 3, 1)]


def operands(kind_a: str, kind_b: str, shape: tuple[int, int, int], seed: int) -> tuple[F32, F32]:
    m, n, k = shape
    g = np.random.default_rng(seed)
    return KINDS[kind_a](g, (m, k)).astype(np.float32), KINDS[kind_b](g, (n, k)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind_a", KINDS)
def test_an_honest_product_is_good_whatever_algorithm_made_it(kind_a: str, shape: tuple[int, int, int]) -> None:
    for seed, kind_b in enumerate(KINDS):
        a, bt = operands(kind_a, kind_b, shape, seed)
        for base in (blas, chains) if shape[2] <= 515 else (blas,):
            for levels in range(3):
                found = verdict(a, bt, strassen_winograd(a, bt.T, levels, base), seed)
                assert found is Check.GOOD, (kind_b, base.__name__, levels)


def test_a_row_wise_job_refuses_what_a_norm_wise_one_accepts() -> None:
    a, bt = operands("uniform_beside_small", "gaussian", (128, 96, 256), 1)
    c = strassen_winograd(a, bt.T, 2, blas)
    assert verdict(a, bt, c) is Check.GOOD
    assert verdict(a, bt, c, accuracy="rowwise") is Check.BAD
    for accuracy in ("rowwise", "normwise"):
        assert verdict(a, bt, blas(a, bt.T), accuracy=accuracy) is Check.GOOD


@pytest.mark.parametrize("kind", ["gaussian", "relu", "small_rows", "uniform_beside_small"])
@pytest.mark.parametrize("shape", [(128, 128, 256), (64, 256, 1024)], ids=str)
def test_honest_rows_pass_the_first_stage_with_room_to_spare(
    kind: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two levels reach half of what is accepted at once: a change that eats up the margin is seen before it costs."""
    a, bt = operands(kind, "gaussian", shape, 3)
    c = strassen_winograd(a, bt.T, 2, chains)
    monkeypatch.setattr(verifier, "judge", None)  # the second stage is not reached
    assert verdict(a, bt, c) is Check.GOOD
    r = freivalds.draw(len(bt), bytes(16))
    d = np.abs(freivalds.rows_probe(a, freivalds.columns_probe(bt[None], r)[0]) - c @ r).max()
    assert d < freivalds.ACCEPT * normwise.spread(normwise.rows_size(a[None]), normwise.columns_size(bt[None]))[0]


def test_an_honest_product_of_blocks_of_one_sign_is_never_blamed() -> None:
    """Rounding errors of constant blocks all have one sign, and two levels add blocks of all signs up."""
    g = np.random.default_rng(5)
    found: list[Check] = []
    for k, blocks in [(512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4)]:
        for _ in range(40):
            signs = [np.kron(g.choice([-1, 0, 1], (blocks, blocks)), np.ones((4, k // blocks))) for _ in range(2)]
            a, bt = ((g.uniform(0.5, 1) * sign).astype(np.float32) for sign in signs)
            found += [verdict(a, bt, strassen_winograd(a, bt.T, levels, chains)) for levels in (1, 2)]
            assert verdict(a, bt, chains(a, bt.T)) is Check.GOOD
    assert Check.BAD not in found
    assert Check.UNSURE in found  # else this would not be the case meant


# ---- attacks ---------------------------------------------------------------------------------------------------------


def bf16(x: F32) -> F32:
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def wrong_at(value: float) -> Callable[[F32, F32, F32], F32]:
    def attack(a: F32, bt: F32, c: F32) -> F32:
        out = c.copy()
        out[9, 5] = value
        return out

    return attack


def noisy(level: float) -> Callable[[F32, F32, F32], F32]:
    """Noise of `level` times a typical element of C, the same on every row."""
    return lambda a, bt, c: (
        c + level * np.sqrt(np.square(c).mean()) * np.random.default_rng(5).standard_normal(c.shape)
    ).astype(np.float32)


ATTACKS: dict[str, Callable[[F32, F32, F32], F32]] = {
    "zeros": lambda a, bt, c: np.zeros_like(c),
    "a_constant": lambda a, bt, c: np.full_like(c, 0.5),
    "half_of_k": lambda a, bt, c: blas(a[:, ::2], bt[:, ::2].T),
    "one_k_skipped": lambda a, bt, c: blas(a[:, 1:], bt[:, 1:].T),
    "a_product_of_seven_left_out": lambda a, bt, c: np.vstack([c[: len(c) // 2], np.zeros_like(c[len(c) // 2 :])]),
    "transposed": lambda a, bt, c: np.ascontiguousarray(c.T),
    "rows_reversed": lambda a, bt, c: c[::-1].copy(),
    "wrong_tile": lambda a, bt, c: blas(np.roll(a, 1, axis=0), bt.T),
    "scaled": lambda a, bt, c: c * np.float32(1.0001),
    "negated": lambda a, bt, c: -c,
    "f16_rounded": lambda a, bt, c: c.astype(np.float16).astype(np.float32),
    "f16_operands": lambda a, bt, c: blas(
        a.astype(np.float16).astype(np.float32), bt.astype(np.float16).astype(np.float32).T
    ),
    "bf16_operands": lambda a, bt, c: blas(bf16(a), bf16(bt).T),
    "noise_1e-2": noisy(1e-2),
    "noise_1e-3": noisy(1e-3),
    "noise_1e-4": noisy(1e-4),
    "noise_5e-5": noisy(5e-5),
    "one_zero": wrong_at(0.0),
    "one_3e38": wrong_at(3e38),
    "one_nan": wrong_at(np.nan),
    "one_inf": wrong_at(np.inf),
    "all_3e38": lambda a, bt, c: np.full_like(c, 3e38),
    "denormals": lambda a, bt, c: np.full_like(c, 1e-40),
}


SUBTLE = {"f16_operands", "f16_rounded", "scaled", "noise_1e-4", "noise_5e-5"}  # no blame before they lie row-wise


@pytest.mark.parametrize("k", [256, 1024])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_false_product_is_refused(attack: str, k: int) -> None:
    for seed in range(5):
        a, bt = operands("gaussian", "gaussian", (64, 64, k), seed)
        for levels in (0, 2):
            c = ATTACKS[attack](a, bt, strassen_winograd(a, bt.T, levels, blas))
            found = verdict(a, bt, c, seed)
            assert found is Check.BAD or (found is Check.UNSURE and attack in SUBTLE), (seed, levels)
            assert verdict(a, bt, c, seed, "rowwise") is Check.BAD


@pytest.mark.parametrize(("kind_a", "kind_b"), [("relu", "gaussian"), ("uniform", "uniform"), ("small_rows", "relu")])
@pytest.mark.parametrize("attack", ["zeros", "half_of_k", "one_k_skipped", "wrong_tile", "bf16_operands", "noise_1e-3"])
def test_a_false_product_of_other_data_is_bad(attack: str, kind_a: str, kind_b: str) -> None:
    for seed in range(5):
        a, bt = operands(kind_a, kind_b, (64, 64, 1024), seed)
        assert verdict(a, bt, ATTACKS[attack](a, bt, blas(a, bt.T)), seed) is Check.BAD, seed


def test_what_was_sent_does_not_loosen_the_bound() -> None:
    """Huge numbers in some rows of C hide nothing, neither themselves nor noise in the others."""
    a, bt = operands("gaussian", "gaussian", (64, 64, 256), 2)
    honest = blas(a, bt.T)
    for size in (1e2, 1e10, 1e30, 3e38):
        c = noisy(1e-3)(a, bt, honest)
        c[0] = size
        assert verdict(a, bt, c) is Check.BAD


def test_bisecting_the_tolerance_gains_a_few_times_the_honest_error() -> None:
    """A device that learns from verdicts finds the largest noise that passes, against what two levels err anyway."""
    for k in (256, 1024):
        a, bt = operands("gaussian", "gaussian", (64, 64, k), 11)
        exact = a.astype(np.float64) @ bt.T.astype(np.float64)
        honest = np.sqrt(np.square(strassen_winograd(a, bt.T, 2, chains) - exact).mean())
        noise = np.random.default_rng(1).standard_normal(exact.shape)
        low, high = 0.0, 1.0
        for attempt in range(30):
            middle = (low + high) / 2
            good = verdict(a, bt, (exact + middle * noise).astype(np.float32), attempt) is Check.GOOD
            low, high = (middle, high) if good else (low, middle)
        assert low < 12 * honest, (k, low / honest, low / np.sqrt(k))


@pytest.mark.parametrize("zero", ["a", "b"])
def test_an_empty_product_must_be_exactly_zero_but_a_zero_row_need_not(zero: str) -> None:
    a, bt = operands("gaussian", "gaussian", (32, 24, 64), 1)
    (a if zero == "a" else bt)[:] = 0.0
    c = np.zeros((32, 24), np.float32)
    assert verdict(a, bt, c) is Check.GOOD
    for value in (1e-3, 1e-45):
        c[3, 4] = value
        assert verdict(a, bt, c) is Check.BAD
    a, bt = operands("zero_rows", "gaussian", (32, 24, 64), 1)
    c = strassen_winograd(a, bt.T, 2, blas)
    assert c[~a.any(axis=1)].any()  # else this would not be the case meant
    assert verdict(a, bt, c) is Check.GOOD


def test_a_gemm_is_row_wise_where_a_width_for_all_rows_would_hide_lies_or_sums_of_blocks_overflow() -> None:
    g = np.random.default_rng(0)
    for batch in (1, 3):
        a, bt = g.standard_normal((batch, 8, 16)).astype(np.float32), np.ones((batch, 4, 16), np.float32)
        assert normwise.suits(a, bt) and normwise.suits(a * np.float32(1e9), bt * np.float32(1e9))
        assert normwise.suits(0 * a, bt)
        for change in (1e4, np.nan, np.inf):
            worse = a.copy()
            worse[-1, 3] *= np.float32(change)
            assert not normwise.suits(worse, bt)
        assert normwise.suits(np.where(np.arange(8)[:, None] == 3, np.float32(0), a), bt), "zeros hide nothing"
        assert not normwise.suits(a * np.float32(1e18), bt * np.float32(1e17))
        assert not normwise.suits(a, bt * np.float32(1e37))
        assert not normwise.suits(a, np.where(np.arange(16) == 5, np.float32(np.nan), bt))


def test_lies_in_the_shortest_rows_of_a_norm_wise_gemm_are_refused() -> None:
    for seed in range(5):
        a, bt = operands("gaussian", "gaussian", (64, 64, 1024), seed)
        a[:, :] *= np.where(np.arange(64) == 3, normwise.ROWS_APART_MAX / 2, 1.0)[:, None].astype(np.float32)
        assert normwise.suits(a[None], bt[None])
        c = blas(a, bt.T)
        for attack in ("zeros", "bf16_operands", "half_of_k", "noise_1e-3"):
            lie = ATTACKS[attack](a, bt, c)
            lie[3] = c[3]
            assert verdict(a, bt, lie, seed) is not Check.GOOD, attack


def test_operands_that_are_not_finite_are_nobodys_fault_norm_wise_too() -> None:
    a, bt = operands("gaussian", "gaussian", (32, 24, 64), 1)
    a[5, 6] = np.nan
    assert verdict(a, bt, strassen_winograd(a, bt.T, 1, blas)) is Check.OPERANDS_NOT_FINITE
    sizes = normwise.rows_size(np.full((1, 4, 4), 1e30, np.float32))
    assert not freivalds.passes(
        np.zeros((1, 1, 2), np.float32), None, np.ones((1, 1, 1), np.float32), np.ones((1, 2), np.float32), 4, sizes
    ).any(), "a width that overflowed lets nothing pass"
