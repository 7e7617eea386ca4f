"""The shipped modules, built once for all tests of them, and an instance of one under wasmtime."""

from __future__ import annotations

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
