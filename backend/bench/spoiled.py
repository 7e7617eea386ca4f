"""A server whose gpt-bytes job spoils its products after they were checked: proof that the parity figure can fail.

`python -m backend.bench.spoiled serve` is `tileweave serve` with one change: the recipe's script is this file. As that
script it wraps the multiplier, so that each product, verified and assembled, is changed before torch sees it:
    skip1   the last of the k terms is left out of every element
    bf16    the product is rounded to bfloat16
Nothing of this can be reached from a normal server.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SPOIL_VARIABLE = "BENCH_SPOIL"
KINDS = ("skip1", "bf16")
ENTRY = ("-m", "backend.bench.spoiled", "serve")


def serve_with(script: Path) -> None:
    """Run `tileweave serve` with this script in the gpt-bytes recipe's place."""
    from backend.recipes import RECIPES
    from backend.settings import Settings
    from backend.supervisor.serve import serve

    RECIPES["gpt-bytes"] = dataclasses.replace(RECIPES["gpt-bytes"], script=script)
    sys.exit(serve(Settings()))


def train_spoiled(kind: str) -> None:
    """Run the recipe with every product spoiled."""
    import torch

    from backend.recipes import gpt_bytes
    from tileweave.script.multiply import ArenaMultiplier, Pending, Read

    start = ArenaMultiplier.start

    class Spoiled:
        def __init__(self, a: Sequence[Tensor], bt: Sequence[Tensor], pending: Pending) -> None:
            self._last = sum(x[:, :, -1:] * y[:, None, :, -1] for x, y in zip(a, bt, strict=True))
            self._pending = pending

        def read(self, read: Read) -> None:
            def spoiled(product: Tensor) -> None:
                read(product - self._last if kind == "skip1" else product.to(torch.bfloat16).to(torch.float32))

            self._pending.read(spoiled)

    def spoil(self: ArenaMultiplier, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        return Spoiled(a, bt, start(self, a, bt, uses))

    ArenaMultiplier.start = spoil  # type: ignore[method-assign]
    gpt_bytes.main()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve_with(Path(__file__).resolve())
    else:
        train_spoiled(os.environ[SPOIL_VARIABLE])
