"""The coordinator's view of memory-mapped files: operands and result slots to read, regions of C to write.

The idea: a file is mapped once, whole, and arrays are views into the map. The cache is bounded and forgets the least
recently used map; a map stays alive for as long as an array looks into it. A path must lie below the run directory,
whatever a message says, and a region must lie inside its file, so that a wrong message is an error here and never a
bus error. What a file name means stays the writer's: it never shrinks a file, and a new file gets a new inode.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tileweave.script.wire import Region

MAPS_MAX = 64
FLOAT_BYTES = 4
ALIGNMENT = 4  # of what is read as numbers
Floats = NDArray[np.float32]


class RegionError(ValueError):
    """A region that is not where it says: outside the run directory, past the end of its file, or no such file."""


class Maps:
    """Views of files below `root`. Safe for threads. `writable` maps are for regions of C only."""

    def __init__(self, root: Path, *, writable: bool = False, maps_max: int = MAPS_MAX) -> None:
        self._root = os.fspath(root.absolute()) + os.sep
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._maps_max = maps_max
        self._maps: OrderedDict[str, tuple[tuple[int, int], mmap.mmap]] = OrderedDict()
        self._lock = threading.Lock()

    def floats(self, region: Region, count: int) -> Floats:
        """The region as `count` float32 numbers. Raises RegionError."""
        return np.frombuffer(self.bytes(region, count * FLOAT_BYTES), np.float32)

    def bytes(self, region: Region, size: int) -> memoryview:
        """The region, which must have this size. Raises RegionError."""
        if region.size != size:
            raise RegionError(f"a region of {region.size} bytes, expected {size}")
        if region.offset < 0 or region.offset % ALIGNMENT:
            raise RegionError(f"a region at offset {region.offset}, expected a positive multiple of {ALIGNMENT}")
        end = region.offset + size
        return memoryview(self._mapped(region.path, end))[region.offset : end]

    def _mapped(self, path: str, end: int) -> mmap.mmap:
        if not path.startswith(self._root) or path != os.path.normpath(path):
            raise RegionError(f"got a region of {path}, expected a file below {self._root}")
        try:
            with self._lock:
                now = os.stat(path)  # noqa: PTH116  (on the path of every tile, and Path costs more than the call)
                identity = (now.st_dev, now.st_ino)
                known = self._maps.get(path)
                if known is not None and known[0] == identity and len(known[1]) >= end:
                    self._maps.move_to_end(path)
                    return known[1]
                with open(path, "r+b" if self._access == mmap.ACCESS_WRITE else "rb") as file:  # noqa: PTH123
                    mapped = mmap.mmap(file.fileno(), 0, access=self._access)
                if len(mapped) < end:
                    raise RegionError(f"a region up to byte {end} of {path}, which has {len(mapped)}")
                self._maps[path] = (identity, mapped)  # a replaced map goes when the last array lets it go
                if len(self._maps) > self._maps_max:
                    self._maps.popitem(last=False)
                return mapped
        except (OSError, ValueError) as error:  # ValueError: an empty file
            if isinstance(error, RegionError):
                raise
            raise RegionError(f"{path}: {error}") from error
