"""The three WASM kernels under wasmtime: any shape, layout and type against float64; Node's bits; same bytes twice."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wasmtime import Config, Engine, Module

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ("relaxed", "strict", "scalar")
TYPES = ("f32", "bf16", "f16", "i8")
STORED = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i8": np.int8}
SCALE_BLOCK = 128
PAGES = 600  # of memory for the tests' matrices
GUARD = -77  # what surrounds the matrices, and must still surround C afterwards


@dataclass
class Matrix:
    """One operand, a line a row: what is stored, what scales it (i8), and the float32 values that these stand for."""

    dtype: str
    stored: np.ndarray
    scales: np.ndarray | None
    values: np.ndarray

    @classmethod
    def of(cls, dtype: str, values: np.ndarray) -> "Matrix":
        """The matrix nearest to `values` in a type. Exact for what the type can hold."""
        values = np.ascontiguousarray(values, np.float32)
        if dtype == "bf16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
            return cls(dtype, stored, None, (stored.astype(np.uint32) << 16).view(np.float32))
        if dtype == "i8":
            blocks = -(-values.shape[1] // SCALE_BLOCK)
            scales = np.empty((len(values), blocks), np.float32)
            stored = np.empty(values.shape, np.int8)
            for number in range(blocks):
                part = values[:, number * SCALE_BLOCK : (number + 1) * SCALE_BLOCK]
                scales[:, number] = np.abs(part).max(axis=1) / 127 + np.float32(1e-30)
                stored[:, number * SCALE_BLOCK : (number + 1) * SCALE_BLOCK] = np.rint(part / scales[:, number, None])
            expanded = np.repeat(scales, SCALE_BLOCK, axis=1)[:, : values.shape[1]]
            return cls(dtype, stored, scales, stored.astype(np.float32) * expanded)
        stored = values.astype(STORED[dtype])
        return cls(dtype, stored, None, stored.astype(np.float32))


class Kernel:
    """One instance of a module (conftest.py)."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded
        self.store, self.scratch, self.gemm = loaded.store, loaded.start, loaded.exports["gemm"]
        self.start = -(-(self.scratch + loaded.exports["gemm_scratch_bytes"](self.store)) // 16) * 16
        self.at = 0

    def place(self, matrix: np.ndarray, pad: int = 0) -> tuple[int, int, np.ndarray]:
        """A copy in the kernel's memory with `pad` guard elements after each row: address, row stride, and its view."""
        heap = self.loaded.heap()
        rows, width = matrix.shape[0], matrix.shape[1] + pad
        count = rows * width * matrix.itemsize
        assert self.at + count <= len(heap), "the tests' memory is too small"
        view = heap[self.at : self.at + count].view(matrix.dtype).reshape(rows, width)
        view[...] = np.array(GUARD).astype(matrix.dtype)
        view[:, : matrix.shape[1]] = matrix
        address, self.at = self.at, -(-(self.at + count) // 16) * 16
        return address, width, view

    def operand(self, matrix: Matrix, along: bool, pad: int) -> tuple[int, int, int, int, int]:
        """gemm's five arguments for one operand; `along`: stored so that k is contiguous."""
        address, width, _ = self.place(matrix.stored if along else matrix.stored.T, pad)
        strides = (width, 1) if along else (1, width)
        scales = 0 if matrix.scales is None else self.place(matrix.scales)[0]
        return address, *strides, TYPES.index(matrix.dtype), scales

    def multiply(
        self, a: Matrix, bt: Matrix, *, c: np.ndarray | None = None, bias: np.ndarray | None = None,
        along: tuple[bool, bool] = (True, True), pad: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """A B (+ C) (+ bias) by the kernel."""
        self.at = self.start
        (m, k), n = a.stored.shape, bt.stored.shape[0]
        operands = (*self.operand(a, along[0], pad), *self.operand(bt, along[1], pad))
        at_bias = 0 if bias is None else self.place(bias[None])[0]
        at_c, c_row, out = self.place(np.full((m, n), np.nan, np.float32) if c is None else c, pad)
        after = self.place(np.zeros((1, 64), np.float32))[2]
        self.gemm(self.store, m, n, k, *operands, at_c, c_row, int(c is not None), at_bias, self.scratch)
        assert (out[:, n:] == GUARD).all() and not after.any(), "wrote beyond the rows of C"
        return out[:, :n].copy()


@pytest.fixture(scope="module")
def kernels(modules: dict[str, bytes], load: Callable[[bytes, int], Any]) -> dict[str, Kernel]:
    return {name: Kernel(load(wasm, PAGES)) for name, wasm in modules.items()}


@pytest.fixture(params=BUILDS)
def kernel(request: pytest.FixtureRequest, kernels: dict[str, Kernel]) -> Kernel:
    return kernels[request.param]


def close(got: np.ndarray, a: np.ndarray, bt: np.ndarray, *added: np.ndarray | None) -> bool:
    """Within the worst case of a float32 sum: (k + 4) units of sum |a b| (+ |c| + |bias|)."""
    exact = a.astype(np.float64) @ bt.astype(np.float64).T
    size = np.abs(a).astype(np.float64) @ np.abs(bt).astype(np.float64).T
    for term in added:
        if term is not None:
            exact, size = exact + term, size + np.abs(term)
    return bool((np.abs(got - exact) <= (a.shape[1] + 4) * 2.0**-24 * size + 1e-44 * a.shape[1]).all())


def matrices(m: int, n: int, k: int, seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    a, bt = (random.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k)))
    return a * np.float32(scale), bt


def operands(m: int, n: int, k: int, seed: int, types: tuple[str, str] = ("f32", "f32")) -> tuple[Matrix, Matrix]:
    a, bt = matrices(m, n, k, seed)
    return Matrix.of(types[0], a), Matrix.of(types[1], bt)


def test_two_builds_are_the_same_bytes(modules: dict[str, bytes], tmp_path: Path) -> None:
    """The second in caches of its own: the compiler's own would make any two builds the same."""
    caches = {f"ZIG_{kind}_CACHE_DIR": str(tmp_path / kind.lower()) for kind in ("GLOBAL", "LOCAL")}
    command = [sys.executable, str(ROOT / "kernels_wasm" / "build.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=os.environ | caches)
    assert {name: (tmp_path / f"gemm_{name}.wasm").read_bytes() for name in BUILDS} == modules
    assert len(set(modules.values())) == len(BUILDS)


@pytest.mark.parametrize("name", BUILDS)
def test_module_imports_nothing_and_needs_no_more_than_its_name_says(modules: dict[str, bytes], name: str) -> None:
    config = Config()
    config.wasm_relaxed_simd = name == "relaxed"
    config.wasm_simd = name != "scalar"
    assert list(Module(Engine(config), modules[name]).imports) == []


side = st.integers(1, 140)


@settings(max_examples=120, deadline=None)
@given(
    m=side, n=side, k=st.integers(1, 600), types=st.tuples(*[st.sampled_from(TYPES)] * 2),
    along=st.tuples(st.booleans(), st.booleans()), accumulate=st.booleans(), biased=st.booleans(),
    pad=st.integers(0, 5), seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 1e-20, 1e18]),
)  # fmt: skip
def test_any_shape_layout_and_type(
    kernels: dict[str, Kernel],
    m: int,
    n: int,
    k: int,
    types: tuple[str, str],
    along: tuple[bool, bool],
    accumulate: bool,
    biased: bool,
    pad: int,
    seed: int,
    scale: float,
) -> None:
    random = np.random.default_rng(seed)
    a, bt = matrices(m, n, k, seed, 1.0 if types[0] == "f16" else scale)
    left, right = Matrix.of(types[0], a), Matrix.of(types[1], bt)
    c = random.standard_normal((m, n), dtype=np.float32) if accumulate else None
    bias = random.standard_normal(n, dtype=np.float32) if biased else None
    products = {}
    for name, kernel in kernels.items():
        products[name] = kernel.multiply(left, right, c=c, bias=bias, along=along, pad=pad)
        assert close(products[name], left.values, right.values, c, bias), name
    assert np.array_equal(products["strict"], products["scalar"])


@pytest.mark.parametrize("types", [(x, y) for x in TYPES for y in TYPES])
def test_every_pair_of_types(kernel: Kernel, types: tuple[str, str]) -> None:
    a, bt = operands(37, 45, 301, 5, types)
    assert close(kernel.multiply(a, bt), a.values, bt.values)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 1),
        (31, 32, 33),
        (33, 31, 32),
        (1, 384, 257),
        (257, 1, 384),
        (61, 513, 257),
        (121, 1030, 520),
        (6, 8, 256),
    ],
)
def test_either_side_of_every_block(kernel: Kernel, m: int, n: int, k: int) -> None:
    a, bt = operands(m, n, k, seed=m * n + k)
    c = np.random.default_rng(1).standard_normal((m, n), dtype=np.float32)
    bias = np.random.default_rng(2).standard_normal(n, dtype=np.float32)
    assert close(kernel.multiply(a, bt), a.values, bt.values)
    assert close(kernel.multiply(a, bt, c=c, bias=bias), a.values, bt.values, c, bias)


