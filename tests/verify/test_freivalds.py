"""The check itself: honest products of many kinds of data pass, each known way to cheat does not.

A trial draws R from a seed of its own, so that a failure is replayed by its parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.coordinator.events import Check
from backend.verify import freivalds

F32 = NDArray[np.float32]
Make = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def verdict(a: F32, bt: F32, c: F32, seed: int = 0) -> freivalds.Verdict:
    """Both stages, as the verifier runs them."""
    r = freivalds.draw(bt.shape[1], seed.to_bytes(16, "little"))
    part = freivalds.rows_part(a, freivalds.columns_norms(bt)) if bt.shape[2] < bt.shape[1] else None
    good = freivalds.passes(freivalds.rows_probe(a, freivalds.columns_probe(bt, r)), part, c, r, a.shape[2])
    if good.all():
        return freivalds.Verdict(Check.GOOD)
    return freivalds.judge(a, bt, c, r, freivalds.exact_columns(bt, r), ~good)


def sequential(a: F32, bt: F32) -> F32:
    """The product in strict order of k, every operation rounded to float32."""
    c = np.zeros((a.shape[0], a.shape[1], bt.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for term in range(a.shape[2]):
            c += a[:, :, term, None] * bt[:, None, :, term]
    return c


def blas(a: F32, bt: F32) -> F32:
    with np.errstate(all="ignore"):
        return np.matmul(a, bt.transpose(0, 2, 1))


def interleaved(a: F32, bt: F32) -> F32:
    """A kernel that sums along k in 16 lanes."""
    lanes = [sequential(a[:, :, lane::16], bt[:, :, lane::16]) for lane in range(min(16, a.shape[2]))]
    with np.errstate(all="ignore"):
        return np.sum(lanes, axis=0, dtype=np.float32)


def flushing(a: F32, bt: F32) -> F32:
    """A device that reads and writes subnormals as zero."""

    def flush(x: F32) -> F32:
        return np.where(np.abs(x) < freivalds.NORMAL_MIN, np.float32(0), x)

    return flush(blas(flush(a), flush(bt)))


def cancelling(g: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Large numbers in pairs that cancel, so that sums are far smaller than their terms."""
    half = g.standard_normal((*shape[:-1], (shape[-1] + 1) // 2)) * 1e3
    return np.concatenate([half, -half], axis=-1)[..., : shape[-1]] + g.standard_normal(shape) * 1e-2


def alternating(g: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Signs alternate along k: a sum along k stays small, interleaved sums do not."""
    return (10.0 + g.random(shape)) * (-1.0) ** np.arange(shape[-1])


def zero_rows(g: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    x = g.standard_normal(shape)
    x[:, ::3] = 0.0
    return x


KINDS: dict[str, Make] = {
    "gaussian": lambda g, s: g.standard_normal(s),
    "uniform": lambda g, s: g.random(s),
    "ones": lambda g, s: np.ones(s),
    "integers": lambda g, s: g.integers(-8, 9, s).astype(np.float64),
    "sparse": lambda g, s: g.standard_normal(s) * (g.random(s) < 0.05),
    "zeros": lambda g, s: np.zeros(s),
    "constant": lambda g, s: np.full(s, 0.3),
    "another_constant": lambda g, s: np.full(s, 0.99),
    "alternating": alternating,
    "zero_rows": zero_rows,
    "wide": lambda g, s: g.standard_normal(s) * 10.0 ** g.uniform(-8, 8, s),
    "wide_rows": lambda g, s: g.standard_normal(s) * 10.0 ** g.uniform(-12, 12, (*s[:-1], 1)),
    "cancelling": cancelling,
    "tiny": lambda g, s: g.standard_normal(s) * 1e-17,
    "vanishing": lambda g, s: g.standard_normal(s) * 1e-24,
    "huge": lambda g, s: g.standard_normal(s) * 1e17,
    "subnormal": lambda g, s: g.standard_normal(s) * 1e-40,
    "heavy_tailed": lambda g, s: g.standard_cauchy(s),
}
SHAPES = [(1, 48, 40, 16), (1, 33, 65, 100), (3, 17, 8, 64), (8, 16, 16, 1), (1, 24, 24, 1024), (1, 12, 12, 4096)]


def operands(kind_a: str, kind_b: str, shape: tuple[int, int, int, int], seed: int) -> tuple[F32, F32]:
    batch, m, n, k = shape
    g = np.random.default_rng(seed)
    a, bt = KINDS[kind_a](g, (batch, m, k)), KINDS[kind_b](g, (batch, n, k))
    return a.astype(np.float32), bt.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind_a", KINDS)
def test_an_honest_product_is_good(kind_a: str, shape: tuple[int, int, int, int]) -> None:
    for seed, kind_b in enumerate(KINDS):
        a, bt = operands(kind_a, kind_b, shape, seed)
        for product in (blas, sequential, interleaved, flushing):
            found = verdict(a, bt, product(a, bt), seed)
            assert found.kind is Check.GOOD, (kind_a, kind_b, shape, product.__name__, found)


@pytest.mark.parametrize("shape", [(1, 2048, 8, 512), (1, 256, 256, 2048), (16, 64, 64, 32)], ids=str)
def test_honest_rows_stay_within_two_thirds_of_what_is_accepted(shape: tuple[int, int, int, int]) -> None:
    """The margin between honest rounding and the limit, so that a change which eats it up is seen before it blames."""
    a, bt = operands("gaussian", "gaussian", shape, 7)
    c = blas(a, bt)
    r = freivalds.draw(shape[2], bytes(16))
    d = np.abs(freivalds.rows_probe(a, freivalds.columns_probe(bt, r)) - np.matmul(c, r)).max(axis=2)
    norms = np.sqrt(freivalds.rows_part(a, freivalds.columns_norms(bt)))
    assert (d / (freivalds.root(shape[3]) * norms)).max() < freivalds.ACCEPT * 2 / 3


def test_rows_that_cancel_are_settled_by_recomputation_and_lies_in_them_are_found() -> None:
    a, bt = operands("cancelling", "ones", (1, 32, 48, 1024), 3)
    c = sequential(a, bt)
    r = freivalds.draw(48, bytes(16))
    passed = freivalds.passes(freivalds.rows_probe(a, freivalds.columns_probe(bt, r)), None, c, r, 1024)
    assert not passed.all()  # else this would not be the case meant
    assert verdict(a, bt, c).kind is Check.GOOD
    c[0, 9, 5] += np.float32(20.0)  # beside terms of 1000
    for seed in range(10):
        found = verdict(a, bt, c, seed)
        assert found.kind is Check.BAD and "computed again" in found.detail


@pytest.mark.parametrize("pattern", ["halves", "alternating"])
def test_one_column_whose_partial_sums_are_large_does_not_get_an_honest_device_blamed(pattern: str) -> None:
    """All of the error sits in a column that no sample need hit: it is explained by the partial sums alone."""
    k = 2**15
    g = np.random.default_rng(8)
    sign = np.where(np.arange(k) < k // 2, 1.0, -1.0) if pattern == "halves" else (-1.0) ** np.arange(k)
    a = (sign * (10.0 + g.random((1, 16, k)))).astype(np.float32)
    bt = (1e-6 * g.standard_normal((1, 64, k))).astype(np.float32)
    bt[0, 5] = g.random(k)
    if pattern == "halves":
        c = sequential(a, bt)
    else:
        c = sequential(a[:, :, ::2], bt[:, :, ::2]) + sequential(a[:, :, 1::2], bt[:, :, 1::2])
    r = freivalds.draw(64, bytes(16))
    exact = freivalds.exact_columns(bt, r)
    d = np.abs(a[0].astype(np.float64) @ exact.br[0] - c[0].astype(np.float64) @ r).max(axis=1)
    part = np.square(a[0].astype(np.float64)) @ np.square(exact.beta[0])
    tight = freivalds.root(k) * np.sqrt(part + np.square(c[0].astype(np.float64)).sum(axis=1))
    assert (d > freivalds.ACCEPT * tight).any()  # else this would not be the case meant
    assert verdict(a, bt, c).kind is Check.GOOD
    c[0, :, 5] *= np.float32(1.01)
    assert verdict(a, bt, c).kind is Check.BAD


def fused(a: F32, bt: F32) -> F32:
    """The product in strict order of k, multiply and add rounded once, as processors do that fuse them."""
    c = np.zeros((a.shape[0], a.shape[1], bt.shape[1]), np.float32)
    for term in range(a.shape[2]):
        c = (c + a[:, :, term, None].astype(np.float64) * bt[:, None, :, term]).astype(np.float32)
    return c


def _columns(kept: str) -> NDArray[np.bool_]:
    column = np.arange(64)
    named = {"each ninth": column % 9 == 0, "odd": column % 2 == 1, "one": column == 29}
    return named[kept] if kept in named else ~named["each ninth"]


@pytest.mark.parametrize("kept", ["all but each ninth", "each ninth", "odd", "one"])
@pytest.mark.parametrize("product", [sequential, fused])
def test_whoever_empties_columns_does_not_get_an_honest_device_blamed(
    kept: str, product: Callable[[F32, F32], F32]
) -> None:
    """A long sum of equal terms is explained by what rounding makes of such a sum, wherever in the row it lies: here
    all columns but those `kept` hold one number only."""
    for seed in range(6):
        first, second = np.random.default_rng(seed).uniform(0.5, 1, 2)
        a, bt = np.full((1, 16, 4096), first, np.float32), np.zeros((1, 64, 4096), np.float32)
        bt[0, _columns(kept)] = second
        bt[0, :, 0] = second
        c = product(a, bt)
        assert verdict(a, bt, c, seed).kind is Check.GOOD
        assert verdict(a, bt, c * np.float32(1.001), seed).kind is Check.BAD


# ---- attacks ---------------------------------------------------------------------------------------------------------


def rounded_to_bf16(x: F32) -> F32:
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )


def block_copied(c: F32) -> F32:
    out = c.copy()
    out[:, : c.shape[1] // 2] = c[:, c.shape[1] // 2 :][:, : c.shape[1] // 2]
    return out


def one_element(value: float) -> Callable[[F32, F32, F32], F32]:
    def attack(a: F32, bt: F32, c: F32) -> F32:
        out = c.copy()
        out[-1, 5, 7] = value
        return out

    return attack


def equal_and_opposite(a: F32, bt: F32, c: F32) -> F32:
    """What a +-1 vector misses half the time."""
    out = c.copy()
    out[0, 3, 2] += np.float32(1.0)
    out[0, 3, 9] -= np.float32(1.0)
    return out


def one_sign(a: F32, bt: F32, c: F32) -> F32:
    out = c.copy()
    at = np.unravel_index(np.argmax(np.abs(out)), out.shape)
    out[at] = -out[at]
    return out


def noisy(level: float) -> Callable[[F32, F32, F32], F32]:
    def attack(a: F32, bt: F32, c: F32) -> F32:
        return (c * (1 + level * np.random.default_rng(5).standard_normal(c.shape))).astype(np.float32)

    return attack


ATTACKS: dict[str, Callable[[F32, F32, F32], F32]] = {
    "zeros": lambda a, bt, c: np.zeros_like(c),
    "a_constant": lambda a, bt, c: np.full_like(c, 0.5),
    "mean": lambda a, bt, c: np.full_like(c, c.mean()),
    "block_copied": lambda a, bt, c: block_copied(c),
    "half_of_k": lambda a, bt, c: blas(a[:, :, ::2], bt[:, :, ::2]),
    "first_half_of_k": lambda a, bt, c: blas(a[:, :, :512], bt[:, :, :512]),
    "one_k_skipped": lambda a, bt, c: blas(a[:, :, 1:], bt[:, :, 1:]),
    "transposed": lambda a, bt, c: np.ascontiguousarray(c.transpose(0, 2, 1)),
    "rows_reversed": lambda a, bt, c: np.ascontiguousarray(c[:, ::-1]),
    "wrong_tile": lambda a, bt, c: blas(np.roll(a, 1, axis=1), bt),
    "another_step": lambda a, bt, c: blas(a * np.float32(1.0001), bt),
    "scaled": lambda a, bt, c: c * np.float32(1.001),
    "doubled": lambda a, bt, c: c * np.float32(2.0),
    "negated": lambda a, bt, c: -c,
    "f16_rounded": lambda a, bt, c: c.astype(np.float16).astype(np.float32),
    "bf16_rounded": lambda a, bt, c: rounded_to_bf16(c),
    "bf16_operands": lambda a, bt, c: blas(rounded_to_bf16(a), rounded_to_bf16(bt)),
    "noise_1e-2": noisy(1e-2),
    "noise_1e-3": noisy(1e-3),
    "noise_1e-4": noisy(1e-4),
    "noise_3e-5": noisy(3e-5),
    "equal_and_opposite": equal_and_opposite,
    "one_sign": one_sign,
    "one_3e38": one_element(3e38),
    "one_nan": one_element(np.nan),
    "one_inf": one_element(np.inf),
    "one_minus_inf": one_element(-np.inf),
    "one_zero": one_element(0.0),
    "all_3e38": lambda a, bt, c: np.full_like(c, 3e38),
    "all_nan": lambda a, bt, c: np.full_like(c, np.nan),
    "denormals": lambda a, bt, c: np.full_like(c, 1e-40),
    "uninitialised": lambda a, bt, c: (
        np.random.default_rng(9).integers(0, 2**32, c.shape, dtype=np.uint32).view(np.float32)
    ),
}


@pytest.mark.parametrize("shape", [(1, 48, 48, 1024), (4, 32, 32, 1024)], ids=str)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_false_product_is_bad(attack: str, shape: tuple[int, int, int, int]) -> None:
    for seed in range(10):
        a, bt = operands("gaussian", "gaussian", shape, seed)
        c = ATTACKS[attack](a, bt, blas(a, bt))
        assert verdict(a, bt, c, seed).kind is Check.BAD, seed


@pytest.mark.parametrize("direction", ["noise", "scale", "constant"])
def test_bisecting_the_tolerance_gains_no_more_than_rounding(direction: str) -> None:
    """A device that learns from verdicts finds the largest error that passes: it is not worth having."""
    a, bt = operands("gaussian", "gaussian", (1, 48, 48, 256), 11)
    c = blas(a, bt)
    errors = {"noise": np.random.default_rng(1).standard_normal(c.shape), "scale": c / np.abs(c).std()}
    error = errors.get(direction, np.ones_like(c)) * np.abs(c).std()
    low, high = 0.0, 1.0
    for attempt in range(30):
        middle = (low + high) / 2
        good = verdict(a, bt, (c + middle * error).astype(np.float32), attempt).kind is Check.GOOD
        low, high = (middle, high) if good else (low, middle)
    assert low < 1e-5


@pytest.mark.parametrize("shape", [(2, 64, 64, 16), (1, 96, 32, 256)], ids=str)
@pytest.mark.parametrize(
    "attack", ["zeros", "half_of_k", "one_k_skipped", "f16_rounded", "noise_1e-4", "one_3e38", "one_nan"]
)
def test_a_false_product_is_bad_where_the_a_part_is_the_smaller_half_too(
    attack: str, shape: tuple[int, int, int, int]
) -> None:
    for seed in range(10):
        a, bt = operands("gaussian", "gaussian", shape, seed)
        assert verdict(a, bt, ATTACKS[attack](a, bt, blas(a, bt)), seed).kind is Check.BAD, seed


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e5, 1e12])
def test_scale_does_not_hide_a_lie(scale: float) -> None:
    a, bt = operands("gaussian", "gaussian", (1, 32, 32, 64), 1)
    a *= np.float32(scale)
    for attack in ("zeros", "half_of_k", "noise_1e-3", "one_sign", "denormals"):
        assert verdict(a, bt, ATTACKS[attack](a, bt, blas(a, bt))).kind is Check.BAD, attack


@pytest.mark.parametrize("value", [1e-3, 1e-20, 1e-38, 1e-45, -1e-45])
@pytest.mark.parametrize("shape", [(1, 8, 16, 4), (1, 8, 4, 16)], ids=str)
def test_a_row_whose_product_is_zero_must_be_exactly_zero(value: float, shape: tuple[int, int, int, int]) -> None:
    a, bt = operands("gaussian", "gaussian", shape, 2)
    a[0, 3] = 0.0
    c = blas(a, bt)
    assert verdict(a, bt, c).kind is Check.GOOD
    c[0, 3, 1] = value
    for seed in range(10):
        assert verdict(a, bt, c, seed).kind is Check.BAD


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["a", "bt"])
@pytest.mark.parametrize("honest", [True, False])
def test_operands_that_are_not_finite_are_nobodys_fault(value: float, which: str, honest: bool) -> None:
    for shape in [(2, 8, 16, 4), (2, 8, 4, 16)]:
        a, bt = operands("gaussian", "gaussian", shape, 2)
        (a if which == "a" else bt)[1, 2, 3] = value
        c = blas(a, bt) if honest else np.zeros((2, 8, shape[2]), np.float32)
        assert verdict(a, bt, c).kind is Check.OPERANDS_NOT_FINITE


def test_a_product_that_overflows_float32_is_nobodys_fault_but_infinity_elsewhere_is() -> None:
    a, bt = operands("gaussian", "gaussian", (1, 8, 8, 16), 4)
    a[0, 2] = 1e30
    bt[0, 5] = 1e10
    c = blas(a, bt)
    assert np.isinf(c[0, 2, 5]) and np.isfinite(np.delete(c[0], 2, axis=0)).all()
    found = verdict(a, bt, c)
    assert found.kind is Check.OPERANDS_NOT_FINITE and "overflows" in found.detail
    a[0, 2] = 1.0
    assert verdict(a, bt, c).kind is Check.BAD


def test_products_at_the_edge_of_float32_are_judged_not_feared() -> None:
    """BR and CR overflow float32 here although the product does not."""
    a, bt = operands("gaussian", "gaussian", (1, 16, 64, 16), 6)
    bt *= np.float32(1e37)
    c = blas(a, bt)
    assert np.isfinite(c).all() and np.abs(c).max() > 1e38
    assert verdict(a, bt, c).kind is Check.GOOD
    c[0, 4, 4] *= np.float32(1.01)
    assert verdict(a, bt, c).kind is Check.BAD


def test_the_detail_says_where_and_how_much() -> None:
    a, bt = operands("gaussian", "gaussian", (2, 8, 8, 16), 0)
    c = blas(a, bt)
    c[1, 3] += np.float32(1.0)
    assert verdict(a, bt, c).detail.startswith("batch entry 1, rows 3 to 3: the error is ")


def test_r_is_gaussian_and_differs_by_seed() -> None:
    r = freivalds.draw(50_000, b"0123456789abcdef")
    assert r.dtype == np.float32 and r.shape == (50_000, freivalds.PROBES)
    assert abs(r.mean()) < 0.02 and abs(r.std() - 1.0) < 0.02
    assert abs(np.corrcoef(r.T)[0, 1]) < 0.02
    assert not (r[:10] == freivalds.draw(10, b"0123456789abcdeg")).any()
