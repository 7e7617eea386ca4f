"""Cobblestones and the recent average, against BOINC's own words and numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.credit.rules import DAY_S, HALF_LIFE_S, Average, cobblestones, decayed, granted, score

NOW = 1_800_000_000.0


def test_a_gigaflops_day_is_two_hundred_cobblestones() -> None:
    assert cobblestones(10**9 * 86400) == 200.0
    assert cobblestones(10**12 * 86400) == pytest.approx(200_000.0)
    assert cobblestones(2**70) == pytest.approx(2**70 * 200 / 86400e9)
    assert cobblestones(0) == 0.0


def test_the_first_grant_is_work_per_day_since_its_start_but_an_hour_at_least() -> None:
    assert granted(None, 10.0, NOW - 0.5 * DAY_S, NOW) == Average(20.0, NOW)
    assert granted(None, 10.0, NOW, NOW) == Average(240.0, NOW)
    assert granted(None, 10.0, NOW + 5.0, NOW) == Average(240.0, NOW)


def test_a_grant_after_a_week_weighs_half() -> None:
    after = granted(Average(100.0, NOW), 700.0, 0.0, NOW + HALF_LIFE_S)
    assert after.per_day == pytest.approx(100.0 / 2 + (700.0 / 7) / 2)
    assert after.time_s == NOW + HALF_LIFE_S


def test_grants_at_one_moment_add_up_in_any_portions() -> None:
    whole = granted(Average(5.0, NOW), 30.0, 0.0, NOW)
    parts = Average(5.0, NOW)
    for _ in range(30):
        parts = granted(parts, 1.0, 0.0, NOW)
    assert whole.per_day == pytest.approx(parts.per_day) == pytest.approx(5.0 + math.log(2) * 30 / 7)


@pytest.mark.parametrize("gap_s", [0.5, 0.8, 0.9, 1.5])
def test_the_two_formulas_meet_where_the_gap_is_small(gap_s: float) -> None:
    assert granted(Average(0.0, NOW), 1.0, 0.0, NOW + gap_s).per_day == pytest.approx(math.log(2) / 7, rel=1e-5)


def test_steady_work_converges_to_its_daily_rate() -> None:
    average: Average | None = None
    for hour in range(24 * 70):
        average = granted(average, 2.0, NOW + (hour - 1) * 3600, NOW + hour * 3600)
    assert average is not None and average.per_day == pytest.approx(48.0, rel=0.01)


def test_without_work_the_average_halves_each_week_and_a_clock_set_back_changes_nothing() -> None:
    average = Average(80.0, NOW)
    assert decayed(average, NOW + HALF_LIFE_S) == pytest.approx(40.0)
    assert decayed(average, NOW + 3 * HALF_LIFE_S) == pytest.approx(10.0)
    assert decayed(average, NOW - 1e6) == 80.0
    assert decayed(None, NOW) == 0.0
    assert granted(average, 0.0, 0.0, NOW - 1e6) == average


averages = st.builds(Average, st.floats(1e-6, 1e9), st.floats(NOW - 1e7, NOW))


@given(averages, averages, st.floats(0, 1e7))
def test_the_score_orders_as_the_decayed_values_do_at_any_later_time(
    one: Average, two: Average, later_s: float
) -> None:
    shown = decayed(one, NOW + later_s), decayed(two, NOW + later_s)
    if shown[0] > shown[1] * (1 + 1e-9):
        assert (score(one) or 0) > (score(two) or 0)


def test_no_credit_has_no_score() -> None:
    assert score(Average(0.0, NOW)) is None
