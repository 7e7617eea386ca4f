"""What waits to be sent to one device, in the order in which it goes.

Control messages (ACK, REVOKE, PING, BYE) go first, between two panel chunks if need be: an ACK never waits for 64 MiB.
Leases wait in a queue of their own; only when a lease's turn comes is it decided which of its panels this
connection has not been sent yet, so that a lease revoked in the queue costs nothing and leaves nothing half-true. DROP
goes through the same queue: after the leases before it, whose panels it may name, and before those that follow.

Pure: no socket, no clock. Bounded: a device that does not read fills its outbox and is closed (`full`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from backend.switchboard.messages import PanelRef, Push
from tileweave.protocol import Drop, Message, chunks

DROPPED_AT_ONCE = 512  # panels in one DROP: as many of the longest ids as its metadata has room for, and some


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + length) of a panel, for the lease `lease`."""

    ref: PanelRef
    lease: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Resend:
    ref: PanelRef
    lease: int


@dataclass(frozen=True, slots=True)
class _Forget:
    panels: list[str] | None  # None: all


class Outbox:
    """The queues of one connection. `next()` gives what goes to the socket next, or None."""

    def __init__(self, frame_bytes_max: int, messages_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._messages_max = messages_max
        self._control: deque[Message] = deque()
        self._work: deque[Push | _Resend | _Forget] = deque()
        self._turn: Iterator[Message | Chunk] = iter(())
        self._turn_lease: int | None = None  # None: not a lease's turn, or the lease was revoked meanwhile
        self._sent: set[str] = set()

    @property
    def full(self) -> bool:
        """More waits than a device that reads would ever leave."""
        return len(self._control) + len(self._work) > self._messages_max

    def control(self, message: Message) -> None:
        """Send this before any further chunk."""
        self._control.append(message)

    def push(self, push: Push) -> None:
        """Send a lease after whichever of its panels is missing."""
        self._work.append(push)

    def resend(self, ref: PanelRef, lease: int) -> None:
        """The device lost this panel: send it again, unless it is on its way already."""
        if ref.panel in self._sent and all(
            not (isinstance(item, _Resend) and item.ref.panel == ref.panel) for item in self._work
        ):
            self._work.appendleft(_Resend(ref, lease))

    def revoke(self, leases: set[int]) -> None:
        """Forget leases that have not been sent. A panel that has begun is sent to its end, no other is."""
        if self._turn_lease in leases:
            self._turn_lease = None
        self._work = deque(item for item in self._work if not (isinstance(item, Push) and item.lease.lease in leases))

    def drop(self, panels: list[str]) -> None:
        """DROP those of these panels that were sent by then; a later lease sends them again."""
        self._work.append(_Forget(panels))

    def drop_all(self) -> None:
        """DROP whatever was sent by then: the leases that follow are another job's, or another run's."""
        self._work.append(_Forget(None))

    def lost(self, chunk: Chunk) -> None:
        """This chunk cannot be sent, its panel is gone: nor is the lease, what the device has of the panel is dropped,
        and a later lease sends it anew."""
        panel = chunk.ref.panel
        self._sent.discard(panel)
        self._turn = iter([Drop(panels=[panel])] if chunk.offset else [])
        self.revoke({chunk.lease})

    def last_words(self) -> Iterator[Message]:
        """The control messages that still wait; what a closing connection sends before BYE."""
        while self._control:
            yield self._control.popleft()

    def next(self) -> Message | Chunk | None:
        """What goes next; control first, then the lease whose turn it is."""
        if self._control:
            return self._control.popleft()
        while True:
            piece = next(self._turn, None)
            if piece is not None:
                return piece
            self._turn_lease = None
            if not self._work:
                return None
            item = self._work.popleft()
            self._turn_lease = item.lease.lease if isinstance(item, Push) else None
            self._turn = self._pieces(item)

    def _pieces(self, item: Push | _Resend | _Forget) -> Iterator[Message | Chunk]:
        if isinstance(item, _Forget):
            held = sorted(self._sent) if item.panels is None else [name for name in item.panels if name in self._sent]
            self._sent.difference_update(held)
            for first in range(0, len(held), DROPPED_AT_ONCE):
                yield Drop(panels=held[first : first + DROPPED_AT_ONCE])
        elif isinstance(item, _Resend):
            yield from self._panel(item.ref, item.lease)
        else:
            for ref in item.panels:
                if ref.panel not in self._sent and self._turn_lease is not None:
                    yield from self._panel(ref, item.lease.lease)
            if self._turn_lease is not None:
                yield item.lease

    def _panel(self, ref: PanelRef, lease: int) -> Iterator[Chunk]:
        self._sent.add(ref.panel)
        for offset, length in chunks(ref.size, self._frame_bytes_max):
            yield Chunk(ref, lease, offset, length)
