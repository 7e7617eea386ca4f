"""Rectangles of given areas that tile an m x n plane with little perimeter: column-based partition.

The half-perimeter of a device's rectangle is what it must download. Minimising its sum is NP-complete (Beaumont,
Boudet, Rastello, Robert 2002); among partitions into full-height columns, each stacked from whole rectangles, a dynamic
program over the areas in descending order finds the best one, which is within a few percent of the bound on ordinary
fleets. Both orientations are tried. O(p^2) in the number of areas, vectorised.

Left out: partitions that are not column-based.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.tiles import EDGE

Plane = tuple[int, int, int, int]
"""(m0, m1, n0, n1); empty where m0 == m1 or n0 == n1."""


def partition(areas: Sequence[float], m: int, n: int) -> list[Plane]:
    """One plane for each of `areas` (relative, positive), in their order, covering m x n exactly. Borders are rounded,
    to multiples of 8 where there is room, so that a very small area may come out empty."""
    order = sorted(range(len(areas)), key=lambda i: -areas[i])
    shares = np.array([areas[i] for i in order], dtype=np.float64)
    shares /= shares.sum()
    upright_cost, upright = _columns(shares, m, n)
    lying_cost, lying = _columns(shares, n, m)
    planes: list[Plane] = [(0, 0, 0, 0)] * len(areas)
    if upright_cost <= lying_cost:
        for i, (m0, m1, n0, n1) in zip(order, _place(shares, upright, m, n), strict=True):
            planes[i] = (m0, m1, n0, n1)
    else:
        for i, (n0, n1, m0, m1) in zip(order, _place(shares, lying, n, m), strict=True):
            planes[i] = (m0, m1, n0, n1)
    return planes


def _columns(shares: np.ndarray, height: int, width: int) -> tuple[float, list[int]]:
    """The cheapest cut of the sorted shares into columns: (sum of half-perimeters, borders into `shares`)."""
    p = len(shares)
    total = np.concatenate([[0.0], np.cumsum(shares)])
    index = np.arange(p + 1)
    best = np.zeros(p + 1)
    before = np.zeros(p + 1, dtype=np.int64)
    for j in range(1, p + 1):
        cost = best[:j] + (j - index[:j]) * (total[j] - total[:j]) * width + height
        before[j] = int(np.argmin(cost))
        best[j] = cost[before[j]]
    borders = [p]
    while borders[-1] > 0:
        borders.append(int(before[borders[-1]]))
    return float(best[p]), borders[::-1]


def _place(shares: np.ndarray, borders: list[int], height: int, width: int) -> list[Plane]:
    columns = [float(shares[a:b].sum()) for a, b in pairwise(borders)]
    column_edges = rounded_edges(columns, width)
    planes: list[Plane] = []
    for c, (a, b) in enumerate(pairwise(borders)):
        row_edges = rounded_edges([float(s) for s in shares[a:b]], height)
        planes += [(row_edges[i], row_edges[i + 1], column_edges[c], column_edges[c + 1]) for i in range(b - a)]
    return planes


def rounded_edges(parts: Sequence[float], length: int) -> list[int]:
    """Ascending integer borders 0 ... `length`, proportional to `parts`: multiples of 8 where the parts have room."""
    step = EDGE if length >= 2 * EDGE * len(parts) else 1
    whole = sum(parts)
    borders, done = [0], 0.0
    for part in parts[:-1]:
        done += part
        borders.append(min(length, max(borders[-1], step * round(done / whole * length / step))))
    return [*borders, length]
