"""What the core remembers of a GEMM: its tiles, their leases, and the queues of tiles that wait for a device.

A `GemmRun` files each tile by its state (`settle`), so that choosing work never scans all of C: tiles ready in the
share the plan gave them to, tiles that came back from a device (wanted first, by anyone), tiles out on lease
(candidates for a backup). A re-cut replaces a ready tile by smaller ones; its leases are closed with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.coordinator.events import GemmSubmitted
from backend.coordinator.transitions import LeaseState, TileState, tile_state
from backend.switchboard.messages import PanelRef, SlotRef
from planner.panels import PanelRows, terms
from planner.shapes import EXACT, Grains, Rect
from planner.tiles import result_bytes
from tileweave.protocol.elements import ELEMENT_BYTES, SCALE_BYTES, scales_per_row
from tileweave.protocol.messages import Accuracy, Term

if TYPE_CHECKING:
    from backend.coordinator.fleet import DeviceRecord

RETURNED = ""
"""The queue of tiles that came back; no device has this name."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One lease. `owner` is the device's record when it was sent, which may be gone since; `new_bytes` are the panels
    sent for it; `started_s` is when its time began to run (None: it waits behind an earlier lease of its device). From
    its result: where the answer goes, the device's kernel `seconds` as far as believed, the server's `span_s` and
    `upload_s`, and when it `arrived_s`."""

    lease: int
    tile: Tile
    owner: DeviceRecord
    sent_s: float
    new_bytes: int
    predicted_s: float
    accuracy: Accuracy
    started_s: float | None = None
    state: LeaseState = LeaseState.OUT
    slot: SlotRef | None = None
    reply_gateway: str = ""
    reply_connection: str = ""
    seconds: float = 0.0
    span_s: float = 0.0
    upload_s: float = 0.0
    arrived_s: float = 0.0


@dataclass(slots=True, eq=False)
class Tile:
    """A rectangle of C, or of a partial sum, that is leased as one. `grains`: how its panels are cut. `spoiled` names
    devices that returned a wrong result for it or failed; `panels` are the bytes of `refs` by their id."""

    number: int
    gemm: GemmRun
    rect: Rect
    grains: Grains
    share: str
    terms: list[Term]
    refs: tuple[PanelRef, ...]
    panels: dict[str, int]
    flop: int
    result_bytes: int
    state: TileState = TileState.READY
    leases: list[LeaseRecord] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)

    def out(self) -> list[LeaseRecord]:
        """Its leases that devices work on now."""
        return [lease for lease in self.leases if lease.state is LeaseState.OUT]


class GemmRun:
    """One GEMM from its submission until each of its leases has ended. Its panels are named by their content: what a
    device holds may serve other GEMMs too."""

    def __init__(self, request: GemmSubmitted, now_s: float) -> None:
        self.request = request
        self.shape = request.shape
        self.submitted_s = now_s
        self.first_lease_s: float | None = None
        self.predicted_s = 0.0
        self.kernel_seconds = 0.0
        self.accuracy: Accuracy = request.accuracy
        self.planned = False
        self.ended = False
        self.tiles: dict[int, Tile] = {}
        self.remaining = 0
        self.cuts = 0  # grows whenever the set of tiles changes
        self.cuts_checked = 0  # `cuts` when the cover was last checked
        self.queues: dict[str, dict[int, Tile]] = {}
        self.queued_flop: dict[str, int] = {}
        self.leased: dict[int, Tile] = {}
        self.leases: list[LeaseRecord] = []
        self._next_tile = 0

    def add(self, rect: Rect, share: str, grains: Grains = EXACT) -> Tile:
        """A new ready tile, at the end of a share's queue."""
        terms, refs = self._terms(rect, grains)
        tile = Tile(
            number=self._next_tile,
            gemm=self,
            rect=rect,
            grains=grains,
            share=share,
            terms=terms,
            refs=refs,
            panels={ref.panel: ref.size for ref in refs},
            flop=rect.flop(self.shape),
            result_bytes=result_bytes(rect, self.shape),
        )
        self._next_tile += 1
        self.tiles[tile.number] = tile
        self.remaining += 1
        self.cuts += 1
        self._enqueue(tile)
        return tile

    def replace(self, tile: Tile, rects: tuple[Rect, ...], share: str) -> list[Tile]:
        """Re-cut a ready tile; its leases must have ended. The pieces have panels of their own; they keep its list of
        devices that spoiled it, and are then for anyone, not only for `share`."""
        self._unfile(tile)
        del self.tiles[tile.number]
        self.remaining -= 1
        pieces = [self.add(rect, RETURNED if tile.spoiled else share) for rect in rects]
        for piece in pieces:
            piece.spoiled |= tile.spoiled
        return pieces

    def settle(self, tile: Tile) -> None:
        """After a change of one of its leases: the tile's state anew, and its place in the queues."""
        before, tile.state = tile.state, tile_state(lease.state for lease in tile.leases)
        if tile.state is before or self.ended:
            return
        self._unfile(tile)
        if tile.state is TileState.READY:
            tile.share = RETURNED
            self._enqueue(tile)
        elif tile.state is TileState.LEASED:
            self.leased[tile.number] = tile
        elif tile.state is TileState.DONE:
            self.remaining -= 1

    def _enqueue(self, tile: Tile) -> None:
        self.queues.setdefault(tile.share, {})[tile.number] = tile
        self.queued_flop[tile.share] = self.queued_flop.get(tile.share, 0) + tile.flop

    def _unfile(self, tile: Tile) -> None:
        self.leased.pop(tile.number, None)
        queue = self.queues.get(tile.share)
        if queue is not None and queue.pop(tile.number, None) is not None:
            self.queued_flop[tile.share] -= tile.flop
            if not queue:
                del self.queues[tile.share], self.queued_flop[tile.share]

    def ref(self, operand: int, panel: PanelRows) -> PanelRef:
        """A panel of A (0) or B (1)."""
        matrix = (self.request.a, self.request.b)[operand][panel.part]
        dtype = self.request.elements.panels
        return PanelRef(
            f"{matrix.content}.{panel.first}-{panel.last - 1}",
            matrix.path,
            matrix.offset + panel.first * matrix.columns * ELEMENT_BYTES[dtype],
            panel.last - panel.first,
            matrix.columns,
            matrix.stamp_offset,
            matrix.stamp,
            dtype,
            matrix.scales + panel.first * scales_per_row(matrix.columns) * SCALE_BYTES if dtype == "i8" else 0,
        )

    def _terms(self, rect: Rect, grains: Grains) -> tuple[list[Term], tuple[PanelRef, ...]]:
        """A tile's terms as its lease says them, and the panels that they name."""
        refs: dict[tuple[int, PanelRows], PanelRef] = {}
        found: list[Term] = []
        for term in terms(rect, self.shape, grains):
            a, b = (refs.setdefault(key, self.ref(*key)) for key in ((0, term.a.panel), (1, term.b.panel)))
            found.append(
                Term(
                    k=term.k, a=a.panel, b=b.panel, a_row=term.a.row, a_column=term.a.column,
                    b_row=term.b.row, b_column=term.b.column,
                )
            )  # fmt: skip
        return found, tuple({ref.panel: ref for ref in refs.values()}.values())
