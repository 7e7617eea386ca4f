"""int8 products (int8.h) under wasmtime: every bit as NumPy has it, in each build and on each kind of CPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ("relaxed", "strict", "scalar")
I8 = 3
SCALE_BLOCK, CHUNK = 128, 512
GUARD = 0xA5

# The relaxed build as other CPUs run it: its relaxed integer instruction is replaced by what each makes of it.
CPUS = {
    "arm": "dot_signed(a, b, sum)",
    "x86_vnni": "dot_unsigned(a, b, sum)",
    "x86": "dot_saturating(a, b, sum)",
}
EMULATED = """
#include <wasm_simd128.h>
static int lane(v128_t x, int i) { return ((signed char *)&x)[i]; }
static v128_t emulate(v128_t a, v128_t b, v128_t sum, int is_signed, int saturates) {
  int out[4];
  for (int i = 0; i < 4; ++i) {
    int total = 0;
    for (int pair = 4 * i; pair < 4 * i + 4; pair += 2) {
      int two = 0;
      for (int l = pair; l < pair + 2; ++l) two += lane(a, l) * (is_signed ? lane(b, l) : (unsigned char)lane(b, l));
      if (saturates) two = two > 32767 ? 32767 : two < -32768 ? -32768 : two;
      total += two;
    }
    out[i] = ((int *)&sum)[i] + total;
  }
  return wasm_v128_load(out);
}
#define dot_signed(a, b, sum) emulate(a, b, sum, 1, 0)
#define dot_unsigned(a, b, sum) emulate(a, b, sum, 0, 0)
#define dot_saturating(a, b, sum) emulate(a, b, sum, 0, 1)
#undef wasm_i32x4_relaxed_dot_i8x16_i7x16_add
#define wasm_i32x4_relaxed_dot_i8x16_i7x16_add(a, b, sum) %s
#include "%s"
"""
BUILD_EMULATED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build
build.compile_wasm([sys.argv[2]], build.CPUS["relaxed"], Path(sys.argv[3]))
"""


class Kernel:
    """One instance of a module (conftest.py). Its memory is refilled with GUARD before each product."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded
        self.store, self.start, self.gemm = loaded.store, loaded.start, loaded.exports["gemm"]
        self.scratch_bytes = loaded.exports["gemm_scratch_bytes"](self.store)

    def multiply(
        self, a: "Lines", b: "Lines", *, c: np.ndarray | None = None, bias: np.ndarray | None = None,
        along: tuple[bool, bool] = (True, True), pad: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """A B (+ C) (+ bias) by the kernel; checks that nothing but C was written."""
        (m, k), n = a.stored.shape, b.stored.shape[0]
        heap = self.loaded.heap()
        heap[self.start :] = GUARD
        at = self.start

        def place(matrix: np.ndarray, gap: int = 0) -> tuple[int, int, np.ndarray]:
            nonlocal at
            width, address = matrix.shape[1] + gap, at
            view = heap[at : at + len(matrix) * width * matrix.itemsize].view(matrix.dtype).reshape(-1, width)
            view[:, : matrix.shape[1]] = matrix
            at = -(-(at + view.nbytes) // 16) * 16 + 16
            return address, width, view

        arguments: list[int] = []
        for lines, contiguous in ((a, along[0]), (b, along[1])):
            address, width, _ = place(lines.stored if contiguous else lines.stored.T, pad)
            arguments += [address, *((width, 1) if contiguous else (1, width)), I8, place(lines.scales)[0]]
        at_bias = 0 if bias is None else place(bias[None])[0]
        at_c, c_row, out = place(np.full((m, n), np.nan, np.float32) if c is None else c, pad)
        assert at + self.scratch_bytes < len(heap), "the tests' memory is too small"
        before = heap[self.start : at].copy()
        self.gemm(self.store, m, n, k, *arguments, at_c, c_row, int(c is not None), at_bias, at)
        assert (heap[at + self.scratch_bytes :] == GUARD).all(), "wrote beyond its scratch"
        product = out[:, :n].copy()
        out[:, :n] = np.nan if c is None else c
        assert np.array_equal(heap[self.start : at], before), "wrote beside C"
        return product


class Lines:
    """Rows of A or columns of B: int8 with a scale for each line and block."""

    def __init__(self, stored: np.ndarray, scales: np.ndarray) -> None:
        self.stored, self.scales = stored.astype(np.int8), scales.astype(np.float32)

    @classmethod
    def random(cls, count: int, k: int, seed: int, extreme: bool) -> "Lines":
        random = np.random.default_rng(seed)
        stored = random.choice([-128, -127, 127], (count, k)) if extreme else random.integers(-128, 128, (count, k))
        return cls(stored, random.standard_normal((count, -(-k // SCALE_BLOCK))))


def expected(a: Lines, b: Lines, c: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    """int8.h's sum in its own order: exact integers, then float32, block by block and chunk by chunk."""
    total = c
    k = a.stored.shape[1]
    for start in range(0, k, CHUNK):
        chunk: np.ndarray | None = None
        for first in range(start, min(k, start + CHUNK), SCALE_BLOCK):
            at = slice(first, min(k, first + SCALE_BLOCK))
            whole = a.stored[:, at].astype(np.int32) @ b.stored[:, at].astype(np.int32).T
            number = first // SCALE_BLOCK
            term = whole.astype(np.float32) * (a.scales[:, number, None] * b.scales[None, :, number])
            chunk = term if chunk is None else chunk + term
        assert chunk is not None
        total = chunk if total is None else total + chunk
    assert total is not None
    return total if bias is None else total + bias