def test_layouts_give_the_same_bits(kernel: Kernel) -> None:
    a, bt = operands(77, 91, 301, seed=1)
    layouts = [((x, y), pad) for x in (False, True) for y in (False, True) for pad in (0, 3)]
    products = [kernel.multiply(a, bt, along=along, pad=pad) for along, pad in layouts]
    assert all(np.array_equal(product, products[0]) for product in products)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_not_finite_reaches_exactly_its_row_and_column(kernel: Kernel, dtype: str, value: float) -> None:
    m, n, k = 13, 19, 270
    a, bt = matrices(m, n, k, seed=3)
    a[6, 261] = value
    bt[11, 5] = value
    left, right = Matrix.of(dtype, a), Matrix.of(dtype, bt)
    got = kernel.multiply(left, right)
    touched = np.zeros((m, n), bool)
    touched[6, :] = touched[:, 11] = True
    assert not np.isfinite(got[touched]).any()
    assert np.isfinite(got[~touched]).all()
    rows, columns = np.arange(m) != 6, np.arange(n) != 11
    assert close(got[rows][:, columns], left.values[rows], right.values[columns])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("along", [True, False])
def test_every_value_of_a_narrow_type_is_exact(kernel: Kernel, dtype: str, along: bool) -> None:
    """All 65,536, as a column of A against a one: subnormals, infinities and NaN included."""
    stored = np.arange(65536, dtype=np.uint16)
    if dtype == "f16":
        values = stored.view(np.float16).astype(np.float32)
    else:
        values = (stored.astype(np.uint32) << 16).view(np.float32)
    a = Matrix(dtype, stored.view(STORED[dtype]).reshape(-1, 4), None, values.reshape(-1, 4))
    for column in range(4):  # four elements of a line are packed together, so all four places are asked
        # With zeros beside the one, a row with an infinity would become NaN; so the others of its row are cleared.
        only = a.stored.copy()
        only[:, np.arange(4) != column] = 0
        got = kernel.multiply(
            Matrix(dtype, only, None, a.values), Matrix.of("f32", np.eye(4, dtype=np.float32)[column : column + 1]),
            along=(along, True),
        )[:, 0]  # fmt: skip
        assert np.array_equal(got, a.values[:, column], equal_nan=True)


