"""A server whose gpt-bytes job sends everything anew: what the saving of kept panels is measured against.

`python -m backend.bench.forgetful serve` is `tileweave serve` with one change: the recipe's script is this file. As
that script it makes the multiplier name each operand after its GEMM and say that nothing is used again, and has no sums
over micro-batches. Then GEMMs are planned each by itself and a panel serves the tiles of one GEMM, as it would if names
were not made of contents. Nothing of this can be reached from a normal server.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

ENTRY = ("-m", "backend.bench.forgetful", "serve")


def train_forgetfully() -> None:
    """Run the recipe with nothing kept."""
    graph: Any = importlib.import_module("tileweave.script.graph")
    multiply: Any = importlib.import_module("tileweave.script.multiply")
    store, start, program = multiply.store, multiply.ArenaMultiplier.start, graph.Program
    names = itertools.count()
    multiply.store = lambda *args: dataclasses.replace(store(*args), content=f"once{next(names)}")
    multiply.ArenaMultiplier.start = lambda self, a, bt, uses=1: start(self, a, bt, 1)
    graph.Program = lambda captured, _: program(captured)
    importlib.import_module("backend.recipes.gpt_bytes").main()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        from backend.bench.spoiled import serve_with

        serve_with(Path(__file__).resolve())
    else:
        train_forgetfully()
