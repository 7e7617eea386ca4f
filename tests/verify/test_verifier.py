"""What the verifier keeps between tiles, when it lets go of it, and that threads do not disturb each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.coordinator.events import Check
from backend.verify.operand import Operand
from backend.verify.verifier import KEPT_BYTES_MAX, Verifier
from planner.shapes import Gemm, Rect

F32 = NDArray[np.float32]


class Entropy:
    """Counts the seeds that were asked for, each different and the same in every run."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, size: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(size, "little")


def opened(gemm: Gemm, gemm_id: int = 1, kept_bytes_max: int = KEPT_BYTES_MAX) -> tuple[Verifier, Entropy, F32]:
    """A verifier with one GEMM open, its entropy, and the product."""
    g = np.random.default_rng(gemm_id)
    a = g.standard_normal((gemm.batch, gemm.m, gemm.k), dtype=np.float32)
    bt = g.standard_normal((gemm.batch, gemm.n, gemm.k), dtype=np.float32)
    entropy = Entropy()
    verifier = Verifier(entropy, kept_bytes_max)
    verifier.open_gemm(gemm_id, Operand.of(a), Operand.of(bt))
    return verifier, entropy, np.matmul(a, bt.transpose(0, 2, 1))


def of(c: F32, rect: Rect) -> F32:
    return np.ascontiguousarray(c[rect.b0 : rect.b1, rect.m0 : rect.m1, rect.n0 : rect.n1])


def grid(gemm: Gemm, rows: int, columns: int) -> list[Rect]:
    return [
        Rect(0, 1, m, min(m + rows, gemm.m), n, min(n + columns, gemm.n))
        for m in range(0, gemm.m, rows)
        for n in range(0, gemm.n, columns)
    ]


GEMM = Gemm(1, 48, 40, 64)


@pytest.mark.parametrize("prepared", [True, False])
def test_tiles_of_a_gemm_are_checked_each_against_its_own_place(prepared: bool) -> None:
    verifier, _, c = opened(GEMM)
    rects = grid(GEMM, 20, 16)
    for rect in rects if prepared else []:
        verifier.prepare(1, rect)
    for rect in rects:
        assert verifier.check(1, rect, of(c, rect)).kind is Check.GOOD
    for rect, other in pairwise(rects):
        if (rect.m, rect.n) == (other.m, other.n):
            assert verifier.check(1, rect, of(c, other)).kind is Check.BAD


def test_a_rectangle_over_batch_entries_is_checked_entry_by_entry() -> None:
    gemm = Gemm(6, 16, 24, 8)
    verifier, _, c = opened(gemm)
    rect = Rect(2, 5, 0, 16, 0, 24)
    assert verifier.check(1, rect, of(c, rect)).kind is Check.GOOD
    swapped = of(c, rect)[[1, 0, 2]]
    assert verifier.check(1, rect, swapped).kind is Check.BAD
    assert verifier.check(1, gemm.whole, c).kind is Check.GOOD


def test_one_r_serves_a_column_panel_and_every_column_panel_has_its_own() -> None:
    verifier, entropy, c = opened(GEMM)
    rects = grid(GEMM, 12, 10)
    for rect in rects:
        verifier.prepare(1, rect)
    assert entropy.drawn == 4
    for rect in rects:
        verifier.check(1, rect, of(c, rect))
    assert entropy.drawn == 4


def test_r_is_drawn_again_after_a_reject_and_only_for_that_column_panel() -> None:
    verifier, entropy, c = opened(GEMM)
    left, right = Rect(0, 1, 0, 48, 0, 20), Rect(0, 1, 0, 48, 20, 40)
    above = Rect(0, 1, 0, 24, 0, 20)
    for rect in (left, right, above):
        verifier.prepare(1, rect)
    assert entropy.drawn == 2
    assert verifier.check(1, left, np.zeros_like(of(c, left))).kind is Check.BAD
    assert verifier.check(1, right, of(c, right)).kind is Check.GOOD
    assert entropy.drawn == 2
    assert verifier.check(1, above, of(c, above)).kind is Check.GOOD
    assert verifier.check(1, left, of(c, left)).kind is Check.GOOD
    assert entropy.drawn == 3


def test_a_gemm_of_another_id_never_sees_the_same_r() -> None:
    verifier, entropy, c = opened(GEMM)
    verifier.check(1, GEMM.whole, c)
    verifier.close_gemm(1)
    a, bt = np.ones((1, 48, 64), np.float32), np.ones((1, 40, 64), np.float32)
    verifier.open_gemm(1, Operand.of(a), Operand.of(bt))  # nor does the same id opened again
    assert verifier.check(1, GEMM.whole, c).kind is Check.BAD
    assert entropy.drawn == 2


