"""Panels and strips: a tile's terms are its part of the product, and strips cover C with panels of fixed cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner import strips as strips_module
from planner.panels import PanelRows, sides, terms, whole_grain
from planner.shapes import EXACT, Device, Gemm, Grain, Grains, PlanLimits, Rect
from planner.strips import Lacks, strips, team_of
from planner.tiles import fits

LIMITS = PlanLimits()
Array = NDArray[np.int64]
gemms = st.builds(
    Gemm, st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40),
    a_by_k=st.booleans(), b_by_k=st.booleans(), b_uses=st.integers(1, 8),
)  # fmt: skip
summed = st.builds(
    Gemm, st.just(1), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), parts=st.integers(1, 4),
    a_by_k=st.booleans(), b_by_k=st.booleans(),
)  # fmt: skip


def device(name: str, flops: float = 1e9, memory: int = 1 << 30) -> Device:
    return Device(name, flops, memory, 1e7, 1e7, 0.001)


def panel_bytes(gemm: Gemm, operand: int, panel: PanelRows) -> int:
    side = sides(gemm.whole, gemm)[operand]
    return 4 * (panel.last - panel.first) * (side.lines if side.by_k else gemm.k)


def lacks_all(gemm: Gemm) -> Lacks:
    return lambda name, operand, panels: sum(panel_bytes(gemm, operand, panel) for panel in panels)


class Stored:
    """Operands of small integers as they are stored, and the product of any rectangle by the terms of the wire."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        draw = np.random.default_rng(1)
        self.a = draw.integers(-3, 4, (gemm.parts, gemm.batch, gemm.m, gemm.k))
        self.b = draw.integers(-3, 4, (gemm.parts, gemm.batch, gemm.n, gemm.k))

    def rows(self, operand: Array, by_k: bool, panel: PanelRows) -> Array:
        part = operand[panel.part]
        stored = part.transpose(0, 2, 1) if by_k else part
        rows: Array = stored.reshape(-1, stored.shape[2])[panel.first : panel.last]
        return rows

    def product(self, rect: Rect) -> Array:
        k0, k1 = rect.k_run(self.gemm)
        a = self.a[:, rect.b0 : rect.b1, rect.m0 : rect.m1, k0:k1]
        b = self.b[:, rect.b0 : rect.b1, rect.n0 : rect.n1, k0:k1]
        result: Array = np.einsum("pbmk,pbnk->bmn", a, b)
        return result

    def by_terms(self, rect: Rect, grains: Grains) -> Array:
        """What a device makes of the lease: the formulas of tileweave.protocol.messages.Term."""
        gemm = self.gemm
        c = np.zeros((rect.batch, rect.m, rect.n), np.int64)
        for term in terms(rect, gemm, grains):
            lines = []
            for operand, by_k, place, count in (
                (self.a, gemm.a_by_k, term.a, rect.m), (self.b, gemm.b_by_k, term.b, rect.n),
            ):  # fmt: skip
                panel = self.rows(operand, by_k, place.panel)
                height, width = (term.k, count) if by_k else (count, term.k)
                entries = []
                for i in range(rect.batch):
                    row = place.row + i * height
                    block = panel[row : row + height, place.column : place.column + width]
                    assert block.shape == (height, width), "the term reaches beyond its panel"
                    entries.append(block.T if by_k else block)
                lines.append(np.array(entries))
            c += np.einsum("bmk,bnk->bmn", *lines)
        return c


@settings(max_examples=200, deadline=None)
@given(st.one_of(gemms, summed), st.data())
def test_the_terms_of_a_tile_are_its_part_of_the_product(gemm: Gemm, data: st.DataObject) -> None:
    def run(length: int) -> tuple[int, int]:
        low = data.draw(st.integers(0, length - 1))
        return low, data.draw(st.integers(low + 1, length))

    rect = Rect(*run(gemm.batch), 0, gemm.m, 0, gemm.n)
    if rect.batch == 1:
        k0, k1 = run(gemm.k) if gemm.batch == 1 else (0, 0)
        rect = Rect(rect.b0, rect.b1, *run(gemm.m), *run(gemm.n), k0, k1)
    stored = Stored(gemm)
    assert (stored.by_terms(rect, EXACT) == stored.product(rect)).all()
    coarse = Grains(*(whole_grain(rect, gemm, side) for side in sides(rect, gemm)))
    assert (stored.by_terms(rect, coarse) == stored.product(rect)).all()


