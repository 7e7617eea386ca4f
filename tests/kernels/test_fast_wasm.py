"""The fast product (fast.c) under wasmtime: exact on small integers, norm-wise else, inside its memory, Node's bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wasmtime import Engine, Module

BUILDS = ("relaxed", "strict")
UNIT_ROUNDOFF = 2.0**-24
GROWTH = 80  # of fast.c's first comment
PACKED_BYTES_MAX = 2 << 20
GUARD = 0xA5


class Kernel:
    """One instance of a module (conftest.py). Its memory is refilled with GUARD before each product."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded
        self.store, self.exports, self.start = loaded.store, loaded.exports, loaded.start

    def scratch_bytes(self, m: int, n: int, k: int) -> int:
        return int(self.exports["gemm_fast_scratch_bytes"](self.store, m, n, k))

    def multiply(self, a: np.ndarray, bt: np.ndarray, pad: int = 0) -> np.ndarray:
        """A B by the kernel, or by gemm() where it says that the fast product does not apply."""
        (m, k), n = a.shape, bt.shape[0]
        heap = self.loaded.heap()
        heap[self.start :] = GUARD
        at, places, views = self.start, [], []
        for rows, width in ((m, k), (n, k), (m, n)):
            view = heap[at : at + 4 * rows * (width + pad)].view(np.float32).reshape(rows, width + pad)
            places += [at, width + pad]
            views.append(view)
            at = -(-(at + view.nbytes + 64) // 16) * 16
        views[0][:, :k], views[1][:, :k] = a, bt
        before = heap[self.start : at].copy()
        scratch = self.scratch_bytes(m, n, k)
        assert scratch > 0, "the fast product does not apply"
        assert at + scratch < len(heap), "the tests' memory is too small"
        self.exports["gemm_fast"](self.store, m, n, k, *places, at)
        assert (heap[at + scratch :] == GUARD).all(), "wrote beyond its scratch"
        product = views[2][:, :n].copy()
        views[2][:, :n] = np.full(4, GUARD, np.uint8).view(np.float32)
        assert np.array_equal(heap[self.start : at], before), "wrote beside C"
        return product


@pytest.fixture(scope="module")
def kernels(modules: dict[str, bytes], load: Callable[[bytes, int], Any]) -> dict[str, Kernel]:
    return {name: Kernel(load(modules[name], 600)) for name in BUILDS}


@pytest.fixture(params=BUILDS)
def kernel(request: pytest.FixtureRequest, kernels: dict[str, Kernel]) -> Kernel:
    return kernels[request.param]


def integers(m: int, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Small enough for every sum on the way to be exact in float32."""
    random = np.random.default_rng(seed)
    return tuple(random.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (n, k)))  # type: ignore[return-value]


def product(a: np.ndarray, bt: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ bt.astype(np.float64).T


def line_norm_max(lines: np.ndarray) -> float:
    return float(np.linalg.norm(lines.astype(np.float64), axis=1).max())


def assert_close(got: np.ndarray, a: np.ndarray, bt: np.ndarray) -> None:
    bound = GROWTH * UNIT_ROUNDOFF * line_norm_max(a) * line_norm_max(bt)
    assert np.abs(got - product(a, bt)).max() <= bound


near_one_level = st.one_of(st.integers(192, 220), st.integers(236, 262))


@settings(max_examples=40, deadline=None)
@given(m=near_one_level, n=near_one_level, k=near_one_level, pad=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_one_level_is_exact_on_small_integers(
    kernels: dict[str, Kernel], m: int, n: int, k: int, pad: int, seed: int
) -> None:
    a, bt = integers(m, n, k, seed)
    for kernel in kernels.values():
        assert np.array_equal(kernel.multiply(a, bt, pad), product(a, bt))


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (768, 768, 256),
        (769, 800, 257),
        (791, 799, 271),
        (775, 769, 300),
        (780, 1100, 256),  # more columns in a quarter than a packed block has
        (768, 768, 2180),  # more of k in a quarter than a packed block has
        (200, 1100, 1100),  # one level, beyond the packed blocks
        (767, 192, 256),
        (192, 767, 255),
    ],
)
def test_either_side_of_levels_and_blocks(kernel: Kernel, m: int, n: int, k: int) -> None:
    a, bt = integers(m, n, k, seed=m + n + k)
    assert np.array_equal(kernel.multiply(a, bt, pad=3), product(a, bt))


def kinds(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(m + n + k)
    a, bt = (random.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k)))
    outliers = np.where(random.random((m, k)) < 1e-4, a * np.float32(1000), a)
    half = k // 2
    return {
        "normal": (a, bt),
        "one sign": (np.abs(a), np.abs(bt)),
        "relu": (np.maximum(a, 0), bt * np.float32(0.02)),
        "lognormal": (np.exp(2 * a), bt),
        "rows of many sizes": (a * np.float32(10) ** random.integers(-4, 1, (m, 1)).astype(np.float32), bt),
        "outliers": (outliers, bt),
        "constant": (np.full((m, k), 0.5638, np.float32), np.full((n, k), 0.3572, np.float32)),
        "cancelling": (np.tile(a[:, :half], 2), np.concatenate([bt[:, :half], -bt[:, :half]], axis=1)),
        "tiny": (a * np.float32(1e-15), bt * np.float32(1e-15)),
        "large": (a * np.float32(1e15), bt * np.float32(1e15)),
    }


@pytest.mark.parametrize("kind", list(kinds(2, 2, 2)))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(192, 192, 192), (500, 300, 200), (192, 200, 2048), (768, 770, 512), (800, 768, 1024)]
)
def test_error_is_norm_wise(kernel: Kernel, kind: str, m: int, n: int, k: int) -> None:
    a, bt = kinds(m, n, k)[kind]
    assert_close(kernel.multiply(a, bt), a, bt)


def test_it_applies_where_it_pays_and_its_scratch_is_bounded(kernel: Kernel) -> None:
    for shape in ((191, 4000, 4000), (4000, 191, 4000), (4000, 4000, 191), (1, 1, 1)):
        assert kernel.scratch_bytes(*shape) == 0
    for m, n, k in ((192, 192, 192), (767, 5000, 5000), (5000, 767, 5000), (5000, 5000, 255)):
        assert 0 < kernel.scratch_bytes(m, n, k) <= PACKED_BYTES_MAX
    for m, n, k in ((768, 768, 256), (2048, 2048, 2048), (4000, 800, 3000)):
        # A quarter of either operand beside the packed blocks.
        assert (m + n) * k - 100 * (m + n + k) < kernel.scratch_bytes(m, n, k) <= (m + n) * k + PACKED_BYTES_MAX


def test_gaps_and_layout_do_not_change_the_bits(kernel: Kernel) -> None:
    a, bt = kinds(205, 213, 231)["normal"]
    products = [kernel.multiply(a, bt, pad) for pad in (0, 1, 4)]
    assert all(np.array_equal(other, products[0]) for other in products)


def test_scalar_build_has_none(modules: dict[str, bytes]) -> None:
    names = {export.name for export in Module(Engine(), modules["scalar"]).exports}
    assert "gemm" in names
    assert "gemm_fast" not in names


@pytest.mark.parametrize(("m", "n", "k"), [(203, 222, 311), (770, 769, 300)])
def test_wasmtime_and_node_agree_to_the_last_bit(
    kernels: dict[str, Kernel], modules: dict[str, bytes], in_node: Callable[..., bytes], m: int, n: int, k: int
) -> None:
    a, bt = kinds(m, n, k)["normal"]
    assert in_node(modules["strict"], "gemm_fast", a, bt) == kernels["strict"].multiply(a, bt).tobytes()
