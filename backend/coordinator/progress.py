"""What the core shows of itself: counts, and in words why nothing moves. Read-only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from backend.coordinator.book import Book

REASONS_MAX = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """Since the start of the epoch: tiles and FLOP verified and credited, leases taken back. Now: devices that take
    work, devices in all, leases out, GEMMs open; `waiting` is empty unless an open GEMM has nobody to work on it."""

    tiles_done: int
    flop_done: int
    leases_lost: int
    devices_ready: int
    devices: int
    leases_out: int
    gemms_open: int
    waiting: str


def progress(book: Book) -> Progress:
    """A snapshot."""
    reasons = [device.why_not(book.now_s) for device in book.devices.values()]
    ready = sum(not reason for reason in reasons)
    waiting = ""
    if book.gemms and not ready:
        common = Counter(reasons).most_common(REASONS_MAX)
        waiting = "; ".join(f"{count} of {len(reasons)} devices: {reason}" for reason, count in common)
        waiting = waiting or "waiting for volunteers"
    return Progress(
        tiles_done=book.tiles_done,
        flop_done=book.flop_done,
        leases_lost=book.leases_lost,
        devices_ready=ready,
        devices=len(book.devices),
        leases_out=sum(len(device.out) for device in book.devices.values()),
        gemms_open=len(book.gemms),
        waiting=waiting,
    )
