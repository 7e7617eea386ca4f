"""Checks of what travels in narrower elements: operands are compared as sent, results within their own rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backend.coordinator.events import Check
from backend.verify.operand import Operand
from backend.verify.verifier import Verifier
from planner.shapes import Gemm, Rect
from tileweave.conversions import floats, panel_floats, panel_of, rounded
from tileweave.protocol.elements import WIRES, ResultDtype, Wire

F32 = NDArray[np.float32]
NARROW: list[Wire] = ["bf16", "f16", "int8"]


def sparse(g: np.random.Generator, shape: tuple[int, ...]) -> F32:
    return np.where(g.random(shape) < 0.05, g.standard_normal(shape), 0)


def uneven(g: np.random.Generator, shape: tuple[int, ...]) -> F32:
    return g.standard_normal(shape) * 2.0 ** g.integers(-12, 1, (*shape[:-1], 1))


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.floating]]] = {
    "gaussian": lambda g, s: g.standard_normal(s),
    "uniform": lambda g, s: g.random(s),
    "alike": lambda g, s: 0.5 + 0.001 * g.standard_normal(s),
    "signs": lambda g, s: g.choice([-1.0, 1.0], s),
    "alternating": lambda g, s: (1.0 + g.random(s)) * (-1.0) ** np.arange(s[-1]),
    "zeros": lambda g, s: np.zeros(s),
    "sparse": sparse,
    "uneven": uneven,
    "small": lambda g, s: g.standard_normal(s) * 1e-4,
}  # fmt: skip


def nearest(values: F32, dtype: ResultDtype) -> F32:
    """What a result of these numbers holds."""
    return floats(rounded(values, dtype), values.size, dtype).reshape(values.shape)


class Sent:
    """A GEMM's operands in a wire, open in a verifier, and its product in float32 of what was sent."""

    def __init__(self, wire: Wire, kind: str, m: int, n: int, k: int, seed: int = 0, scale: float = 1.0) -> None:
        g = np.random.default_rng(seed)
        self.elements = WIRES[wire]
        self.gemm = Gemm(1, m, n, k)
        sides = []
        for lines in (m, n):
            data = panel_of((KINDS[kind](g, (lines, k)) * scale).astype(np.float32), self.elements.panels)
            sides.append((Operand([memoryview(data)], 1, lines, k, False, self.elements.panels), data, lines))
        self.a, self.bt = (panel_floats(data, lines, k, self.elements.panels) for _, data, lines in sides)
        self.verifier = Verifier(lambda size: (seed + 1).to_bytes(size, "little"))
        self.verifier.open_gemm(1, sides[0][0], sides[1][0], self.elements.results)
        self.c = self.a @ self.bt.T

    def verdict(self, c: F32, narrow: bool = True) -> Check:
        sent = nearest(c, self.elements.results) if narrow else c
        return self.verifier.check(1, self.gemm.whole, sent[None]).kind


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 300, 40), (64, 48, 1000), (200, 16, 64)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", NARROW)
def test_honest_results_pass(wire: Wire, kind: str, shape: tuple[int, int, int]) -> None:
    for seed in range(3):
        sent = Sent(wire, kind, *shape, seed=seed)
        assert sent.verdict(sent.c) is Check.GOOD
        assert sent.verdict(sent.c, narrow=False) is Check.GOOD, "what was not rounded is nearer still"


@pytest.mark.parametrize("wire", NARROW)
def test_rounding_toward_zero_passes(wire: Wire) -> None:
    sent = Sent(wire, "gaussian", 64, 256, 512)
    dropped = {"bf16": 16, "f16": 13}[sent.elements.results]
    toward_zero = (sent.c.view(np.uint32) >> dropped << dropped).view(np.float32)
    assert sent.verdict(toward_zero, narrow=False) is Check.GOOD


LIES: dict[str, Callable[[Sent], F32]] = {
    "zeros": lambda s: np.zeros_like(s.c),
    "half of k": lambda s: s.a[:, ::2] @ s.bt[:, ::2].T,
    "transposed": lambda s: np.ascontiguousarray(s.c.T),
    "one percent more": lambda s: s.c * np.float32(1.02),
    "another step's": lambda s: Sent("f32", "gaussian", s.gemm.m, s.gemm.n, 256, seed=99).c,
    "one sign": lambda s: np.where(np.arange(s.c.size).reshape(s.c.shape) == np.abs(s.c).argmax(), -s.c, s.c),
    "operands of 4 bits": lambda s: four_bits(s.a) @ four_bits(s.bt).T,
    "NaN": lambda s: np.where(np.arange(s.c.size).reshape(s.c.shape) == 5, np.nan, s.c).astype(np.float32),
    "a row of another": lambda s: np.roll(s.c, 1, axis=0),
}


