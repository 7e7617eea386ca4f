"""Time as the volunteer sees it; tests pass one that they turn by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock and a way to wait on it."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""

    async def sleep(self, seconds: float) -> None:
        """Returns `seconds` later on this clock."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Returns `seconds` later."""
        await asyncio.sleep(seconds)
