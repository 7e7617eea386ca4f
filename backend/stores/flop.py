"""Exact FLOP totals as two SQLite integers.

A device at 1 TFLOP/s passes 2**63 FLOP in 107 days, and SQLite would go on in floating point without a word. A total is
therefore stored as whole GFLOP and a rest below 10**9 (good for 10**27 FLOP), which also sorts as a pair.
"""

from __future__ import annotations

GIGA = 10**9


def split(flop: int) -> tuple[int, int]:
    """(gflop, rest) as stored."""
    return divmod(flop, GIGA)


def joined(gflop: int, rest: int) -> int:
    """The exact total."""
    return gflop * GIGA + rest
