"""The states of a lease and of a tile, as literal tables.

A lease moves only along `TRANSITIONS`. What is not there is one of two things, kept apart on purpose: a message from
outside (RESULT, FAIL) that comes too late or twice is answered by `ANSWERS`, for anyone may send anything; an event
that we ourselves produce (all others) and that does not fit is our bug, and `advance` raises.

A tile has no table of its own: its state follows from its leases (`TILE_STATES`), so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from tileweave.protocol.messages import Verdict


class LeaseState(Enum):
    """Where one device's right to compute one tile stands."""

    OUT = "out"  # sent, not answered, its time runs
    LOST = "lost"  # taken back (expired, device gone); its result is still welcome while the tile is open
    CHECKING = "checking"  # its result is being verified
    STORING = "storing"  # verified; the ledger commits, then the tile goes into C
    ACCEPTED = "accepted"  # credited: end
    REJECTED = "rejected"  # the result was wrong: end
    CLOSED = "closed"  # not wanted any more: end


class LeaseEvent(Enum):
    """What happens to a lease."""

    RESULT = "result"  # theirs: a complete upload
    FAIL = "fail"  # theirs: the device gave up
    LOSE = "lose"  # deadline passed, connection closed, device barred
    CLOSE = "close"  # the tile is done by another lease, re-cut, or its GEMM has ended
    GOOD = "good"  # verdict: the product
    BAD = "bad"  # verdict: not the product
    MOOT = "moot"  # a verdict nobody needs any more
    STORED = "stored"  # the ledger has committed


class TileState(Enum):
    """Where a tile stands."""

    READY = "ready"
    LEASED = "leased"
    CHECKING = "checking"
    STORING = "storing"
    DONE = "done"


S, E = LeaseState, LeaseEvent

TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (S.OUT, E.RESULT): S.CHECKING,
    (S.OUT, E.FAIL): S.CLOSED,
    (S.OUT, E.LOSE): S.LOST,
    (S.OUT, E.CLOSE): S.CLOSED,
    (S.LOST, E.RESULT): S.CHECKING,
    (S.LOST, E.FAIL): S.CLOSED,
    (S.LOST, E.CLOSE): S.CLOSED,
    (S.CHECKING, E.GOOD): S.STORING,
    (S.CHECKING, E.BAD): S.REJECTED,
    (S.CHECKING, E.MOOT): S.CLOSED,
    (S.STORING, E.STORED): S.ACCEPTED,
}

ANSWERS: dict[LeaseState, Verdict] = {
    S.CHECKING: "duplicate",
    S.STORING: "duplicate",
    S.ACCEPTED: "duplicate",
    S.REJECTED: "late",
    S.CLOSED: "late",
}
"""The answer to a RESULT of a lease that takes none any more. (A FAIL of such a lease is ignored.)"""

ENDED = frozenset({S.ACCEPTED, S.REJECTED, S.CLOSED})
HOLDS_SLOT = frozenset({S.CHECKING, S.STORING})

TILE_STATES: tuple[tuple[LeaseState, TileState], ...] = (
    (S.ACCEPTED, TileState.DONE),
    (S.STORING, TileState.STORING),
    (S.CHECKING, TileState.CHECKING),
    (S.OUT, TileState.LEASED),
)
"""The first of these lease states that any lease of the tile is in decides the tile's state; none: READY."""


class LeaseError(AssertionError):
    """A transition that our own code asked for and that cannot be."""


def advance(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """The state after `event`; raises `LeaseError` where the table has none."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise LeaseError(f"lease in state {state.value} got {event.value}, which cannot happen")
    return after


def tile_state(leases: Iterable[LeaseState]) -> TileState:
    """The state of a tile whose leases are in these states."""
    present = set(leases)
    for lease, tile in TILE_STATES:
        if lease in present:
            return tile
    return TileState.READY
