"""Where uploads land: slots of one memory-mapped file, named to the coordinator and never written after that.

The idea: the file is as long as all slots may be together, but its pages exist only where a slot has been; space is
reserved with posix_fallocate before it is written, since a full tmpfs otherwise kills the process with SIGBUS. Slots
are powers of two, handed out and merged again as buddies, so that tiles of many sizes cannot fragment the file for
good. A slot's number is never used twice, not even by a later run of this gateway, so a stale `Release` frees nothing.

Left out: who waits for a slot (the connection does) and when an unreleased one is given up (the fleet does).
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from backend.switchboard.messages import SlotRef

SLOT_BYTES_MIN = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """`size` bytes at `offset`; `number` names it to others; `order` is log2 of what it occupies."""

    number: int
    offset: int
    size: int
    order: int


class Slots:
    """The results file of one gateway run. Raises OSError where the file cannot be made."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self.path = path
        self.used_bytes = 0
        self._top = max(bytes_max, SLOT_BYTES_MIN).bit_length() - 1
        self.total_bytes = 1 << self._top
        self._free: dict[int, set[int]] = {self._top: {0}}
        self._taken: dict[int, Slot] = {}
        self._next = time.time_ns() // 1000
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, self.total_bytes)
        self._map = mmap.mmap(self._fd, self.total_bytes)
        self._view = memoryview(self._map)

    def take(self, size: int) -> Slot | None:
        """A slot of `size` bytes, or None while there is no room (in the file, or on the file system)."""
        order = (max(size, SLOT_BYTES_MIN) - 1).bit_length()
        offset = self._split(order)
        if offset is None:
            return None
        try:
            self._reserve(offset, size)
        except OSError:
            self._merge(offset, order)
            return None
        self._next += 1
        slot = Slot(self._next, offset, size, order)
        self._taken[slot.number] = slot
        self.used_bytes += 1 << order
        return slot

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable."""
        return self._view[slot.offset : slot.offset + slot.size]

    def give_back(self, number: int) -> bool:
        """Frees a slot; False where it is not one of this run's taken slots (a repeated or stale release)."""
        slot = self._taken.pop(number, None)
        if slot is None:
            return False
        self.used_bytes -= 1 << slot.order
        self._merge(slot.offset, slot.order)
        return True

    def ref(self, slot: Slot, gateway: str) -> SlotRef:
        """What the coordinator is told."""
        return SlotRef(gateway, slot.number, str(self.path), slot.offset, slot.size)

    def close(self) -> None:
        """Unmaps the file; it stays on disk for results that the coordinator has yet to read."""
        self._view.release()
        self._map.close()
        os.close(self._fd)

    def _split(self, order: int) -> int | None:
        """Offset of a free block of 2^order bytes, cutting a larger one where needed; lowest first, whose pages exist
        already."""
        found = next((level for level in range(order, self._top + 1) if self._free.get(level)), None)
        if found is None:
            return None
        offset = min(self._free[found])
        self._free[found].remove(offset)
        for level in range(found - 1, order - 1, -1):
            self._free.setdefault(level, set()).add(offset + (1 << level))
        return offset

    def _merge(self, offset: int, order: int) -> None:
        while order < self._top and offset ^ (1 << order) in self._free.get(order, ()):
            self._free[order].remove(offset ^ (1 << order))
            offset &= ~(1 << order)
            order += 1
        self._free.setdefault(order, set()).add(offset)

    def _reserve(self, offset: int, size: int) -> None:
        if hasattr(os, "posix_fallocate"):  # macOS has none, and no tmpfs either
            os.posix_fallocate(self._fd, offset, size)


def sweep(directory: Path, gateway: str, keep: int) -> None:
    """Deletes the results files of earlier runs of `gateway` except the `keep` newest, whose last results may still be
    waiting for their coordinator."""
    files = sorted(directory.glob(f"results-{gateway}-*.bin"), key=lambda path: path.name)
    for path in files[: max(0, len(files) - keep)]:
        path.unlink(missing_ok=True)
