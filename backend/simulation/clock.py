"""Virtual time: callbacks in order of their moment, and channels that keep order however latency varies."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Callback = Callable[[], None]


class Clock:
    """Runs callbacks at virtual seconds; equal moments in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._count = 0

    def at(self, when_s: float, callback: Callback) -> None:
        """Run `callback` at `when_s`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._count, callback))

    def after(self, delay_s: float, callback: Callback) -> None:
        """Run `callback` in `delay_s`."""
        self.at(self.now_s + delay_s, callback)

    def step(self) -> bool:
        """Run the next callback; False where none is left."""
        if not self._heap:
            return False
        self.now_s, _, callback = heapq.heappop(self._heap)
        callback()
        return True


class Channel:
    """Delivers in order, each after its own latency, like a socket or a Redis stream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = 0.0

    def send(self, latency_s: float, callback: Callback) -> None:
        """Run `callback` after `latency_s`, and not before what was sent earlier."""
        self._last_s = max(self._last_s, self._clock.now_s + latency_s)
        self._clock.at(self._last_s, callback)