def four_bits(x: F32) -> F32:
    return ((x.view(np.uint32) + np.uint32(1 << 19)) >> 20 << 20).view(np.float32)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("wire", NARROW)
def test_lies_are_told_from_rounding(wire: Wire, lie: str) -> None:
    for seed in range(5):
        sent = Sent(wire, "gaussian", 96, 96, 256, seed=seed)
        assert sent.verdict(LIES[lie](sent)) is Check.BAD


@pytest.mark.parametrize(("wire", "unit"), [("bf16", 2**-8), ("f16", 2**-11), ("int8", 2**-8)])
def test_noise_of_several_times_the_rounding_is_caught(wire: Wire, unit: float) -> None:
    g = np.random.default_rng(3)
    for seed in range(5):
        sent = Sent(wire, "gaussian", 96, 96, 256, seed=seed)
        noise = (g.standard_normal(sent.c.shape) * unit * np.abs(sent.c).mean()).astype(np.float32)
        assert sent.verdict(sent.c + 8 * noise) is Check.BAD


def test_a_skipped_term_shows_in_f16_and_a_float32_wire_still_tells_bf16_operands() -> None:
    sent = Sent("f16", "uniform", 64, 64, 256)
    assert sent.verdict(sent.a[:, 1:] @ sent.bt[:, 1:].T) is Check.BAD
    plain = Sent("f32", "gaussian", 64, 64, 256)
    assert plain.verdict(nearest(plain.a, "bf16") @ nearest(plain.bt, "bf16").T) is Check.BAD


@pytest.mark.parametrize("wire", NARROW)
def test_operands_that_are_not_finite_blame_nobody(wire: Wire) -> None:
    elements = WIRES[wire]
    a = np.ones((4, 200), np.float32)
    a[2, 150] = np.nan
    sides = [Operand([memoryview(panel_of(x, elements.panels))], 1, 4, 200, False, elements.panels) for x in (a, a)]
    verifier = Verifier()
    verifier.open_gemm(1, sides[0], sides[1], elements.results)
    verdict = verifier.check(1, Rect(0, 1, 0, 4, 0, 4), np.full((1, 4, 4), 200, np.float32))
    assert verdict.kind is Check.OPERANDS_NOT_FINITE


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(WIRES)), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 160),
    st.booleans(), st.booleans(), st.data(),
)  # fmt: skip
def test_any_rectangle_of_any_layout_is_checked_against_its_own_part(
    wire: Wire, parts: int, m: int, n: int, k: int, a_by_k: bool, b_by_k: bool, data: st.DataObject
) -> None:
    elements = WIRES[wire]
    g = np.random.default_rng(1)
    sides, exact = [], []
    for lines, by_k in ((m, a_by_k), (n, b_by_k)):
        stored = [g.standard_normal((k, lines) if by_k else (lines, k), dtype=np.float32) for _ in range(parts)]
        sent = [panel_of(one, elements.panels) for one in stored]
        sides.append(Operand([memoryview(one) for one in sent], 1, lines, k, by_k, elements.panels))
        read = [panel_floats(one, *stored[0].shape, elements.panels) for one in sent]
        exact.append([one.T if by_k else one for one in read])
    k0 = data.draw(st.integers(0, k - 1))
    rect = Rect(0, 1, 0, m, data.draw(st.integers(0, n - 1)), n, k0, data.draw(st.integers(k0 + 1, k)))
    verifier = Verifier()
    verifier.open_gemm(1, sides[0], sides[1], elements.results)
    products = (
        a[:, rect.k0 : rect.k1].astype(np.float64) @ b[rect.n0 :, rect.k0 : rect.k1].T
        for a, b in zip(*exact, strict=True)
    )
    c = np.sum(list(products), axis=0).astype(np.float32)
    assert verifier.check(1, rect, nearest(c, elements.results)[None]).kind is Check.GOOD
    assert verifier.check(1, rect, (c * 3 + 1)[None]).kind is Check.BAD
