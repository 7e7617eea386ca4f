"""C while its tiles come in. Tiles that are partial sums wait beside it until all of them are there, and are then added
in the order of k, so that the result does not depend on which came first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.shapes import Rect

Floats = NDArray[np.float32]


class Product:
    """`c` (batch, m, n) is written in place."""

    def __init__(self, c: Floats) -> None:
        self.c = c
        self._partial: dict[Rect, Floats] = {}

    def put(self, tile: Floats, rect: Rect) -> None:
        """A verified tile, flat; doing it twice changes nothing."""
        shaped = tile.reshape(rect.batch, rect.m, rect.n)
        if rect.partial:
            self._partial[rect] = shaped.copy()
        else:
            self._of(rect)[:] = shaped

    @property
    def partial(self) -> bool:
        """Are there sums to be added?"""
        return bool(self._partial)

    def finish(self) -> None:
        """All tiles are there: adds the partial sums. Once only."""
        for rect in self._partial:
            self._of(rect)[:] = 0
        for rect in sorted(self._partial, key=lambda rect: (rect.k0, rect)):
            self._of(rect)[:] += self._partial[rect]
        self._partial.clear()

    def _of(self, rect: Rect) -> Floats:
        return self.c[rect.b0 : rect.b1, rect.m0 : rect.m1, rect.n0 : rect.n1]
