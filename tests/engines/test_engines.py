"""One suite over all engines, in a real browser: any product against float64, and the life of panels and tiles.

Hypothesis draws a case, the page of suite.js computes and judges it; a failing case is printed as the order that
reproduces it. The bounds are in suite_exact.js. Pure Python is three orders slower than the rest and gets small shapes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KERNELS = ["wasm-relaxed", "wasm-strict", "wasm-scalar", "webgpu", "pyodide", "python"]
BYTES_MAX = 128 << 20
DTYPES = ["f32", "bf16", "f16", "i8"]
LAYOUTS = ["along", "across", "both"]
PLAIN = {"dtype": "f32", "layout": "along", "gap": 0, "offset": 0, "scale": 1.0, "uneven": False}
WHOLE = {**PLAIN, "whole": True}
EDGES = [
    (1, 1, 1),
    (31, 32, 33),
    (33, 31, 32),
    (1, 384, 257),
    (257, 1, 384),
    (5, 8, 4),
    (7, 3, 600),
    (61, 520, 70),
    (121, 1030, 129),
    (499, 500, 513),
    (3, 2, 70001),  # more than a GPU's limit of 65535 in each direction
    (70001, 2, 3),
    (2, 70001, 3),
]
SMALL_EDGES = [(1, 1, 1), (7, 9, 8), (9, 7, 129), (1, 40, 33), (40, 1, 33), (3, 2, 300), (2, 1, 5000)]


@pytest.fixture(scope="module", params=KERNELS)
def engine(request, open_suite):
    with open_suite(request.param, bytes_max=BYTES_MAX) as suite:
        yield suite


def slow(engine) -> bool:
    return engine.kernel == "python"


def order(m: int, n: int, k: int, **changes: Any) -> dict[str, Any]:
    """A product; plain operands, seed 1 and no extras until told otherwise."""
    values = {"a": PLAIN, "b": PLAIN, "c_gap": 0, "accumulate": False, "bias": False, "specials": [], "seed": 1}
    return {"m": m, "n": n, "k": k, "accuracy": "rowwise", **values, **changes}


descriptions = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(LAYOUTS),
        "gap": st.integers(0, 5),
        "offset": st.integers(0, 5),
        "uneven": st.booleans(),
    }
)


@st.composite
def orders(draw, side_max: int, k_max: int, size_max: int) -> dict[str, Any]:
    """Any product of at most `size_max` terms in all."""
    m, n = draw(st.integers(1, side_max)), draw(st.integers(1, side_max))
    k = draw(st.integers(1, min(k_max, size_max // (m * n))))
    scales = {"a": [1.0, 1e-20, 1e18], "b": [1.0, 1e-6, 1e6]}
    operands = {name: {**draw(descriptions), "scale": draw(st.sampled_from(scales[name]))} for name in scales}
    extras = {"c_gap": draw(st.integers(0, 5)), "accumulate": draw(st.booleans()), "bias": draw(st.booleans())}
    return order(m, n, k, **operands, **extras, seed=draw(st.integers(0, 2**31 - 1)))


def test_any_product(engine) -> None:
    limits = (24, 300, 20_000) if slow(engine) else (140, 600, 2_000_000)

    @settings(max_examples=60 if slow(engine) else 150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(orders(*limits))
    def agrees(case: dict[str, Any]) -> None:
        engine.check("product", **case)

    agrees()


@st.composite
def sums(draw, side_max: int, k_max: int, size_max: int) -> dict[str, Any]:
    """Any tile: a sum of terms out of parts of panels, by lines or by k, in any elements."""
    m, n = draw(st.integers(1, side_max)), draw(st.integers(1, side_max))
    count = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 3)) if count == 1 else 1
    a_by_k, b_by_k = draw(st.booleans()), draw(st.booleans())
    terms, panels = [], []
    for index in range(count):
        k = draw(st.integers(1, max(1, min(k_max, size_max // (m * n * batch * count)))))
        term: dict[str, Any] = {"k": k}
        for side, lines, by_k in (("a", m, a_by_k), ("b", n, b_by_k)):
            row, column = draw(st.integers(0, 5)), draw(st.sampled_from([0, 0, 1, 3, 128]))
            height, width = (k, lines) if by_k else (lines, k)
            name = f"any.{index}.{side}"
            more = draw(st.integers(0, 3))
            panels.append({
                "id": name, "dtype": draw(st.sampled_from(DTYPES)), "rows": row + batch * height + more,
                "columns": column + width + more,
            })  # fmt: skip
            term |= {side: name, f"{side}Row": row, f"{side}Column": column}
        terms.append(term)
    return {
        "batch": batch, "m": m, "n": n, "aByK": a_by_k, "bByK": b_by_k, "terms": terms, "panels": panels,
        "dtype": draw(st.sampled_from(["f32", "bf16", "f16"])),
        "accuracy": draw(st.sampled_from(["rowwise", "normwise"])), "seed": draw(st.integers(1, 1000)),
    }  # fmt: skip


def test_any_sum_of_terms(engine) -> None:
    limits = (12, 60, 6_000) if slow(engine) else (70, 300, 400_000)

    @settings(max_examples=30 if slow(engine) else 120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sums(*limits))
    def agrees(case: dict[str, Any]) -> None:
        engine.check("anyTile", **case)

    agrees()


def test_the_engine_is_the_one_that_was_asked_for(engine) -> None:
    assert engine.opened["kernel"] == engine.kernel
    assert engine.opened["depth"] in (1, 2)


def test_either_side_of_every_block(engine) -> None:
    for shape in SMALL_EDGES if slow(engine) else EDGES:
        engine.check("product", **order(*shape, a=WHOLE, b=WHOLE))
        engine.check("product", **order(*shape, accumulate=True, bias=True, c_gap=3))


def test_every_pair_of_types_in_every_pair_of_layouts(engine) -> None:
    shape = (3, 5, 130) if slow(engine) else (17, 21, 270)
    for types, layouts in itertools.product(itertools.product(DTYPES, repeat=2), itertools.product(LAYOUTS, repeat=2)):
        a, b = ({**PLAIN, "dtype": t, "layout": layout, "gap": 1} for t, layout in zip(types, layouts, strict=True))
        engine.check("product", **order(*shape, a=a, b=b, bias=True))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_not_finite_reaches_exactly_what_depends_on_it(engine, dtype: str, value: str) -> None:
    m, n, k = (6, 7, 37) if slow(engine) else (13, 19, 277)
    a, b = {**PLAIN, "dtype": dtype}, {**PLAIN, "dtype": dtype, "layout": "across"}
    for along in (0, k - 1):
        for special in ({"in": "a", "line": m - 2, "l": along}, {"in": "b", "line": n - 1, "l": along}):
            specials = [{**special, "value": value}]
            engine.check("product", **order(m, n, k, a=a, b=b, specials=specials))
    for special in ({"in": "c", "line": 2, "l": n - 1}, {"in": "bias", "line": 0, "l": 3}):
        specials = [{**special, "value": value}]
        engine.check("product", **order(m, n, k, a=a, b=b, accumulate=True, bias=True, specials=specials))


@pytest.mark.parametrize(("a", "b"), [(0.7, 0.9), (0.62, 0.81), (0.97, 0.53)])
def test_long_sums_are_chains_of_256(engine, a: float, b: float) -> None:
    """One chain of 4096 equal terms errs by 5e-6 of its sum and more, sums of chains of 256 by 2.5e-6 at most."""
    assert engine.call("alike", m=3, n=5, k=4096, a=a, b=b) < 3e-6


LARGE = {"m": 1031, "n": 1025, "k": 1030}


def test_large_products_by_the_norm(engine) -> None:
    shape = {"m": 20, "n": 21, "k": 50} if slow(engine) else LARGE
    engine.check("product", **order(**shape, accuracy="normwise", step=9))
    engine.check("tile", **shape, batch=1, accuracy="normwise", step=9, seed=7)


def test_opposed_infinities_make_nan(engine) -> None:
    specials = [{"in": "a", "line": 1, "l": 0, "value": "inf"}, {"in": "a", "line": 1, "l": 9, "value": "-inf"}]
    engine.check("product", **order(4, 5, 20, specials=specials))


@pytest.mark.parametrize("kernel", ["wasm-relaxed", "wasm-strict", "pyodide"])
def test_accuracy_by_the_norm_takes_the_fast_algorithm_and_by_the_row_does_not(open_suite, kernel: str) -> None:
    with open_suite(kernel, bytes_max=BYTES_MAX) as engine:
        rowwise, normwise = order(**LARGE), order(**LARGE, accuracy="normwise")
        assert engine.call("sameBits", orders=[rowwise, rowwise]) == ""
        assert engine.call("sameBits", orders=[rowwise, normwise]) != ""
        engine.check("product", **order(**LARGE, a={**PLAIN, "uneven": True}, step=9))


def test_strict_gives_the_same_bits_in_every_layout(open_suite) -> None:
    with open_suite("wasm-strict", bytes_max=BYTES_MAX) as engine:
        laid = [{**PLAIN, "layout": layout, "gap": 2, "offset": 1} for layout in LAYOUTS]
        for a, b in itertools.product(laid, repeat=2):
            engine.check("sameBits", orders=[order(47, 53, 301), order(47, 53, 301, a=a, b=b)])


tiles = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 5),
        "m": st.integers(1, 70),
        "n": st.integers(1, 70),
        "k": st.integers(1, 200),
        "offset": st.sampled_from([0, 4, 8]),
        "scale": st.sampled_from([1.0, 1e-20, 1e18]),
        "uneven": st.booleans(),
        "accuracy": st.sampled_from(["rowwise", "normwise"]),
        "poison": st.booleans(),
        "seed": st.integers(0, 2**31 - 1),
    }
)
small_tiles = tiles.map(lambda t: {**t, "m": t["m"] % 9 + 1, "n": t["n"] % 9 + 1, "k": t["k"] % 40 + 1})


def test_any_tile(engine) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(small_tiles if slow(engine) else tiles)
    def agrees(case: dict[str, Any]) -> None:
        engine.check("tile", **case)

    agrees()


def test_a_large_batch_of_small_products(engine) -> None:
    """Padded to whole strips of lines all at once they would take several times the memory that there is."""
    if not slow(engine):
        engine.check("tile", batch=16384, m=4, n=4, k=16, seed=11)


def test_a_product_of_nothing_is_refused(engine) -> None:
    engine.check("empty")


TILE = {"batch": 2, "m": 7, "n": 9, "k": 33, "seed": 5}


def test_tiles_in_flight_keep_their_own_products(engine) -> None:
    shapes = [TILE, {**TILE, "batch": 1, "m": 40}, {**TILE, "k": 5}, {**TILE, "batch": 3, "n": 1}]
    engine.check("inFlight", rounds=5, shapes=shapes, seed=3)


def test_missing_panel(engine) -> None:
    engine.check("missingPanel", **TILE)


def test_panel_without_room_is_lost_and_the_engine_goes_on(engine) -> None:
    engine.check("noRoom", **TILE, bytes_max=BYTES_MAX)


def test_product_without_room_fails_alone(engine) -> None:
    engine.check("noRoomForProduct", **TILE, bytes_max=BYTES_MAX)