@settings(max_examples=150, deadline=None)
@given(st.one_of(gemms, summed), st.integers(1, 5), st.integers(1, 16), st.data())
def test_strips_cover_the_product_and_their_tiles_lie_in_fixed_panels(
    gemm: Gemm, devices: int, rows: int, data: st.DataObject
) -> None:
    fleet = {f"d{i}": device(f"d{i}", data.draw(st.sampled_from([1e8, 1e9, 2e9]))) for i in range(devices)}
    before = strips_module.STRIP_ROWS
    strips_module.STRIP_ROWS = rows  # so that small shapes have several panels
    try:
        made = strips(gemm, team_of(gemm, list(fleet.values())), fleet, LIMITS, lacks_all(gemm))
    finally:
        strips_module.STRIP_ROWS = before
    assert made is not None
    plan, cost_s = made
    assert cost_s >= plan.predicted_s > 0
    stored = Stored(gemm)
    total = np.zeros((gemm.batch, gemm.m, gemm.n), np.int64)
    covered = np.zeros((gemm.batch, gemm.m, gemm.n, gemm.k), np.int8)
    for share in plan.shares:
        for tile in share.tiles:
            assert fits(tile, gemm, fleet[share.device], LIMITS, share.grains)
            k0, k1 = tile.k_run(gemm)
            covered[tile.b0 : tile.b1, tile.m0 : tile.m1, tile.n0 : tile.n1, k0:k1] += 1
            total[tile.b0 : tile.b1, tile.m0 : tile.m1, tile.n0 : tile.n1] += stored.by_terms(tile, share.grains)
    assert (covered == 1).all()
    assert (total == stored.product(gemm.whole)).all()


def test_the_three_products_of_a_linear_layer_give_a_device_the_same_tokens() -> None:
    tokens, inputs, outputs = 4096, 384, 1536
    fleet = {f"d{i}": device(f"d{i}", 1e9 * (i + 1)) for i in range(4)}
    forward = Gemm(1, tokens, outputs, inputs, b_uses=8)
    backward = Gemm(1, tokens, inputs, outputs, b_by_k=True, b_uses=8)
    weights = Gemm(1, outputs, inputs, tokens, a_by_k=True, b_by_k=True)
    team = team_of(forward, list(fleet.values()))
    held: dict[str, set[tuple[str, PanelRows]]] = {name: set() for name in fleet}

    def run(gemm: Gemm, a: str, b: str) -> int:
        """Panels sent for this GEMM to the device with the most."""

        def lacks(name: str, operand: int, panels: Sequence[PanelRows]) -> float:
            missing = [panel for panel in panels if ((a, b)[operand], panel) not in held[name]]
            return sum(panel_bytes(gemm, operand, panel) for panel in missing)

        made = strips(gemm, team, fleet, LIMITS, lacks)
        assert made is not None
        sent = dict.fromkeys(fleet, 0)
        for share in made[0].shares:
            for tile in share.tiles:
                for term in terms(tile, gemm, share.grains):
                    for label, place in ((a, term.a), (b, term.b)):
                        new = (label, place.panel) not in held[share.device]
                        sent[share.device] += new
                        held[share.device].add((label, place.panel))
        return max(sent.values())

    assert run(forward, "x", "w") > 0
    assert run(forward, "x2", "w") > 0
    before = {name: {panel for label, panel in held[name] if label == "w"} for name in fleet}
    assert run(backward, "dy", "w") > 0
    assert {name: {panel for label, panel in held[name] if label == "w"} for name in fleet} == before
    assert run(weights, "dy", "x") == 0, "dW needs nothing that the device was not sent before"


def test_a_device_without_room_for_all_of_b_has_no_strip_of_rows() -> None:
    gemm = Gemm(1, 64, 2048, 2048, b_by_k=True)
    fleet = {"d0": device("d0", memory=1 << 20)}
    assert strips(gemm, {"d0": 1.0}, fleet, LIMITS, lacks_all(gemm)) is None


def test_a_device_without_room_leaves_its_strip_to_the_others() -> None:
    gemm = Gemm(1, 512, 512, 2048, b_by_k=True, b_uses=8)
    fleet = {name: device(name, memory=1 << 30) for name in ("d0", "d2")} | {"d1": device("d1", memory=1 << 21)}
    made = strips(gemm, team_of(gemm, list(fleet.values())), fleet, LIMITS, lacks_all(gemm))
    assert made is not None
    assert {share.device for share in made[0].shares} == {"d0", "d2"}
    assert sum(tile.elements for share in made[0].shares for tile in share.tiles) == 512 * 512


def test_the_team_leaves_out_who_would_get_next_to_nothing() -> None:
    gemm = Gemm(1, 1024, 1024, 1024)
    team = team_of(gemm, [device("fast", 1e9), device("also", 1e9), device("slow", 1e6)])
    assert set(team) == {"also", "fast"}
    assert sum(team.values()) == 1


def test_grain_cuts_do_not_depend_on_the_tile() -> None:
    gemm = Gemm(1, 100, 10, 10)
    grains = Grains(Grain(20, 80, 32), None)
    panels = {term.a.panel for m0 in range(20, 79) for term in terms(Rect(0, 1, m0, m0 + 1, 0, 10), gemm, grains)}
    assert panels == {PanelRows(0, 20, 32), PanelRows(0, 32, 64), PanelRows(0, 64, 80)}
