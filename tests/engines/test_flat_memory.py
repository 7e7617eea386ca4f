"""Thousands of tiles leave an engine as large as hundreds did, and a closed engine leaves nothing behind.

The engines run in the window here, because there DevTools tells what the JavaScript heap and all array buffers hold
after a collection. GPU buffers are counted by the page, whatever the engine says.
"""

from __future__ import annotations

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
# The engine must hold at the end what it held after the first; the browser goes on compiling until the second.
TILES_FIRST, TILES_COMPILED, TILES = 200, 1100, 2000
HEAP_BYTES_A_TILE_MAX = 40  # one entry in one map is more


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
        engine.check("flatMemory", tiles=TILES_COMPILED - TILES_FIRST, shapes=shapes)
        objects, buffers = heap.bytes()
        engine.check("flatMemory", tiles=TILES - TILES_COMPILED, shapes=shapes)
        objects_after, buffers_after = heap.bytes()
        assert (engine.call("memory"), engine.call("alive")) == held
        assert buffers_after <= buffers
        assert objects_after - objects < HEAP_BYTES_A_TILE_MAX * (TILES - TILES_COMPILED)


@pytest.mark.parametrize("kernel", KERNELS)
def test_closed_engine_computes_nothing_and_gives_everything_back(open_suite, kernel: str) -> None:
    with open_suite(kernel, where="window", bytes_max=BYTES_MAX) as engine:
        heap = Heap(engine.page)
        opened = engine.call("alive")
        assert any(opened.values()), "nothing of this engine is counted"
        engine.check("closed", batch=1, m=1000, n=3, k=100, seed=1)
        assert engine.call("alive")["gpuBuffers"] == 0
        if kernel in (
            "pyodide",
            "python",
        ):  # Pyodide keeps its memory until its Worker ends; panels must not stay in it
            assert engine.call("memory")["used"] == 0
            return
        engine.call("close")
        heap.collect()
        assert engine.call("alive") == {"gpuBuffers": 0, "wasmMemories": 0}
