"""The shipped modules, built once for all tests of them; an instance of one under wasmtime; a product in Node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wasmtime import Config, Engine, Instance, Memory, Module, Store

BUILD = Path(__file__).resolve().parents[2] / "kernels_wasm" / "build.py"

NODE = """
import { readFileSync } from "node:fs";
const { wasm, entry, m, n, k } = JSON.parse(process.argv[1]);
const { exports } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(wasm)));
exports.memory.grow(400);
const round = (x) => Math.ceil(x / 16) * 16;
const a = round(exports.__heap_base.value), b = round(a + 4 * m * k), c = round(b + 4 * n * k);
const scratch = round(c + 4 * m * n);
const input = readFileSync(0);
new Uint8Array(exports.memory.buffer, a).set(input.subarray(0, 4 * m * k));
new Uint8Array(exports.memory.buffer, b).set(input.subarray(4 * m * k));
if (entry === "gemm_fast") exports.gemm_fast(m, n, k, a, k, b, k, c, n, scratch);
else exports.gemm(m, n, k, a, k, 1, 0, 0, b, k, 1, 0, 0, c, n, 0, 0, scratch);
process.stdout.write(Buffer.from(exports.memory.buffer, c, 4 * m * n));
"""


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """By their names: relaxed, strict, scalar."""
    directory = tmp_path_factory.mktemp("wasm")
    subprocess.run([sys.executable, str(BUILD), str(directory)], check=True, timeout=120)
    return {path.stem.removeprefix("gemm_"): path.read_bytes() for path in directory.glob("*.wasm")}


@dataclass
class Loaded:
    """An instance: its exports, its memory, and the first byte that the module does not use itself."""

    store: Store
    exports: Any
    memory: Memory
    start: int

    def heap(self) -> np.ndarray:
        """All bytes, as long as the memory does not grow."""
        return np.ctypeslib.as_array(self.memory.data_ptr(self.store), (self.memory.data_len(self.store),))


@pytest.fixture(scope="session")
def load() -> Callable[[bytes, int], Loaded]:
    """`load(wasm, pages)`: an instance whose memory has so many more pages."""

    def loaded(wasm: bytes, pages: int) -> Loaded:
        config = Config()
        config.wasm_relaxed_simd = True
        engine = Engine(config)
        store = Store(engine)
        exports = Instance(store, Module(engine, wasm), []).exports(store)
        memory = exports["memory"]
        assert isinstance(memory, Memory)
        memory.grow(store, pages)
        return Loaded(store, exports, memory, -(-exports["__heap_base"].value(store) // 16) * 16)

    return loaded


@pytest.fixture
def in_node(tmp_path: Path) -> Callable[[bytes, str, np.ndarray, np.ndarray], bytes]:
    """`in_node(wasm, entry, a, bt)`: the bytes of A B by gemm or gemm_fast, float32, in Node."""

    def product(wasm: bytes, entry: str, a: np.ndarray, bt: np.ndarray) -> bytes:
        path = tmp_path / "kernel.wasm"
        path.write_bytes(wasm)
        order = {"wasm": str(path), "entry": entry, "m": len(a), "n": len(bt), "k": a.shape[1]}
        done = subprocess.run(
            ["node", "--input-type=module", "-e", NODE, json.dumps(order)],
            input=a.tobytes() + bt.tobytes(), capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout

    return product