def test_closing_lets_go_of_everything() -> None:
    verifier, _, c = opened(GEMM)
    for rect in grid(GEMM, 12, 10):
        verifier.prepare(1, rect)
    assert verifier.kept_bytes > 0
    verifier.close_gemm(1)
    assert verifier.kept_bytes == 0
    verifier.prepare(1, GEMM.whole)  # a lease's preparation may come late
    assert verifier.kept_bytes == 0
    with pytest.raises(LookupError, match="gemm 1 is not open"):
        verifier.check(1, GEMM.whole, c)


def test_good_tiles_are_let_go_of_at_once() -> None:
    verifier, _, c = opened(GEMM)
    rects = grid(GEMM, 12, 40)
    verifier.prepare(1, rects[0])
    one = verifier.kept_bytes
    for rect in rects[1:]:
        verifier.prepare(1, rect)
    assert verifier.kept_bytes > one
    for rect in rects[1:]:
        assert verifier.check(1, rect, of(c, rect)).kind is Check.GOOD
    assert verifier.kept_bytes == one


@pytest.mark.parametrize("kept_bytes_max", [0, 1_000, 10_000])
def test_what_is_kept_is_bounded_and_what_was_dropped_is_computed_again(kept_bytes_max: int) -> None:
    verifier, _, c = opened(GEMM, kept_bytes_max=kept_bytes_max)
    rects = grid(GEMM, 5, 7)
    for rect in rects:
        verifier.prepare(1, rect)
        assert verifier.kept_bytes <= kept_bytes_max
    for rect in rects:
        assert verifier.check(1, rect, of(c, rect)).kind is Check.GOOD
        assert verifier.check(1, rect, -of(c, rect)).kind is Check.BAD
        assert verifier.kept_bytes <= kept_bytes_max


def test_wrong_arrays_are_refused_with_what_was_got_and_expected() -> None:
    verifier, _, c = opened(GEMM)
    with pytest.raises(ValueError, match="a part of 16 bytes, expected 24: 2 x 3 f32"):
        Operand([memoryview(bytes(16))], 1, 2, 3)
    one = Operand.of(np.zeros((1, 48, 65), np.float32))
    with pytest.raises(ValueError, match=r"gemm 2: A has batch, k \(1, 64\), B \(1, 65\)"):
        verifier.open_gemm(2, Operand.of(np.zeros((1, 48, 64), np.float32)), one)
    with pytest.raises(ValueError, match="gemm 1 is open already"):
        verifier.open_gemm(1, one, one)
    with pytest.raises(ValueError, match="the product is float64"):
        verifier.check(1, GEMM.whole, c.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected float32 of"):
        verifier.check(1, Rect(0, 1, 0, 47, 0, 40), c)


def test_operands_that_are_not_finite_do_not_count_as_a_reject() -> None:
    entropy = Entropy()
    verifier = Verifier(entropy)
    a = np.ones((1, 8, 8), np.float32)
    a[0, 3, 3] = np.nan
    verifier.open_gemm(1, Operand.of(a), Operand.of(np.ones((1, 8, 8), np.float32)))
    rect = Rect(0, 1, 0, 8, 0, 8)
    for _ in range(2):
        assert verifier.check(1, rect, np.ones((1, 8, 8), np.float32)).kind is Check.OPERANDS_NOT_FINITE
    assert entropy.drawn == 1
    above = Rect(0, 1, 0, 3, 0, 8)  # the rows without the NaN can still be checked
    assert verifier.check(1, above, np.full((1, 3, 8), 8, np.float32)).kind is Check.GOOD


def test_by_default_no_two_verifiers_draw_the_same_r() -> None:
    """What passes in one by luck of R fails in the next: an error at the limit is judged differently by many."""
    c = np.ones((1, 1, 64), np.float32)
    c[0, 0, 0] += np.float32(4e-6)
    verdicts = set()
    for _ in range(200):
        verifier = Verifier()
        one, ones = np.ones((1, 1, 1), np.float32), np.ones((1, 64, 1), np.float32)
        verifier.open_gemm(1, Operand.of(one), Operand.of(ones))
        verdicts.add(verifier.check(1, Rect(0, 1, 0, 1, 0, 64), c).kind)
    assert verdicts == {Check.GOOD, Check.BAD}


def test_threads_share_the_work_and_agree() -> None:
    """Eight threads prepare and check all tiles of one GEMM at once, every third one false."""
    gemm = Gemm(1, 96, 96, 128)
    verifier, _, c = opened(gemm)
    rects = grid(gemm, 16, 16)
    start = threading.Barrier(8)

    def work(thread: int) -> list[tuple[bool, Check]]:
        start.wait(timeout=30)
        found = []
        for index, rect in enumerate(rects):
            false = (index + thread) % 3 == 0
            verifier.prepare(1, rect)
            tile = of(c, rect)
            found.append((false, verifier.check(1, rect, tile * np.float32(1.01) if false else tile).kind))
        return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            assert all(kind is (Check.BAD if false else Check.GOOD) for false, kind in found)
    verifier.close_gemm(1)
    assert verifier.kept_bytes == 0
