"""The WASM kernel under wasmtime: any shape and strides, against float64; Node's bits; the same bytes twice."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wasmtime import Engine, Instance, Memory, Module, Store

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 65536
GUARD = np.float32(-12345.5)  # what surrounds C, and must still do afterwards


def build(output: Path) -> bytes:
    subprocess.run([sys.executable, str(ROOT / "kernels_wasm" / "build.py"), str(output)], check=True, timeout=120)
    return output.read_bytes()


class Kernel:
    """One instance of the module, with a memory large enough for the tests' matrices."""

    def __init__(self, wasm: bytes) -> None:
        engine = Engine()
        self.store = Store(engine)
        exports = Instance(self.store, Module(engine, wasm), []).exports(self.store)
        self.gemm = exports["gemm"]
        self.memory = exports["memory"]
        assert isinstance(self.memory, Memory)
        base = exports["__heap_base"].value(self.store)
        self.scratch = -(-base // 16) * 16
        self.start = -(-(self.scratch + exports["gemm_scratch_bytes"](self.store)) // 16) * 16
        self.memory.grow(self.store, 600)

    def view(self) -> np.ndarray:
        size = self.memory.data_len(self.store)
        return np.ctypeslib.as_array(self.memory.data_ptr(self.store), (size,)).view(np.float32)

    def multiply(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, a_along: bool, b_along: bool, accumulate: bool, pad: int
    ) -> np.ndarray:
        """A B (+ C) by the kernel; `*_along`: stored so that k is contiguous; `pad` elements between lines."""
        (m, k), n = a.shape, b.shape[1]
        memory = self.view()
        at = self.start // 4
        places = []
        for matrix in (a if a_along else a.T, b.T if b_along else b, c):
            rows, width = matrix.shape[0], matrix.shape[1] + pad
            block = memory[at : at + rows * width].reshape(rows, width)
            block[...] = GUARD
            block[:, : matrix.shape[1]] = matrix
            places.append((at * 4, width, block))
            at += -(-rows * width // 4) * 4
        (at_a, width_a, _), (at_b, width_b, _), (at_c, width_c, out) = places
        strides_a = (width_a, 1) if a_along else (1, width_a)
        strides_b = (1, width_b) if b_along else (width_b, 1)
        self.gemm(self.store, m, n, k, at_a, *strides_a, at_b, *strides_b, at_c, width_c, int(accumulate), self.scratch)
        assert (out[:, n:] == GUARD).all(), "wrote beyond the rows of C"
        return out[:, :n].copy()


@pytest.fixture(scope="module")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("wasm") / "gemm.wasm")


@pytest.fixture(scope="module")
def kernel(wasm: bytes) -> Kernel:
    return Kernel(wasm)


def close(got: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> bool:
    """Within the worst case of a float32 sum: (k + 2) units of sum |a b| (+ |c|)."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    if c is not None:
        exact, size = exact + c, size + np.abs(c)
    return bool((np.abs(got - exact) <= (a.shape[1] + 2) * 2.0**-24 * size + 1e-44).all())


def matrices(m: int, n: int, k: int, seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    a, b, c = (random.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n), (m, n)))
    return a * np.float32(scale), b, c


def test_two_builds_are_the_same_bytes(wasm: bytes, tmp_path: Path) -> None:
    assert build(tmp_path / "again.wasm") == wasm
    assert wasm.startswith(b"\0asm")


def test_module_imports_nothing(wasm: bytes) -> None:
    assert list(Module(Engine(), wasm).imports) == []


side = st.integers(1, 140)


@settings(max_examples=150, deadline=None)
@given(
    m=side, n=side, k=st.integers(1, 600), a_along=st.booleans(), b_along=st.booleans(), accumulate=st.booleans(),
    pad=st.integers(0, 5), seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 1e-20, 1e18]),
)  # fmt: skip
def test_any_shape_and_layout(
    kernel: Kernel,
    m: int,
    n: int,
    k: int,
    a_along: bool,
    b_along: bool,
    accumulate: bool,
    pad: int,
    seed: int,
    scale: float,
) -> None:
    a, b, c = matrices(m, n, k, seed, scale)
    got = kernel.multiply(a, b, c, a_along=a_along, b_along=b_along, accumulate=accumulate, pad=pad)
    assert close(got, a, b, c if accumulate else None)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 1),
        (31, 32, 33),
        (33, 31, 32),
        (1, 384, 257),
        (257, 1, 384),
        (61, 513, 257),
        (120, 1030, 512),
        (5, 8, 256),
    ],
)
def test_either_side_of_every_block(kernel: Kernel, m: int, n: int, k: int) -> None:
    a, b, c = matrices(m, n, k, seed=m * n + k)
    for accumulate in (False, True):
        got = kernel.multiply(a, b, c, a_along=True, b_along=True, accumulate=accumulate, pad=0)
        assert close(got, a, b, c if accumulate else None)


def test_layouts_give_the_same_bits(kernel: Kernel) -> None:
    a, b, c = matrices(77, 91, 301, seed=1)
    products = [
        kernel.multiply(a, b, c, a_along=along_a, b_along=along_b, accumulate=False, pad=pad)
        for along_a in (False, True)
        for along_b in (False, True)
        for pad in (0, 3)
    ]
    assert all(np.array_equal(product, products[0]) for product in products)


def test_without_accumulate_old_contents_do_not_matter(kernel: Kernel) -> None:
    a, b, c = matrices(9, 9, 300, seed=2)
    c[...] = np.nan
    got = kernel.multiply(a, b, c, a_along=True, b_along=True, accumulate=False, pad=0)
    assert close(got, a, b, None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_reaches_exactly_its_row_and_column(kernel: Kernel, value: float) -> None:
    m, n, k = 13, 19, 270
    a, b, c = matrices(m, n, k, seed=3)
    a[6, 261] = value
    b[5, 11] = value
    with np.errstate(invalid="ignore"):
        got = kernel.multiply(a, b, c, a_along=True, b_along=True, accumulate=False, pad=0)
    touched = np.zeros((m, n), bool)
    touched[6, :] = touched[:, 11] = True
    assert not np.isfinite(got[touched]).any()
    assert np.isfinite(got[~touched]).all()
    rows, columns = np.arange(m) != 6, np.arange(n) != 11
    assert close(got[rows][:, columns], a[rows], b[:, columns], None)


NODE = """
import { readFileSync } from "node:fs";
import { Kernel } from "%s";
const { wasm, m, n, k } = JSON.parse(process.argv[1]);
const kernel = new Kernel(new WebAssembly.Module(readFileSync(wasm)), 1 << 28);
const input = new Float32Array(new Uint8Array(readFileSync(0)).buffer);
const { heap } = kernel;
const [a, b, c] = [m * k, n * k, m * n].map((count) => heap.alloc(4 * count));
heap.floats(a, m * k).set(input.subarray(0, m * k));
heap.floats(b, n * k).set(input.subarray(m * k));
kernel.multiply(m, n, k, a, b, c);
process.stdout.write(Buffer.from(heap.memory.buffer, c, 4 * m * n));
"""


@pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 700), (7, 3, 5), (128, 128, 256)])
def test_wasmtime_and_node_agree_to_the_last_bit(
    kernel: Kernel, wasm: bytes, tmp_path: Path, m: int, n: int, k: int
) -> None:
    a, b, c = matrices(m, n, k, seed=9)
    mine = kernel.multiply(a, b, c, a_along=True, b_along=True, accumulate=False, pad=0)
    path = tmp_path / "gemm.wasm"
    path.write_bytes(wasm)
    script = NODE % (ROOT / "web" / "static" / "js" / "wasm_kernel.js").as_uri()
    arguments = json.dumps({"wasm": str(path), "m": m, "n": n, "k": k})
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script, arguments],
        input=a.tobytes() + np.ascontiguousarray(b.T).tobytes(), capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == mine.tobytes()
