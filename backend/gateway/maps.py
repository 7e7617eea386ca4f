"""Panels straight out of the script's arena: a bounded cache of read-only memory maps.

The idea: a panel is a run of bytes of a file the script wrote before it asked; slicing the map costs nothing and the
socket copies from there. A cached map is used only while the path still names the same file (by inode), and is made
anew when the file has grown. Files outside the run directory are refused, whatever a message says. The script may put
something else in a panel's place once its product is there; the stamp tells.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from backend.switchboard.messages import PanelRef
from tileweave.protocol.elements import SCALE_BYTES, scales_offset, scales_per_row

STAMP = struct.Struct("<Q")


class PanelGone(Exception):
    """The panel's file is no longer there or too short: its job is ending or has started anew."""


@dataclass(frozen=True, slots=True)
class PanelSource:
    """A panel's bytes, as PANEL carries them, for as long as `intact`: who reads asks afterwards."""

    data: memoryview
    mapped: memoryview
    stamp_offset: int
    stamp: int

    @property
    def intact(self) -> bool:
        """Whether what has been read so far was the panel's."""
        return bool(STAMP.unpack_from(self.mapped, self.stamp_offset)[0] == self.stamp)


class Maps:
    """At most `maps_max` files of `root` mapped at once; the least recently used goes first."""

    def __init__(self, root: Path, maps_max: int) -> None:
        self._root = os.fspath(root.absolute()) + os.sep
        self._maps_max = maps_max
        self._maps: OrderedDict[str, tuple[tuple[int, int], mmap.mmap]] = OrderedDict()

    def panel(self, ref: PanelRef) -> PanelSource:
        """Where the panel's bytes are. Raises PanelGone, also where they are something else by now."""
        if not (ref.path.startswith(self._root) and ".." not in Path(ref.path).parts):
            raise PanelGone(f"panel {ref.panel} names {ref.path}, expected a file below {self._root}")
        elements = ref.size if ref.dtype != "i8" else ref.rows * ref.columns
        runs = [(ref.offset, elements)]
        if ref.dtype == "i8":
            runs.append((ref.scales, SCALE_BYTES * ref.rows * scales_per_row(ref.columns)))
        mapped = memoryview(self._mapped(ref, max(ref.stamp_offset + STAMP.size, *(at + size for at, size in runs))))
        data = mapped[ref.offset : ref.offset + elements]
        if ref.dtype == "i8":
            padding = bytes(scales_offset(ref.rows, ref.columns) - elements)
            at, size = runs[1]
            data = memoryview(b"".join((data, padding, mapped[at : at + size])))
        source = PanelSource(data, mapped, ref.stamp_offset, ref.stamp)
        if not source.intact:
            raise PanelGone(f"panel {ref.panel} was overwritten before it was sent; nobody waits for it any more")
        return source

    def _mapped(self, ref: PanelRef, end: int) -> mmap.mmap:
        try:
            now = os.stat(ref.path)  # noqa: PTH116 - on the path of every panel
            identity = (now.st_dev, now.st_ino)
            known = self._maps.get(ref.path)
            if known is not None and known[0] == identity and len(known[1]) >= end:
                self._maps.move_to_end(ref.path)
                return known[1]
            # A replaced map is only let go, not closed: frames being sent may still look into it.
            self._maps.pop(ref.path, None)
            with open(ref.path, "rb") as file:  # noqa: PTH123 - on the path of every panel
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise PanelGone(f"panel {ref.panel}: {error}") from error
        if len(mapped) < end:
            raise PanelGone(f"panel {ref.panel} ends at byte {end} of a file of {len(mapped)}")
        self._maps[ref.path] = (identity, mapped)
        if len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return mapped
