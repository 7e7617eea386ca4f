"""Credit: from verified FLOP to cobblestones, and the recent average that the leaderboard is ordered by.

The units and rules are BOINC's, so that volunteers and statistics sites can compare: a machine that does 1 GFLOP/s for
a day earns 200 cobblestones (https://github.com/BOINC/boinc/wiki/CreditNew), and recent average credit (RAC) is
`update_average()` of BOINC's lib/util.cpp, an exponential average of work per day with a half-life of a week.

Left out: the clock (it is passed in) and storage (backend/stores keeps an `Average` beside each device).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COBBLESTONES_PER_GFLOPS_DAY = 200.0
DAY_S = 86400.0
HALF_LIFE_S = 604800.0
FIRST_SPAN_S_MIN = 3600.0  # BOINC divides by the first grant's own duration, which for a tile is next to nothing.


@dataclass(frozen=True, slots=True)
class Average:
    """Cobblestones per day as of `time_s` (unix seconds)."""

    per_day: float
    time_s: float


def cobblestones(flop: int) -> float:
    """Credit for `flop` exact floating-point operations: flop x 200 / 86400e9."""
    return flop * COBBLESTONES_PER_GFLOPS_DAY / (DAY_S * 1e9)


def granted(average: Average | None, work: float, start_s: float, now_s: float) -> Average:
    """The average after `work` cobblestones are granted at `now_s`; `average` is None before the first grant, whose
    work began at `start_s`. A clock that ran backwards counts as no time passed.
    """
    if average is None:
        return Average(work / (max(now_s - start_s, FIRST_SPAN_S_MIN) / DAY_S), now_s)
    gap_s = max(0.0, now_s - average.time_s)
    weight = 2.0 ** (-gap_s / HALF_LIFE_S)
    if 1.0 - weight > 1e-6:
        fresh = (1.0 - weight) * work / (gap_s / DAY_S)
    else:  # The limit of the line above for gap -> 0, where it is 0 x (1 / 0).
        fresh = math.log(2.0) * work * DAY_S / HALF_LIFE_S
    return Average(average.per_day * weight + fresh, max(now_s, average.time_s))


def decayed(average: Average | None, now_s: float) -> float:
    """Cobblestones per day to show at `now_s`: without new work the average halves every week."""
    if average is None:
        return 0.0
    return float(average.per_day * 2.0 ** (-max(0.0, now_s - average.time_s) / HALF_LIFE_S))


def score(average: Average) -> float | None:
    """A number that orders averages of different `time_s` as `decayed` would at any common later moment, so that an
    index on it never has to be rewritten as time passes: log2(per_day) + time / half-life. None for no credit.
    """
    return math.log2(average.per_day) + average.time_s / HALF_LIFE_S if average.per_day > 0.0 else None
