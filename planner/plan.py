"""The plan: which device computes which part of one GEMM.

Three steps. (1) How much can each device do in a time tau? The least of what its kernel, its downlink, its uplink and
its memory allow, after the round trip: see `_elements_within`. The makespan is the tau at which the fleet does all of
C, found by bisection, for the best 1, 2, 3 ... devices at once; the number of devices is the one with the least tau
plus the server's serial work for them, so that a small GEMM stays whole and a slow device is left out, with its reason.
(2) C is divided into rectangles of those areas (`partition`), a batched GEMM along its batch. (3) Each rectangle is cut
into tiles for its device (`tiles.cut`).

A training step repeats the same few shapes, so plans are memoised by shape and fleet, with the devices' rates rounded
to a grid of 9% steps: a fleet whose measurements move a little has the same plan.

Left out: k-splits and what devices already hold (strips.py), sharing of the server's own links, and work queued from
another GEMM.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.panels import row_bytes, sides
from planner.partition import partition
from planner.shapes import Device, Gemm, Plan, PlanLimits, Rect, Share
from planner.tiles import TILE_LEASES_MIN, cut, panel_bytes, result_bytes, smallest_tile_bytes, tile_seconds

Floats = NDArray[np.float64]

RATE_STEPS = 8
"""Steps per doubling of the grid to which rates are rounded."""

EIGHTHS = 8
"""A batch entry is shared in parts of this fineness, so that no device gets a sliver of one."""

ALL_COUNTS_MAX = 16
"""Up to this many devices every number of them is tried; beyond, numbers that grow by a fifth."""


def plan(gemm: Gemm, fleet: Sequence[Device], limits: PlanLimits) -> Plan:
    """Shares of `gemm` for `fleet`. They cover C exactly; without any share where no device can take part, and then
    `left_out` says why for each. The returned plan is shared: do not change it."""
    return _plan(gemm, tuple(_rounded(device) for device in fleet), limits)


def _rounded(device: Device) -> Device:
    return dataclasses.replace(
        device,
        flops=_grid(device.flops),
        memory_bytes=device.memory_bytes >> 20 << 20 if device.memory_bytes >= 1 << 20 else device.memory_bytes,
        down_bps=_grid(device.down_bps),
        up_bps=_grid(device.up_bps),
        rtt_s=_grid(max(device.rtt_s, 1e-4)),
    )


def _grid(value: float) -> float:
    return float(2.0 ** (round(math.log2(max(value, 1e-9)) * RATE_STEPS) / RATE_STEPS))


@lru_cache(maxsize=1024)
def _plan(gemm: Gemm, fleet: tuple[Device, ...], limits: PlanLimits) -> Plan:
    left_out: dict[str, str] = {}
    able: list[Device] = []
    need = smallest_tile_bytes(gemm)
    row = max(row_bytes(side, gemm) for side in sides(gemm.whole, gemm))
    for device in fleet:
        if row > limits.panel_bytes_max:
            left_out[device.device] = f"one row of {row:.0f} bytes exceeds a panel's {limits.panel_bytes_max}"
        elif device.memory_bytes < need:
            left_out[device.device] = f"memory: has {device.memory_bytes} bytes, the smallest tile needs {need}"
        else:
            able.append(device)
    if not able:
        return Plan((), 0.0, left_out)
    able.sort(key=lambda device: (_solo_seconds(gemm, device, limits), device.device))
    chosen, areas = _choose(gemm, able, limits)
    shares: list[Share] = []
    for device, rects in zip(chosen, _divide(gemm, chosen, areas, limits), strict=True):
        tiles = tuple(tile for rect in rects for tile in cut(rect, gemm, device, limits))
        if tiles:
            shares.append(Share(device.device, tiles, _share_seconds(gemm, device, rects, tiles, limits)))
    working = {share.device for share in shares}
    predicted_s = max(share.predicted_s for share in shares)
    for device in able:
        if device.device not in working:
            left_out[device.device] = _why_idle(gemm, device, predicted_s, limits)
    return Plan(tuple(shares), predicted_s, left_out)


def _solo_seconds(gemm: Gemm, device: Device, limits: PlanLimits) -> float:
    return _stage_seconds(gemm, device, [gemm.whole]) + device.rtt_s + limits.lease_seconds


def _stage_seconds(gemm: Gemm, device: Device, rects: Sequence[Rect]) -> float:
    """Seconds of the slowest stage: transfers and kernel overlap across tiles."""
    return max(
        sum(sum(panel_bytes(rect, gemm)) for rect in rects) / device.down_bps,
        sum(rect.flop(gemm) for rect in rects) / device.flops,
        sum(result_bytes(rect, gemm) for rect in rects) / device.up_bps,
    )


def _share_seconds(
    gemm: Gemm, device: Device, rects: Sequence[Rect], tiles: Sequence[Rect], limits: PlanLimits
) -> float:
    """The slowest stage of all tiles, but at least one lease cost each; plus the first tile, which nothing overlaps."""
    steady = max(_stage_seconds(gemm, device, rects), len(tiles) * limits.lease_seconds)
    first = tile_seconds(tiles[0], gemm, device, sum(panel_bytes(tiles[0], gemm)), limits.lease_seconds)
    return first + steady * (len(tiles) - 1) / len(tiles)


def _choose(gemm: Gemm, able: list[Device], limits: PlanLimits) -> tuple[list[Device], list[float]]:
    """The devices to use, of those sorted best first, and the elements of C that each should have."""
    counts = _counts(len(able))
    flops, down, up, rtt = (
        np.array([getattr(device, name) for device in able]) for name in ("flops", "down_bps", "up_bps", "rtt_s")
    )
    idle = rtt + limits.lease_seconds
    capacity = _memory_elements(gemm, able)
    total = float(gemm.whole.elements)
    used = np.arange(len(able))[None, :] < np.array(counts)[:, None]  # count x device

    def elements(tau: Floats) -> Floats:
        busy = np.maximum(tau[:, None] - idle[None, :], 0.0)
        return np.where(used, np.minimum(_elements_within(gemm, busy, flops, down, up), capacity), 0.0)

    low = np.zeros(len(counts))
    high = np.full(len(counts), max(_solo_seconds(gemm, device, limits) for device in able) * 1.01)
    for _ in range(30):
        middle = (low + high) / 2
        enough = elements(middle).sum(axis=1) >= total
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
        if float(np.max((high - low) / high)) < 1e-3:
            break
    best = int(np.argmin(high + np.array(counts) * limits.server_seconds))
    areas = elements(high)[best]
    return (
        [device for device, area in zip(able, areas, strict=True) if area > 0],
        [float(area) for area in areas if area > 0],
    )


def _counts(devices: int) -> list[int]:
    counts = list(range(1, min(devices, ALL_COUNTS_MAX) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, counts[-1] * 6 // 5))
    return counts


def _elements_within(gemm: Gemm, busy: Floats, flops: Floats, down: Floats, up: Floats) -> Floats:
    """Elements of C that a device's kernel, downlink and uplink each allow in `busy` seconds; the least of them. The
    downlink carries b k (rows + columns): a square while it is narrower than C, then a strip of C's short side."""
    kernel = busy * flops / (2 * gemm.depth)
    uplink = busy * up / gemm.result_bytes
    perimeter = busy * down / (gemm.element_bytes * gemm.depth)
    if gemm.batch > 1:
        downlink = perimeter * (gemm.m * gemm.n / (gemm.m + gemm.n))
    else:
        short = min(gemm.m, gemm.n)
        downlink = np.where(perimeter <= 2 * short, (perimeter / 2) ** 2, short * (perimeter - short))
    return np.minimum(np.minimum(kernel, uplink), downlink)


