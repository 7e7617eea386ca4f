"""A server whose gpt-bytes job sends everything anew: what the saving of kept panels is measured against.

`python -m backend.bench.forgetful serve` is `tileweave serve` with one change: the recipe's script is this file. As
that script it makes the multiplier name each operand after its GEMM and say that nothing is used again, and has no sums
over micro-batches. Then GEMMs are planned each by itself and a panel serves the tiles of one GEMM, as it would if names
were not made of contents. Nothing of this can be reached from a normal server.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ENTRY = ("-m", "backend.bench.forgetful", "serve")


def train_forgetfully() -> None:
    """Run the recipe with nothing kept."""
    import itertools
    from dataclasses import replace

    from backend.recipes import gpt_bytes
    from tileweave.script import graph, multiply

    store, names = multiply.store, itertools.count()
    start, program = multiply.ArenaMultiplier.start, graph.Program

    def store_under_a_new_name(*args: Any) -> Any:
        return replace(store(*args), content=f"once{next(names)}")

    def start_alone(
        self: multiply.ArenaMultiplier, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1
    ) -> multiply.Pending:
        return start(self, a, bt, 1)

    multiply.store = store_under_a_new_name
    multiply.ArenaMultiplier.start = start_alone  # type: ignore[method-assign]
    graph.Program = lambda captured, _: program(captured)  # type: ignore[misc, assignment]
    gpt_bytes.main()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        from backend.bench.spoiled import serve_with

        serve_with(Path(__file__).resolve())
    else:
        train_forgetfully()
