"""The panels a device holds, within its memory; the least recently used goes first.

The idea: panels are immutable and can always be asked for again (NEED), so forgetting one is never an error, only a
detour. A panel that a lease in hand names is pinned by the caller and stays. Chunks of a panel that found no room are
counted off and ignored. Left out: the clock, and which panels to ask for (session.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tileweave.protocol import Dtype, Panel, ProtocolError, Reassembly


@dataclass(frozen=True, slots=True)
class Held:
    """A complete panel: `rows` x `columns` elements of `dtype`, in writable memory of its own."""

    rows: int
    columns: int
    dtype: Dtype
    data: memoryview


class PanelStore:
    """Panels by id, complete and arriving."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Held] = OrderedDict()  # least recently used first
        self._arriving: dict[str, Reassembly] = {}
        self._ignored: set[str] = set()
        self.bytes_held = 0  # of complete and arriving panels

    def take(self, chunk: Panel, payload: memoryview, room: int, pinned: set[str]) -> bool:
        """Stores one chunk within `room` bytes for all panels. False when there is no room for the panel, at its first
        chunk; the rest of it is then ignored. Raises ProtocolError for a chunk out of order."""
        if chunk.panel in self._ignored:
            if chunk.offset > 0:
                if chunk.offset + len(payload) == chunk.size:
                    self._ignored.discard(chunk.panel)
                return True
            self._ignored.discard(chunk.panel)
        if chunk.offset == 0 and not self._begin(chunk, room, pinned):
            if len(payload) < chunk.size:
                self._ignored.add(chunk.panel)
            return False
        whole = self._arriving.get(chunk.panel)
        if whole is None:
            raise ProtocolError(f"panel {chunk.panel}: first chunk at byte {chunk.offset}, expected 0")
        try:
            complete = whole.add(chunk.offset, chunk.size, payload)
        except MemoryError:  # the machine has less than we were told we may use
            self.drop([chunk.panel])
            return False
        if complete:
            del self._arriving[chunk.panel]
            self._held[chunk.panel] = Held(chunk.rows, chunk.columns, chunk.dtype, whole.data)
        return True

    def _begin(self, chunk: Panel, room: int, pinned: set[str]) -> bool:
        self.drop([chunk.panel])  # sent anew, whatever has come of it
        self._ignored.discard(chunk.panel)
        for panel in [panel for panel in self._held if panel not in pinned]:
            if self.bytes_held + chunk.size <= room:
                break
            self.drop([panel])
        if self.bytes_held + chunk.size > room:
            return False
        self._arriving[chunk.panel] = Reassembly(chunk.size)
        self.bytes_held += chunk.size
        return True

    def get(self, panel: str) -> Held | None:
        """A complete panel, counted as used now."""
        held = self._held.get(panel)
        if held is not None:
            self._held.move_to_end(panel)
        return held

    def is_arriving(self, panel: str) -> bool:
        """Whether more chunks of this panel are to come and will be kept."""
        return panel in self._arriving

    def ids(self) -> list[str]:
        """Complete panels, the most recently used first."""
        return list(reversed(self._held))

    def drop(self, panels: Iterable[str]) -> None:
        """Forgets panels; those not held are passed over."""
        for panel in panels:
            held = self._held.pop(panel, None)
            if held is not None:
                self.bytes_held -= len(held.data)
            arriving = self._arriving.get(panel)
            if arriving is not None:
                self._forget_arriving(panel)
                self._ignored.add(panel)

    def disconnect(self) -> None:
        """The rest of what was arriving will not come."""
        for panel in list(self._arriving):
            self._forget_arriving(panel)
        self._ignored.clear()

    def _forget_arriving(self, panel: str) -> None:
        # Its size is known: a Reassembly is only made for a panel's first chunk, and that chunk was taken or raised.
        self.bytes_held -= self._arriving.pop(panel).size_max