def _memory_elements(gemm: Gemm, able: list[Device]) -> Floats:
    """Elements whose panels a device can hold at once (half of its memory), so that none is sent twice; where the whole
    fleet cannot hold C so, no cap: devices then drop panels and get them again."""
    total = float(gemm.whole.elements)
    if gemm.batch > 1:
        return np.full(len(able), total)
    perimeter = np.array([device.memory_bytes for device in able]) / (2 * gemm.element_bytes * gemm.depth)
    short = min(gemm.m, gemm.n)
    held = np.where(perimeter <= 2 * short, (perimeter / 2) ** 2, short * (perimeter - short))
    return held if float(held[0]) >= total else np.full(len(able), total)


def _divide(gemm: Gemm, chosen: list[Device], areas: list[float], limits: PlanLimits) -> list[list[Rect]]:
    """Rectangles of C for each device. Along the batch each device has a run; where entries are few and heavy, a run
    may begin and end inside an entry, which is then partitioned among the devices that share it."""
    whole = sum(areas)
    borders = [0.0, *(gemm.batch * done / whole for done in accumulate(areas[:-1])), float(gemm.batch)]
    entry = Rect(0, 1, 0, gemm.m, 0, gemm.n)
    entry_s = min(_stage_seconds(gemm, device, [entry]) for device in chosen)
    light = entry_s < 2 * TILE_LEASES_MIN * limits.lease_seconds or gemm.batch >= 4 * len(chosen)
    steps = 1 if light else EIGHTHS
    if gemm.batch > 1:
        borders = [round(border * steps) / steps for border in borders]
    rects: list[list[Rect]] = [[] for _ in chosen]
    shared: dict[int, list[tuple[int, float]]] = {}
    for i, (start, stop) in enumerate(pairwise(borders)):
        first, last = math.ceil(start), math.floor(stop)
        if first < last:
            rects[i].append(Rect(first, last, 0, gemm.m, 0, gemm.n))
        for b in {math.floor(start), math.ceil(stop) - 1}:
            part = min(stop, b + 1) - max(start, b)
            if part > 0 and not first <= b < last:
                shared.setdefault(b, []).append((i, part))
    for b, parts in shared.items():
        planes = partition([part for _, part in parts], gemm.m, gemm.n)
        for (i, _), (m0, m1, n0, n1) in zip(parts, planes, strict=True):
            if m0 < m1 and n0 < n1:
                rects[i].append(Rect(b, b + 1, m0, m1, n0, n1))
    return rects


def _why_idle(gemm: Gemm, device: Device, predicted_s: float, limits: PlanLimits) -> str:
    alone = {
        "kernel": gemm.flop / device.flops,
        "downlink": sum(panel_bytes(gemm.whole, gemm)) / device.down_bps,
        "uplink": result_bytes(gemm.whole, gemm) / device.up_bps,
        "round trip": device.rtt_s,
    }
    stage = max(alone, key=lambda name: alone[name])
    if alone[stage] <= limits.server_seconds + predicted_s:
        return f"not needed: the plan takes {predicted_s:.3g} s, and a further lease would cost more than it saves"
    return f"too slow to help: its {stage} would take {alone[stage]:.3g} s alone, the plan takes {predicted_s:.3g} s"
