"""Tiles: what one costs on a device, and how a rectangle is cut into them for one device.

A tile is moved as panels of A and of B (panels.py) and one result. The idea of `cut`: large enough that a
lease's fixed cost and the round trip disappear in it, small enough that a share has tiles to overlap (one downloads,
one computes, one uploads) and that a lost one costs little; near-square, because panel bytes grow with the
half-perimeter. The order is a growing square, so that each new panel serves as many tiles as possible at once.

Left out: streaming a tile's operands in chunks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from planner.panels import panels_bytes, terms
from planner.shapes import EXACT, Device, Gemm, Grains, PlanLimits, Rect

EDGE = 8
"""Tile edges are multiples of this where there is room: a kernel's register block and a cache line of results."""

TILES_AIM = 64
"""Tiles of a large share: an 8 x 8 grid comes within 1.1-1.2 of a perfectly overlapped share."""

TILE_LEASES_MIN = 4
"""A tile should take this many times the fixed cost of its lease."""

TILE_SECONDS_MAX = 2.0
"""A tile longer than this is cut further: it is what a lost device costs."""


def panel_bytes(rect: Rect, gemm: Gemm) -> tuple[float, float]:
    """Bytes of the rectangle's panels of A and of B, by themselves."""
    a, b, _ = panels_bytes(rect, gemm)
    return a, b


def result_bytes(rect: Rect, gemm: Gemm) -> int:
    """Bytes of the rectangle of C."""
    return gemm.result_bytes * rect.elements


def tile_seconds(rect: Rect, gemm: Gemm, device: Device, new_panel_bytes: float, lease_seconds: float) -> float:
    """Seconds from sending a lease to its result on an idle device that must first download `new_panel_bytes`: the sum
    of all stages, since within one tile nothing overlaps."""
    return (
        device.rtt_s
        + lease_seconds
        + new_panel_bytes / device.down_bps
        + rect.flop(gemm) / device.flops
        + result_bytes(rect, gemm) / device.up_bps
    )


def fits(rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits, grains: Grains = EXACT) -> bool:
    """May this be one tile of that device? Its panels and result within the wire's limits, and the memory holding two
    such tiles, so that one can arrive while the other computes."""
    a, b, largest = panels_bytes(rect, gemm, grains)
    result = result_bytes(rect, gemm)
    return (
        largest <= limits.panel_bytes_max
        and result <= limits.result_bytes_max
        and 2 * (a + b + result) <= device.memory_bytes
        and _terms_at_most(rect, gemm, grains) <= limits.terms_max
    )


def _terms_at_most(rect: Rect, gemm: Gemm, grains: Grains) -> int:
    if gemm.parts == 1 and not (gemm.a_by_k or gemm.b_by_k):
        return 1
    return len(terms(rect, gemm, grains))


def smallest_tile_bytes(gemm: Gemm) -> int:
    """Memory a device must have to take any part of this GEMM: two tiles of one element, or of a partial sum of it
    where an operand lies by k."""
    k1 = 1 if gemm.a_by_k or gemm.b_by_k else 0
    a, b, _ = panels_bytes(Rect(0, 1, 0, 1, 0, 1, 0, k1), gemm)
    return int(2 * (a + b + gemm.result_bytes))


def cut(rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits) -> tuple[Rect, ...]:
    """Cut `rect` into tiles for `device`, in the order they should go out; they cover it exactly. Empty where not even
    one element fits the device's memory or the limits."""
    return split(rect, gemm, device, limits, tiles_wanted(rect, gemm, device, limits))


def tiles_wanted(rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits) -> int:
    """How many tiles this rectangle should be, by time alone."""
    seconds = tile_seconds(rect, gemm, device, sum(panel_bytes(rect, gemm)), 0.0) - device.rtt_s
    seconds_min = max(TILE_LEASES_MIN * limits.lease_seconds, device.rtt_s / 2)
    aim = min(TILES_AIM, int(seconds / seconds_min)) if seconds_min > 0 else TILES_AIM
    return max(1, min(max(aim, math.ceil(seconds / TILE_SECONDS_MAX)), limits.tiles_per_share_max))


