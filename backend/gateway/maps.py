"""Panels straight out of the script's arena: a bounded cache of read-only memory maps.

The idea: a panel is a run of bytes of a file the script wrote before it asked; slicing the map costs nothing and the
socket copies from there. A cached map is used only while the path still names the same file (by inode), and is made
anew when the file has grown. Files outside the run directory are refused, whatever a message says.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path

from backend.switchboard.messages import PanelRef


class PanelGone(Exception):
    """The panel's file is no longer there or too short: its job is ending or has started anew."""


class Maps:
    """At most `maps_max` files of `root` mapped at once; the least recently used goes first."""

    def __init__(self, root: Path, maps_max: int) -> None:
        self._root = os.fspath(root.absolute()) + os.sep
        self._maps_max = maps_max
        self._maps: OrderedDict[str, tuple[tuple[int, int], mmap.mmap]] = OrderedDict()

    def panel(self, ref: PanelRef) -> memoryview:
        """The panel's bytes. Raises PanelGone."""
        if not (ref.path.startswith(self._root) and ".." not in Path(ref.path).parts):
            raise PanelGone(f"panel {ref.panel} names {ref.path}, expected a file below {self._root}")
        mapped = self._mapped(ref, ref.offset + ref.size)
        return memoryview(mapped)[ref.offset : ref.offset + ref.size]

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
