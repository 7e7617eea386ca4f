"""How fast a device's link is, measured where it can be measured honestly.

The round trip is the least of the last PING/PONG pairs, since queues only ever add to it. Upload speed is taken here,
at the receiver: bytes of a result over the time they took to come in. Download speed cannot be taken at the sender,
whose kernel swallows megabytes at once (it reads 14-31% high), so a PING follows each run of panel chunks, and its PONG
proves that the run has arrived; what lies between first byte and PONG, less the round trip, is the transfer.

Pure: every call is given the time. Rates are bytes per second, 0 while unknown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RTT_SAMPLES = 16
PINGS_OPEN_MAX = 64  # unanswered PINGs remembered; the silence limit ends a connection long before
SAMPLE_BYTES_MIN = 128 << 10  # a smaller transfer measures the round trip, not the rate
SPAN_SHARE_MIN = 0.1  # what remains of a transfer's span at least after the round trip is taken off
CHANGE_WORTH_TELLING = 0.15  # relative
WEIGHT = 0.3  # of a new sample in the running average


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What a link measured at one time."""

    rtt_s: float = 0.0
    down_bps: float = 0.0
    up_bps: float = 0.0

    def differ(self, now: LinkFigures) -> bool:
        """Whether `now` is news to who knows these."""
        pairs = ((self.rtt_s, now.rtt_s), (self.down_bps, now.down_bps), (self.up_bps, now.up_bps))
        return any(abs(new - old) > CHANGE_WORTH_TELLING * old for old, new in pairs)


class LinkMeter:
    """Round trip and rates of one connection."""

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self.down_bps = 0.0
        self.up_bps = 0.0
        self._rtts: deque[float] = deque(maxlen=RTT_SAMPLES)
        self._pings: dict[int, tuple[float, float | None, int]] = {}
        self._next_nonce = 1
        self._run_started_s: float | None = None
        self._run_bytes = 0

    def ping(self, now_s: float) -> int:
        """A nonce for a PING sent now; it also closes the run of panel chunks before it, if there was one."""
        nonce = self._next_nonce
        self._next_nonce += 1
        self._pings[nonce] = (now_s, self._run_started_s, self._run_bytes)
        self._run_started_s, self._run_bytes = None, 0
        if len(self._pings) > PINGS_OPEN_MAX:
            del self._pings[next(iter(self._pings))]
        return nonce

    def chunk(self, size: int, now_s: float) -> None:
        """A chunk of `size` bytes goes to the socket now."""
        if self._run_started_s is None:
            self._run_started_s = now_s
        self._run_bytes += size

    @property
    def figures(self) -> LinkFigures:
        """The figures now."""
        return LinkFigures(self.rtt_s, self.down_bps, self.up_bps)

    @property
    def run_bytes(self) -> int:
        """Bytes of panel chunks since the last PING."""
        return self._run_bytes

    def pong(self, nonce: int, now_s: float) -> None:
        """The answer to a PING; one that was never sent is ignored."""
        ping = self._pings.pop(nonce, None)
        if ping is None:
            return
        sent_s, run_started_s, run_bytes = ping
        if run_started_s is None:
            self._rtts.append(max(0.0, now_s - sent_s))
            self.rtt_s = min(self._rtts)
        elif run_bytes >= SAMPLE_BYTES_MIN:
            span_s = now_s - run_started_s
            transfer_s = max(span_s - self.rtt_s, span_s * SPAN_SHARE_MIN, 1e-6)
            self.down_bps = _blend(self.down_bps, run_bytes / transfer_s)

    def upload(self, size: int, seconds: float) -> None:
        """`size` bytes came in over `seconds`, first to last."""
        if size >= SAMPLE_BYTES_MIN and seconds > 0:
            self.up_bps = _blend(self.up_bps, size / seconds)


def _blend(old: float, new: float) -> float:
    return new if old == 0 else old + WEIGHT * (new - old)