def split(
    rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits, wanted: int, grains: Grains = EXACT
) -> tuple[Rect, ...]:
    """Cut into about `wanted` tiles, more where they would not fit; empty where nothing fits. With grains the rectangle
    must lie within one panel of each operand that lies by lines."""
    if rect.batch == 1:
        return _split_entry(rect, gemm, device, limits, wanted, grains)
    entry = replace(rect, b1=rect.b0 + 1)
    if wanted <= rect.batch and fits(entry, gemm, device, limits, grains):
        runs = wanted
        while not all(fits(tile, gemm, device, limits, grains) for tile in _batch_runs(rect, runs)):
            runs = min(2 * runs, rect.batch)
        return tuple(_batch_runs(rect, runs))
    each = math.ceil(wanted / rect.batch)
    tiles: list[Rect] = []
    for b in range(rect.b0, rect.b1):
        plane = _split_entry(replace(rect, b0=b, b1=b + 1), gemm, device, limits, each, grains)
        if not plane:
            return ()
        tiles += plane
    return tuple(tiles)


def edges(start: int, stop: int, parts: int) -> list[int]:
    """`parts` + 1 ascending borders of nearly even parts; multiples of `EDGE` from `start` where each part has room."""
    length = stop - start
    step = EDGE if length >= EDGE * parts else 1
    units = -(-length // step)
    return [start + min(length, step * (i * units // parts)) for i in range(parts)] + [stop]


def _batch_runs(rect: Rect, runs: int) -> list[Rect]:
    borders = [rect.b0 + i * rect.batch // runs for i in range(runs + 1)]
    return [replace(rect, b0=b0, b1=b1) for b0, b1 in pairwise(borders) if b1 > b0]


def _split_entry(
    rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits, wanted: int, grains: Grains
) -> tuple[Rect, ...]:
    """Along k too where an operand lies by k and not one element fits otherwise: the sums of the runs are added."""
    k0, k1 = rect.k_run(gemm)
    runs = [rect]
    least = replace(rect, m1=rect.m0 + 1, n1=rect.n0 + 1)
    while not all(fits(replace(least, k0=run.k0, k1=run.k1), gemm, device, limits, grains) for run in runs):
        parts = 2 * len(runs)
        if parts > k1 - k0 or not (gemm.a_by_k or gemm.b_by_k):
            return ()
        runs = [replace(rect, k0=low, k1=high) for low, high in pairwise(edges(k0, k1, parts))]
    planes = [_split_plane(run, gemm, device, limits, max(1, wanted // len(runs)), grains) for run in runs]
    return tuple(tile for plane in planes for tile in plane) if all(planes) else ()


def _split_plane(
    rect: Rect, gemm: Gemm, device: Device, limits: PlanLimits, wanted: int, grains: Grains
) -> tuple[Rect, ...]:
    edge = math.sqrt(rect.m * rect.n / wanted)
    rows = max(1, min(rect.m, round(rect.m / edge), wanted))
    columns = max(1, min(rect.n, round(wanted / rows)))
    while True:
        row_edges, column_edges = edges(rect.m0, rect.m1, rows), edges(rect.n0, rect.n1, columns)
        height = max(b - a for a, b in pairwise(row_edges))
        width = max(b - a for a, b in pairwise(column_edges))
        largest = replace(rect, m1=rect.m0 + height, n1=rect.n0 + width)
        if fits(largest, gemm, device, limits, grains):
            break
        if height == width == 1:
            return ()
        if height >= width:
            rows = min(rect.m, rows * 2)
        else:
            columns = min(rect.n, columns * 2)
    return tuple(
        replace(rect, m0=row_edges[i], m1=row_edges[i + 1], n0=column_edges[j], n1=column_edges[j + 1])
        for i, j in _growing_square(rows, columns)
    )


def _growing_square(rows: int, columns: int) -> list[tuple[int, int]]:
    """Grid cells in the order (0,0), (0,1), (1,0), (1,1), (0,2), ...: shell s adds column s, then row s."""
    order: list[tuple[int, int]] = []
    for s in range(max(rows, columns)):
        if s < columns:
            order += [(i, s) for i in range(min(s, rows))]
        if s < rows:
            order += [(s, j) for j in range(min(s + 1, columns))]
    return order
