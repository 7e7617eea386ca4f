"""Thousands of tiles leave an engine as large as hundreds did, and a closed engine leaves nothing behind.

The engines run in the window here, because there DevTools tells what the JavaScript heap and all array buffers hold
after a collection. GPU buffers are counted by the page, whatever the engine says.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

KERNELS = ["wasm-relaxed", "wasm-strict", "wasm-scalar", "webgpu", "pyodide", "python"]
BYTES_MAX = 256 << 20
SHAPES = [
    {"batch": 1, "m": 48, "n": 64, "k": 96},
    {"batch": 3, "m": 17, "n": 5, "k": 130},
    {"batch": 1, "m": 1, "n": 90, "k": 33},
    {"batch": 2, "m": 33, "n": 31, "k": 7},
    {"batch": 1, "m": 70, "n": 2, "k": 300},
]
SMALL_SHAPES = [
    {**shape, "m": shape["m"] % 7 + 1, "n": shape["n"] % 7 + 1, "k": shape["k"] % 30 + 1} for shape in SHAPES
]
TILES_FIRST, TILES_STEP, STEPS = 200, 450, 4
# A leak grows in every step, what the browser compiles or keeps for a while only in some; one short string is more.
HEAP_BYTES_A_TILE_MAX = 16


class Heap:
    """What this page's JavaScript holds."""

    def __init__(self, page: Any) -> None:
        self._devtools = page.context.new_cdp_session(page)

    def collect(self) -> None:
        for _ in range(3):  # what a finalizer lets go needs another collection
            self._devtools.send("HeapProfiler.collectGarbage")

    def bytes(self) -> tuple[int, int]:
        """JavaScript objects; array buffers."""
        self.collect()
        usage = self._devtools.send("Runtime.getHeapUsage")
        return usage["usedSize"], usage["backingStorageSize"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_is_flat_over_thousands_of_tiles(open_suite, kernel: str) -> None:
    shapes = SMALL_SHAPES if kernel == "python" else SHAPES
    with open_suite(kernel, where="window", bytes_max=BYTES_MAX) as engine:
        heap = Heap(engine.page)
        engine.check("flatMemory", tiles=TILES_FIRST, shapes=shapes)
        held = engine.call("memory"), engine.call("alive")
        heaps = [heap.bytes()]
        for _ in range(STEPS):
            engine.check("flatMemory", tiles=TILES_STEP, shapes=shapes)
            heaps.append(heap.bytes())
        assert (engine.call("memory"), engine.call("alive")) == held
        growths = [sum(after) - sum(before) for before, after in itertools.pairwise(heaps)]
        assert min(growths) < HEAP_BYTES_A_TILE_MAX * TILES_STEP, f"the heap grows: {heaps}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_closed_engine_computes_nothing_and_gives_everything_back(open_suite, kernel: str) -> None:
    with open_suite(kernel, where="window", bytes_max=BYTES_MAX) as engine:
        heap = Heap(engine.page)
        opened = engine.call("alive")
        assert any(opened.values()), "nothing of this engine is counted"
        engine.check("closed", batch=1, m=1000, n=3, k=100, seed=1)
        assert engine.call("alive")["gpuBuffers"] == 0
        if kernel in ("pyodide", "python"):  # Pyodide is never collected before its Worker ends; panels must not stay
            assert engine.call("memory")["used"] == 0
            return
        engine.call("close")
        heap.collect()
        assert engine.call("alive") == {"gpuBuffers": 0, "wasmMemories": 0}
