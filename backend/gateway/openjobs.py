"""Which jobs still take results, as the store has it, asked at most once a second for each job."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from backend.stores.jobs import ENDED, Job

FRESH_S = 1.0
KNOWN_MAX = 1024


class OpenJobs:
    """A small cache over `get(job id)`."""

    def __init__(self, get: Callable[[str], Awaitable[Job | None]]) -> None:
        self._get = get
        self._known: OrderedDict[str, tuple[float, bool]] = OrderedDict()

    async def is_open(self, job: str) -> bool:
        """Whether `job` exists and has not ended."""
        now_s = time.monotonic()
        known = self._known.get(job)
        if known is not None and now_s - known[0] < FRESH_S:
            return known[1]
        row = await self._get(job)
        answer = row is not None and row.state not in ENDED
        self._known[job] = (now_s, answer)
        self._known.move_to_end(job)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return answer
