"""Payloads larger than a frame: cut by `chunks`, put together by `Reassembly`.

The idea: chunks come in order and every one repeats the whole's size, so the receiver allocates once, at the first
chunk and only within its limit, and can refuse a gap, an overlap, a change of size or an overflow at once. Left out:
several wholes at a time (keep one Reassembly for each) and any timeout (a lease's deadline covers it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tileweave.protocol.frames import FRAME_BYTES_MAX, ProtocolError

CHUNK_HEADROOM_BYTES: Final = 4096  # header, metadata of a PANEL or RESULT (under 400 bytes) and padding
CHUNK_BYTES_MAX: Final = FRAME_BYTES_MAX - CHUNK_HEADROOM_BYTES


def chunks(size: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of each chunk of a payload of `size` bytes, in order; offsets are multiples of 16.

    Raises ValueError when `frame_bytes_max` leaves no room for a payload.
    """
    room = (min(frame_bytes_max, FRAME_BYTES_MAX) - CHUNK_HEADROOM_BYTES) // 16 * 16
    if room <= 0:
        raise ValueError(f"frame_bytes_max={frame_bytes_max}, expected over {CHUNK_HEADROOM_BYTES + 16}")
    for offset in range(0, size, room):
        yield offset, min(room, size - offset)


class Reassembly:
    """Collects the chunks of one payload, strictly in order, into one buffer.

    `size_max` bounds the size the first chunk may declare.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.size = 0  # 0 until the first chunk
        self.received = 0
        self._buffer: memoryview | None = None

    @property
    def complete(self) -> bool:
        """Whether every byte has come."""
        return self.size > 0 and self.received == self.size

    @property
    def data(self) -> memoryview:
        """The whole payload, `size` bytes. Raises ValueError before it is complete."""
        if self._buffer is None or not self.complete:
            raise ValueError(f"{self.received} of {self.size} bytes received; wait until complete")
        return self._buffer[: self.size]

    def add(self, offset: int, size: int, payload: bytes | memoryview) -> bool:
        """Takes the next chunk; True when it was the last. `offset` and `size` are the message's, in bytes.

        Raises ProtocolError, and takes nothing, for a chunk out of order, past the end, of a changed or too large size.
        """
        chunk = memoryview(payload).cast("B")
        if self.size == 0 and not 0 < size <= self.size_max:
            raise ProtocolError(f"size of {size} bytes, expected 1 to {self.size_max}")
        if self.size not in (0, size):
            raise ProtocolError(f"size changed from {self.size} to {size} bytes between two chunks")
        if offset != self.received:
            raise ProtocolError(f"chunk at byte {offset}, expected the one at {self.received}")
        if not 0 < len(chunk) <= size - offset:
            raise ProtocolError(f"chunk of {len(chunk)} bytes, expected 1 to {size - offset}")
        if self._buffer is None:
            self._buffer = memoryview(bytearray(size))
        self.size = size
        self._buffer[offset : offset + len(chunk)] = chunk
        self.received += len(chunk)
        return self.complete
