"""The script's operand arena: memory-mapped files that the coordinator and the gateways read without a copy.

    segment-0.bin  | stamp, A of GEMM 7 | stamp, B | stamp, C | free | ...    64 MiB each, or one bigger request

The idea: a GEMM's operands and product are regions of a few long-lived files in shared memory. A region that comes back
goes on the free list of its size class and is handed out again last in, first out, so its pages stay mapped and warm; a
training loop asks for the same sizes every step and after the first step the arena no longer grows.
A region's stamp changes before its content does: a gateway that still copies a panel out of it finds the stamp changed
afterwards, and does not call what it copied that panel (a seqlock with one writer).
Space is reserved with posix_fallocate before it is mapped, since touching a page of a full tmpfs kills the process.
Left out: giving space back before the end (files only go away in `close`), and merging neighbours.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from tileweave.script.wire import Region

ARENA_BYTES_MAX = 8 << 30
"""All segments together."""

SEGMENT_BYTES = 64 << 20
"""One file; a bigger region gets a file of its own."""

HEADER_BYTES = 64
"""Before each region: its stamp, and padding."""

FREE = 0
"""The stamp of a region that is not in use."""

REGION_BYTES_MIN = 4096
"""The smallest size class: below it regions would share pages for no gain."""


_STAMP = struct.Struct("<Q")


class ArenaFullError(RuntimeError):
    """There is no room for an operand or product; the message says how much was asked for and what is held."""


def size_class(size: int) -> int:
    """`size` bytes rounded up to one of four steps per power of two: wastes at most 25 %, and 64 divides it."""
    size = max(size, REGION_BYTES_MIN)
    step = 1 << (size.bit_length() - 3)
    return -(-size // step) * step


@dataclass(slots=True)
class _Segment:
    path: str
    memory: torch.Tensor  # (size,) uint8 over the whole mapping
    buffer: memoryview  # the same
    size: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A region in use: where it lies, its memory as bytes (a uint8 tensor, and a buffer), and its stamp, in the 8 bytes
    at `stamp_offset` of the file for as long as the region is in use."""

    region: Region
    memory: torch.Tensor
    buffer: memoryview
    stamp_offset: int
    stamp: int
    reserved: int

    @property
    def floats(self) -> torch.Tensor:
        """As float32 numbers, flat."""
        return self.memory.view(torch.float32)


class Arena:
    """Regions of memory-mapped files in `folder`, at most `limit` bytes in all. Safe to use from several threads."""

    def __init__(self, folder: Path, limit: int = ARENA_BYTES_MAX, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._free: defaultdict[int, list[tuple[_Segment, int]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._stamps = itertools.count(1 + int.from_bytes(os.urandom(7), "little"))  # another arena's are others

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def allocate(self, size: int) -> Block:
        """A 64-byte aligned region of `size` bytes, of unspecified content.

        Raises ArenaFullError when the limit or the file system leaves no room."""
        reserved = HEADER_BYTES + size_class(size)
        with self._lock:
            segment, header = self._place(reserved)
            stamp = next(self._stamps)
            _STAMP.pack_into(segment.buffer, header, stamp)
        offset = header + HEADER_BYTES
        region = Region(path=segment.path, offset=offset, size=size)
        end = offset + size
        return Block(region, segment.memory[offset:end], segment.buffer[offset:end], header, stamp, reserved)

    def free(self, block: Block) -> None:
        """Takes the region back; nobody may write it any more, and who still reads it sees by the stamp that what it
        read may be something else."""
        with self._lock:
            segment = next(s for s in self._segments if s.path == block.region.path)
            _STAMP.pack_into(segment.buffer, block.stamp_offset, FREE)
            self._free[block.reserved].append((segment, block.stamp_offset))

    def close(self) -> None:
        """Removes the files. Mappings that others hold stay valid until they let go."""
        with self._lock:
            for segment in self._segments:
                Path(segment.path).unlink(missing_ok=True)
            self._segments.clear()
            self._free.clear()

    def _place(self, reserved: int) -> tuple[_Segment, int]:
        """An offset for a region of this class: a freed one, the tail of a segment, or a new segment."""
        if self._free[reserved]:
            return self._free[reserved].pop()
        segment = next((s for s in self._segments if s.used + reserved <= s.size), None)
        if segment is None:
            segment = self._add_segment(reserved)
        offset, segment.used = segment.used, segment.used + reserved
        return segment, offset

    def _add_segment(self, wanted: int) -> _Segment:
        size = -(-max(wanted, self._segment_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        held = self.reserved
        if held + size > self._limit:
            raise ArenaFullError(
                f"the operand arena in {self._folder} holds {held:,} bytes and needs {size:,} more, "
                f"beyond its limit of {self._limit:,}: use a smaller batch or raise the limit"
            )
        path = self._folder / f"segment-{len(self._segments)}.bin"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            room = os.statvfs(self._folder)
            raise ArenaFullError(
                f"no room for {size:,} bytes of operands in {self._folder}: {room.f_bavail * room.f_frsize:,} bytes "
                f"are free and the arena already holds {held:,}; free space there, or use a smaller batch"
            ) from error
        finally:
            os.close(descriptor)
        segment = _Segment(str(path), torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory), size)
        self._segments.append(segment)
        return segment
