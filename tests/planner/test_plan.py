"""The planner: exact cover, memory and limits for any shape and fleet; the shapes that a plan should have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.partition import partition
from planner.plan import plan
from planner.shapes import Device, Gemm, Plan, PlanLimits, Rect
from planner.tiles import cut, fits, panel_bytes, smallest_tile_bytes, split, tile_seconds

LIMITS = PlanLimits()


def device(number: int = 0, flops: float = 45e9, memory: int = 1 << 30, link: float = 3e8, rtt: float = 1e-3) -> Device:
    return Device(f"d{number}", flops, memory, link, link, rtt)


def cover(gemm: Gemm, rects: list[Rect]) -> bool:
    count = np.zeros((gemm.batch, gemm.m, gemm.n), dtype=np.int64)
    for rect in rects:
        assert rect.elements > 0
        assert rect.batch == 1 or (rect.m, rect.n) == (gemm.m, gemm.n), "not one contiguous run of rows"
        count[rect.b0 : rect.b1, rect.m0 : rect.m1, rect.n0 : rect.n1] += 1
    return bool((count == 1).all())


def tiles_of(made: Plan) -> list[Rect]:
    return [tile for share in made.shares for tile in share.tiles]


dimension = st.one_of(st.integers(1, 200), st.sampled_from([1, 2, 7, 8, 127, 128, 251, 384]))
gemms = st.builds(Gemm, batch=st.one_of(st.just(1), st.integers(1, 24)), m=dimension, n=dimension, k=dimension)
small_gemms = st.builds(
    Gemm, batch=st.one_of(st.just(1), st.integers(1, 4)), m=st.integers(1, 60), n=st.integers(1, 60), k=dimension
)
fleets = st.lists(
    st.tuples(
        st.floats(1e5, 1e13),
        st.integers(1 << 14, 1 << 30),
        st.floats(1e4, 1e10),
        st.floats(1e3, 1e10),
        st.floats(0, 2),
    ),
    min_size=1,
    max_size=14,
).map(lambda rows: [Device(f"d{i}", *row) for i, row in enumerate(rows)])


@settings(max_examples=250, deadline=None)
@given(gemms, fleets, st.sampled_from([0.0001, 0.002, 0.05]))
def test_plans_cover_exactly_within_memory_and_limits(gemm: Gemm, fleet: list[Device], lease_seconds: float) -> None:
    limits = PlanLimits(panel_bytes_max=1 << 14, result_bytes_max=1 << 15, lease_seconds=lease_seconds)
    made = plan(gemm, fleet, limits)
    by_name = {entry.device: entry for entry in fleet}
    working = [share.device for share in made.shares]
    assert len(set(working)) == len(working)
    assert set(working) | made.left_out.keys() == by_name.keys()
    assert not set(working) & made.left_out.keys()
    if not made.shares:
        assert all(entry.memory_bytes < smallest_tile_bytes(gemm) for entry in fleet)
        return
    assert cover(gemm, tiles_of(made))
    assert made.predicted_s == max(share.predicted_s for share in made.shares) > 0
    for share in made.shares:
        for tile in share.tiles:
            assert fits(tile, gemm, by_name[share.device], limits)
            assert max(panel_bytes(tile, gemm)) <= limits.panel_bytes_max


@settings(max_examples=200, deadline=None)
@given(small_gemms, st.integers(1 << 11, 1 << 24), st.integers(1, 80), st.data())
def test_a_rectangle_is_cut_exactly_for_another_device(
    gemm: Gemm, memory: int, wanted: int, data: st.DataObject
) -> None:
    rect = gemm.whole
    if gemm.batch == 1:
        m0 = data.draw(st.integers(0, gemm.m - 1))
        n0 = data.draw(st.integers(0, gemm.n - 1))
        rect = Rect(0, 1, m0, data.draw(st.integers(m0 + 1, gemm.m)), n0, data.draw(st.integers(n0 + 1, gemm.n)))
    pieces = split(rect, gemm, device(memory=memory), LIMITS, wanted)
    assert bool(pieces) == (memory >= smallest_tile_bytes(gemm))
    if not pieces:
        return
    assert sum(piece.elements for piece in pieces) == rect.elements
    whole = [piece for piece in pieces if (piece.m, piece.n) == (gemm.m, gemm.n)]
    assert len(whole) == len(pieces) or all(piece.batch == 1 for piece in pieces)
    rest = [] if rect == gemm.whole else outside(rect, gemm)
    assert cover(gemm, [*pieces, *rest])


def outside(rect: Rect, gemm: Gemm) -> list[Rect]:
    sides = [
        Rect(0, 1, 0, rect.m0, 0, gemm.n),
        Rect(0, 1, rect.m1, gemm.m, 0, gemm.n),
        Rect(0, 1, rect.m0, rect.m1, 0, rect.n0),
        Rect(0, 1, rect.m0, rect.m1, rect.n1, gemm.n),
    ]
    return [side for side in sides if side.elements]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40), st.integers(1, 300), st.integers(1, 300))
def test_partition_covers_the_plane(areas: list[float], m: int, n: int) -> None:
    planes = partition(areas, m, n)
    assert len(planes) == len(areas)
    rects = [Rect(0, 1, m0, m1, n0, n1) for m0, m1, n0, n1 in planes if m0 < m1 and n0 < n1]
    assert cover(Gemm(1, m, n, 1), rects)


def test_partition_stays_near_the_perimeter_bound() -> None:
    generator = np.random.default_rng(1)
    for p in (4, 13, 60):
        areas = [float(area) for area in generator.uniform(1, 10, p)]
        edge = 4096
        planes = partition(areas, edge, edge)
        perimeter = sum((m1 - m0) + (n1 - n0) for m0, m1, n0, n1 in planes)
        bound = 2 * sum((area / sum(areas)) ** 0.5 for area in areas) * edge
        assert perimeter <= 1.1 * bound, f"p={p}: {perimeter / bound:.3f} of the bound"
        got = [(m1 - m0) * (n1 - n0) / edge**2 for m0, m1, n0, n1 in planes]
        assert got == pytest.approx([area / sum(areas) for area in areas], rel=0.15)


def test_a_large_product_on_one_fast_device_is_sixty_four_squares_in_growing_square_order() -> None:
    (share,) = plan(Gemm(1, 2048, 2048, 2048), [device()], LIMITS).shares
    assert {(tile.m, tile.n) for tile in share.tiles} == {(256, 256)}
    assert len(share.tiles) == 64
    cells = [(tile.m0 // 256, tile.n0 // 256) for tile in share.tiles[:9]]
    assert cells == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_a_small_product_is_one_tile_and_the_other_device_is_told_why() -> None:
    made = plan(Gemm(1, 128, 128, 128), [device(0), device(1)], LIMITS)
    assert len(tiles_of(made)) == 1
    assert "not needed" in made.left_out["d1"]


def test_attention_is_cut_along_its_batch() -> None:
    made = plan(Gemm(64, 128, 128, 32), [device(0), device(1)], LIMITS)
    assert len(made.shares) == 2
    assert all((tile.m, tile.n) == (128, 128) for tile in tiles_of(made))


def test_a_few_heavy_entries_are_shared_inside() -> None:
    gemm = Gemm(2, 1024, 1024, 1024)
    made = plan(gemm, [device(i) for i in range(3)], LIMITS)
    assert len(made.shares) == 3
    flop = [sum(tile.elements for tile in share.tiles) / gemm.whole.elements for share in made.shares]
    assert flop == pytest.approx([1 / 3] * 3, abs=0.07)


def test_shares_follow_speed_and_hopeless_devices_are_left_out_with_a_reason() -> None:
    fleet = [
        device(0, flops=40e9),
        device(1, flops=10e9),
        device(2, flops=1e7),
        device(3, link=1e3),
        device(4, memory=99),
    ]
    made = plan(Gemm(1, 2048, 2048, 2048), fleet, LIMITS)
    elements = {share.device: sum(tile.elements for tile in share.tiles) for share in made.shares}
    assert 3 < elements["d0"] / elements["d1"] < 5
    assert "kernel" in made.left_out["d2"]
    assert "link" in made.left_out["d3"]
    assert "memory" in made.left_out["d4"]


def test_no_device_or_no_memory_gives_no_shares() -> None:
    assert plan(Gemm(1, 8, 8, 8), [], LIMITS).shares == ()
    gemm = Gemm(1, 4, 4, 1 << 24)
    assert cut(gemm.whole, gemm, device(memory=64 << 20), LIMITS) == ()
    made = plan(gemm, [device(memory=64 << 20)], LIMITS)
    assert made.shares == ()
    assert str(smallest_tile_bytes(gemm)) in made.left_out["d0"]


def test_a_thousand_devices() -> None:
    fleet = [device(i, flops=1e10 * (1 + i % 7)) for i in range(1000)]
    gemm = Gemm(1, 3000, 3000, 8192)
    made = plan(gemm, fleet, LIMITS)
    assert cover(gemm, tiles_of(made))
    assert len(made.shares) > 50


def test_a_fleet_that_drifts_a_little_keeps_its_plan() -> None:
    gemm = Gemm(1, 512, 512, 512)
    assert plan(gemm, [device(flops=45.0e9)], LIMITS) is plan(gemm, [device(flops=45.2e9)], LIMITS)


def test_seconds_of_a_tile_are_the_sum_of_its_stages() -> None:
    gemm = Gemm(1, 100, 100, 100)
    one = Device("d", 1e6, 1 << 30, 1e4, 2e4, 0.5)
    assert tile_seconds(gemm.whole, gemm, one, 80_000, 0.25) == pytest.approx(0.5 + 0.25 + 8.0 + 2.0 + 2.0)
