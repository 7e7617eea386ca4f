"""Strips: a GEMM divided along one of its axes so that what devices hold, or will need again, is not sent twice.

A training step multiplies the same numbers several times: a weight in every micro-batch's forward and backward pass,
an activation X in the forward pass and for dW, a gradient dY for dX and for dW. In all of them the tokens are an axis:
the rows of C for Y = X W and dX = dY W, the sum's k for dW = dY^T X, the batch in attention. Where every GEMM gives the
same device the same tokens, X and dY come to it once, W once a step, and only results go back:

    axis m      each device has a strip of A's lines, and all of B
    axis n      the same with A and B exchanged
    axis k      each has a strip of the sum: rows of both operands stored by k; the server adds the partial sums
    batch       each has a run of entries

`team_of` says how large each device's part of any axis is; the same team cuts axes of one length alike. `strips` tries
the axes and takes the one with the least makespan, not counting what a device holds already (`lacks`), and counting B
only by its share of the products that it is expected to be part of.

Left out: two axes at once, and moving a border to where the panels that a device holds happen to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from planner.panels import PanelRows, line_borders, panels_of, row_bytes, sides, stored_rows, whole_grain
from planner.shapes import Device, Gemm, Grain, Grains, Plan, PlanLimits, Rect, Share
from planner.tiles import EDGE, result_bytes, split, tile_seconds, tiles_wanted

Axis = Literal["batch", "m", "n", "k"]

STRIP_ROWS = 512
"""Rows of a panel that only one device needs: a tile can start before a long strip has come whole."""

WEIGHT_MIN = 0.25
"""A device whose part would be below this share of the mean is not worth its leases."""

Lacks = Callable[[str, int, Sequence[PanelRows]], float]
"""(device, 0 for A or 1 for B, panels) -> bytes of those panels that the device does not hold."""


def team_of(gemm: Gemm, fleet: Sequence[Device]) -> dict[str, float]:
    """Each device's part of every axis, by what it can do of this GEMM in a second; the parts add up to 1. Devices that
    would get next to nothing are left out. `fleet` must not be empty."""
    a, b = (row_bytes(side, gemm) for side in sides(gemm.whole, gemm))
    down = gemm.batch * gemm.parts * min(a * gemm.m, b * gemm.n)
    up = result_bytes(gemm.whole, gemm)
    rates = {
        device.device: 1 / max(gemm.flop / device.flops, down / device.down_bps, up / device.up_bps) for device in fleet
    }
    mean = sum(rates.values()) / len(rates)
    kept = {name: rate for name, rate in rates.items() if rate >= WEIGHT_MIN * mean}
    total = sum(kept.values())
    return {name: kept[name] / total for name in sorted(kept)}


def strips(
    gemm: Gemm, team: Mapping[str, float], fleet: Mapping[str, Device], limits: PlanLimits, lacks: Lacks
) -> tuple[Plan, float] | None:
    """The best strips for this team, and their cost in seconds; None where no device has the memory for its strip along
    any axis. A device that has not is left out, and its part shared by the others."""
    found: list[tuple[float, int, Plan]] = []
    for axis in _axes(gemm):
        members = dict(team)
        while members:
            made = _along(axis, gemm, members, fleet, limits, lacks)
            if not isinstance(made, str):
                found.append((made[1], len(found), made[0]))
                break
            del members[made]
            total = sum(members.values())
            members = {name: weight / total for name, weight in members.items()}
    if not found:
        return None
    cost_s, _, plan = min(found)
    return plan, cost_s


def _axes(gemm: Gemm) -> list[Axis]:
    if gemm.batch > 1:
        return ["batch"]
    axes: list[Axis] = ["m", "n"]
    return [*axes, "k"] if gemm.a_by_k and gemm.b_by_k else axes


@dataclass(frozen=True, slots=True)
class _Strip:
    device: Device
    rect: Rect
    grains: Grains


def _along(
    axis: Axis,
    gemm: Gemm,
    team: Mapping[str, float],
    fleet: Mapping[str, Device],
    limits: PlanLimits,
    lacks: Lacks,
) -> tuple[Plan, float] | str:
    """The plan and its cost; or the name of a device whose strip does not fit its memory."""
    cut = [
        _Strip(fleet[name], rect, _grains(axis, rect, gemm))
        for name, rect in zip(team, _rects(axis, gemm, list(team.values())), strict=True)
        if rect is not None
    ]
    shares: list[Share] = []
    slowest_s, sent = 0.0, 0.0
    for strip in cut:
        tiles = _tiles(strip, gemm, limits)
        if not tiles:
            return strip.device.device
        a, b = (
            lacks(strip.device.device, operand, panels_of(grain, gemm.parts))
            for operand, grain in enumerate(strip.grains)
            if grain is not None
        )
        new_bytes = a + b / gemm.b_uses
        sent += new_bytes + result_bytes(strip.rect, gemm)
        busy_s = max(
            new_bytes / strip.device.down_bps,
            strip.rect.flop(gemm) / strip.device.flops,
            result_bytes(strip.rect, gemm) / strip.device.up_bps,
            len(tiles) * limits.lease_seconds,
        )
        first_s = tile_seconds(tiles[0], gemm, strip.device, new_bytes / len(tiles), limits.lease_seconds)
        predicted_s = first_s + busy_s * (len(tiles) - 1) / len(tiles)
        slowest_s = max(slowest_s, predicted_s)
        shares.append(Share(strip.device.device, tiles, predicted_s, strip.grains))
    working = {share.device for share in shares}
    left_out = {name: "not needed: there are fewer strips than devices" for name in team if name not in working}
    plan = Plan(tuple(shares), slowest_s, left_out)
    return plan, max(slowest_s, sent / limits.server_bps) + len(shares) * limits.server_seconds


def _rects(axis: Axis, gemm: Gemm, weights: list[float]) -> list[Rect | None]:
    """A strip for each weight, in their order; None where it would be empty."""
    length = {"batch": gemm.batch, "m": gemm.m, "n": gemm.n, "k": gemm.k}[axis]
    unit = EDGE if axis != "batch" and length >= EDGE * len(weights) else 1
    borders = [0, *(min(length, round(length * done / unit) * unit) for done in accumulate(weights[:-1])), length]
    whole = gemm.whole
    rects: list[Rect | None] = []
    for low, high in pairwise(borders):
        if low == high:
            rects.append(None)
        elif axis == "batch":
            rects.append(replace(whole, b0=low, b1=high))
        elif axis == "m":
            rects.append(replace(whole, m0=low, m1=high))
        elif axis == "n":
            rects.append(replace(whole, n0=low, n1=high))
        else:
            rects.append(replace(whole, k0=low, k1=high))
    return rects


def _grains(axis: Axis, rect: Rect, gemm: Gemm) -> Grains:
    grains: list[Grain] = []
    for side, own in zip(sides(rect, gemm), ("m", "n"), strict=True):
        strip = axis == ("k" if side.by_k else own)
        first, last = stored_rows(rect, gemm, side)
        grains.append(Grain(first, last, STRIP_ROWS) if strip else whole_grain(rect, gemm, side))
    return Grains(*grains)


def _tiles(strip: _Strip, gemm: Gemm, limits: PlanLimits) -> tuple[Rect, ...]:
    """The strip's tiles, panel after panel; empty where they do not fit the device."""
    blocks = _blocks(strip.rect, gemm, strip.grains)
    wanted = tiles_wanted(strip.rect, gemm, strip.device, limits)
    tiles: list[Rect] = []
    for block in blocks:
        share = max(1, round(wanted * block.elements / strip.rect.elements))
        cut = split(block, gemm, strip.device, limits, share, strip.grains)
        if not cut:
            return ()
        tiles += cut
    return tuple(tiles)


def _blocks(rect: Rect, gemm: Gemm, grains: Grains) -> list[Rect]:
    """The rectangle cut where panels begin."""
    a, b = sides(rect, gemm)
    if rect.batch > 1 or gemm.batch > 1:
        borders = {rect.b0, rect.b1}
        for side, grain in ((a, grains.a), (b, grains.b)):
            assert grain is not None
            entries = grain.step // (gemm.k if side.by_k else side.lines)
            if entries:
                borders |= {entry for entry in range(rect.b0, rect.b1) if entry % entries == 0}
        return [replace(rect, b0=low, b1=high) for low, high in pairwise(sorted(borders))]
    return [
        replace(rect, m0=m0, m1=m1, n0=n0, n1=n1)
        for m0, m1 in pairwise(line_borders(rect, gemm, a, grains.a))
        for n0, n1 in pairwise(line_borders(rect, gemm, b, grains.b))
    ]
