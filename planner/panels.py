"""Which runs of an operand's stored rows are the panels of a tile, and where in them the tile's terms lie.

An operand is stored as a matrix for each part: by lines, `batch` x lines rows of k; or by k, `batch` x k rows of lines.
A panel is a run of its rows, whole. Panels that serve one tile only are exactly its rows; panels that are to serve
other tiles and other GEMMs again are cut where a `Grain` says, whatever the tile, so that they are the same each time.

    by lines:  a tile's rows lie in one panel; a run of k is a run of the panel's columns
    by k:      a tile's k may lie in several panels, each of which is a term of its sum

The tiles of a plan are cut so that this holds (`tiles.py`, `strips.py`).
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import NamedTuple

from planner.shapes import EXACT, Gemm, Grain, Grains, Rect

PANEL_BYTES_AIM = 4 << 20
"""A panel that a tile needs besides its own rows is cut to about this: a first tile need not wait for 64 MiB."""


class PanelRows(NamedTuple):
    """Rows [first, last) of a part's stored matrix."""

    part: int
    first: int
    last: int


class Place(NamedTuple):
    """Where a term's operand begins in its panel."""

    panel: PanelRows
    row: int
    column: int


class TermPlaces(NamedTuple):
    """One term of a tile's sum: `k` long, out of two panels."""

    k: int
    a: Place
    b: Place


class Side(NamedTuple):
    """One operand of a GEMM and what a rectangle needs of it: lines [l0, l1) of `lines`."""

    lines: int
    by_k: bool
    l0: int
    l1: int


def sides(rect: Rect, gemm: Gemm) -> tuple[Side, Side]:
    """A's and B's."""
    return (
        Side(gemm.m, gemm.a_by_k, rect.m0, rect.m1),
        Side(gemm.n, gemm.b_by_k, rect.n0, rect.n1),
    )


def row_bytes(side: Side, gemm: Gemm) -> float:
    """Bytes of a stored row."""
    return gemm.element_bytes * (side.lines if side.by_k else gemm.k)


def stored_rows(rect: Rect, gemm: Gemm, side: Side) -> tuple[int, int]:
    """The run of stored rows that the rectangle needs."""
    if side.by_k:
        k0, k1 = rect.k_run(gemm)
        return rect.b0 * gemm.k + k0, (rect.b1 - 1) * gemm.k + k1
    return rect.b0 * side.lines + side.l0, (rect.b1 - 1) * side.lines + side.l1


def whole_grain(rect: Rect, gemm: Gemm, side: Side) -> Grain:
    """Panels of about PANEL_BYTES_AIM of all that the rectangle needs; whole entries of a batch."""
    unit = (gemm.k if side.by_k else side.lines) if gemm.batch > 1 else 1
    step = unit * max(1, int(PANEL_BYTES_AIM / (unit * row_bytes(side, gemm))))
    return Grain(*stored_rows(rect, gemm, side), step)


def terms(rect: Rect, gemm: Gemm, grains: Grains = EXACT) -> tuple[TermPlaces, ...]:
    """The terms of a tile's sum, in the order of k within each part."""
    both = sides(rect, gemm)
    cut = [_grain(rect, gemm, side, grain) for side, grain in zip(both, grains, strict=True)]
    k0, k1 = rect.k_run(gemm)
    borders = {k0, k1}
    if rect.batch == 1:
        for side, grain in zip(both, cut, strict=True):
            if side.by_k:
                base = rect.b0 * gemm.k
                first = (base + k0) // grain.step + 1
                borders |= {step * grain.step - base for step in range(first, ceil((base + k1) / grain.step))}
    places: list[TermPlaces] = []
    for part in range(gemm.parts):
        for low, high in pairwise(sorted(borders)):
            a, b = (_place(rect, gemm, s, g, part, low) for s, g in zip(both, cut, strict=True))
            places.append(TermPlaces(high - low, a, b))
    return tuple(places)


def panels_bytes(rect: Rect, gemm: Gemm, grains: Grains = EXACT) -> tuple[float, float, float]:
    """Bytes of a tile's panels of A, of B, and of the largest of them all."""
    sums, largest = [0.0, 0.0], 0.0
    each = terms(rect, gemm, grains)
    for number, side in enumerate(sides(rect, gemm)):
        row = row_bytes(side, gemm)
        for panel in {(term.a, term.b)[number].panel for term in each}:
            size = row * (panel.last - panel.first)
            sums[number] += size
            largest = max(largest, size)
    return sums[0], sums[1], largest


def panels_of(grain: Grain, parts: int) -> tuple[PanelRows, ...]:
    """All panels of a run of stored rows, of each part."""
    inside = range((grain.first // grain.step + 1) * grain.step, grain.last, grain.step)
    borders = [grain.first, *inside, grain.last]
    return tuple(PanelRows(part, low, high) for part in range(parts) for low, high in pairwise(borders))


def line_borders(rect: Rect, gemm: Gemm, side: Side, grain: Grain | None) -> list[int]:
    """Where a rectangle of one batch entry has to be cut along the side's lines, so that each piece lies in one panel:
    its first line, those at which panels begin, and its end."""
    if grain is None or side.by_k:
        return [side.l0, side.l1]
    base = rect.b0 * side.lines
    first = (base + side.l0) // grain.step + 1
    inside = [step * grain.step - base for step in range(first, ceil((base + side.l1) / grain.step))]
    return [side.l0, *inside, side.l1]


def _grain(rect: Rect, gemm: Gemm, side: Side, grain: Grain | None) -> Grain:
    if grain is not None:
        return grain
    first, last = stored_rows(rect, gemm, side)
    if side.by_k and rect.batch == 1:
        return Grain(first, last, max(1, int(PANEL_BYTES_AIM / row_bytes(side, gemm))))
    return Grain(first, last, last)


def _place(rect: Rect, gemm: Gemm, side: Side, grain: Grain, part: int, k: int) -> Place:
    if side.by_k:
        row, column = rect.b0 * gemm.k + k, side.l0
    else:
        row, column = rect.b0 * side.lines + side.l0, k
    border = row // grain.step * grain.step
    first, last = max(grain.first, border), min(grain.last, border + grain.step)
    return Place(PanelRows(part, first, last), row - first, column)