@pytest.fixture(scope="module")
def kernels(
    modules: dict[str, bytes], load: Callable[[bytes, int], Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Kernel]:
    """The three builds, and the relaxed one as each kind of CPU runs it."""
    directory = tmp_path_factory.mktemp("emulated")
    kernels_wasm = ROOT / "kernels_wasm"
    found = dict(modules)
    for cpu, dot in CPUS.items():
        source = directory / f"{cpu}.c"
        source.write_text(EMULATED % (dot, kernels_wasm / "gemm.c"))
        command = [sys.executable, "-c", BUILD_EMULATED, kernels_wasm, source, source.with_suffix(".wasm")]
        subprocess.run([str(part) for part in command], check=True, timeout=120)
        found[cpu] = source.with_suffix(".wasm").read_bytes()
    return {name: Kernel(load(wasm, 100)) for name, wasm in found.items()}


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 70), n=st.integers(1, 70), k=st.integers(1, 1200), extreme=st.booleans(),
    along=st.tuples(st.booleans(), st.booleans()), accumulate=st.booleans(), biased=st.booleans(),
    pad=st.integers(0, 5), seed=st.integers(0, 2**32 - 2),
)  # fmt: skip
def test_every_bit_is_as_numpy_has_it(
    kernels: dict[str, Kernel],
    m: int,
    n: int,
    k: int,
    extreme: bool,
    along: tuple[bool, bool],
    accumulate: bool,
    biased: bool,
    pad: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    a, b = Lines.random(m, k, seed, extreme), Lines.random(n, k, seed + 1, extreme)
    c = random.standard_normal((m, n), dtype=np.float32) if accumulate else None
    bias = random.standard_normal(n, dtype=np.float32) if biased else None
    wanted = expected(a, b, c, bias)
    for name, kernel in kernels.items():
        assert np.array_equal(kernel.multiply(a, b, c=c, bias=bias, along=along, pad=pad), wanted), name


@pytest.mark.parametrize("name", [*BUILDS, *CPUS])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (121, 9, 128), (7, 513, 129), (241, 1030, 144), (6, 8, 512), (5, 8, 513), (61, 17, 127)],
)
def test_either_side_of_every_block(kernels: dict[str, Kernel], name: str, m: int, n: int, k: int) -> None:
    a, b = Lines.random(m, k, m + n, extreme=False), Lines.random(n, k, k, extreme=True)
    assert np.array_equal(kernels[name].multiply(a, b), expected(a, b, None, None))


@pytest.mark.parametrize("name", [*BUILDS, *CPUS])
@pytest.mark.parametrize("left", [-128, 127])
@pytest.mark.parametrize("right", [-128, 127])
def test_largest_sums_are_exact(kernels: dict[str, Kernel], name: str, left: int, right: int) -> None:
    k = 256
    a = Lines(np.full((7, k), left), np.ones((7, 2)))
    b = Lines(np.full((9, k), right), np.ones((9, 2)))
    assert (kernels[name].multiply(a, b) == left * right * k).all()