def test_every_int8_is_scaled_by_its_line_and_block(kernel: Kernel) -> None:
    stored = np.zeros((256, 300), np.int8)
    stored[:, 140] = np.arange(-128, 128)
    scales = np.random.default_rng(1).uniform(0.1, 9, (256, 3)).astype(np.float32)
    a = Matrix("i8", stored, scales, stored.astype(np.float32))
    got = kernel.multiply(a, Matrix.of("f32", np.ones((1, 300), np.float32)))[:, 0]
    assert np.array_equal(got, stored[:, 140].astype(np.float32) * scales[:, 1])


@pytest.fixture(scope="module")
def rungs(load: Callable[[bytes, int], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    directory = tmp_path_factory.mktemp("ladder")
    command = [sys.executable, str(ROOT / "kernels_wasm" / "ladder.py"), str(directory)]
    subprocess.run(command, check=True, timeout=120)
    return {path.stem: Kernel(load(path.read_bytes(), PAGES)) for path in (directory / "ladder").glob("*.wasm")}


@pytest.mark.parametrize("rung", sorted(path.stem for path in (ROOT / "kernels_wasm" / "ladder").glob("[0-9]*.c")))
def test_every_rung_of_the_ladder_computes_what_ships(rungs: dict[str, Kernel], rung: str) -> None:
    """A bench of a wrong kernel says nothing."""
    for m, n, k in [(1, 1, 1), (7, 9, 5), (33, 31, 262), (61, 521, 130)]:
        a, bt = operands(m, n, k, seed=m)
        c = np.random.default_rng(1).standard_normal((m, n), dtype=np.float32)
        bias = np.random.default_rng(2).standard_normal(n, dtype=np.float32)
        for along in [(True, True), (False, False)]:
            assert close(rungs[rung].multiply(a, bt, along=along, pad=1), a.values, bt.values)
            assert close(rungs[rung].multiply(a, bt, c=c, bias=bias, along=along), a.values, bt.values, c, bias)


@pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 700), (7, 3, 5), (128, 128, 256)])
@pytest.mark.parametrize("name", ["strict", "scalar"])
def test_wasmtime_and_node_agree_to_the_last_bit(
    kernels: dict[str, Kernel],
    modules: dict[str, bytes],
    in_node: Callable[..., bytes],
    name: str,
    m: int,
    n: int,
    k: int,
) -> None:
    a, bt = operands(m, n, k, seed=9)
    assert in_node(modules[name], "gemm", a.stored, bt.stored) == kernels[name].multiply(a, bt).tobytes()
