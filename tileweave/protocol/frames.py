"""One websocket message is one frame: header, JSON metadata, payload.

      0    1    2        3     4            8               12       16                        16*j
    +----+----+---------+----+------------+---------------+--------+----------------+-------+-----------------+
    | T  | W  | version | no.| meta_len   | payload_len   | zero   | meta (JSON)    | zeros | payload         |
    | u8 | u8 | u8 = 2  | u8 | u32        | u32           | u32    | meta_len bytes | <= 15 | payload_len     |
    +----+----+---------+----+------------+---------------+--------+----------------+-------+-----------------+

Integers are little-endian. The zeros after the metadata bring the payload to a multiple of 16 bytes, so that a
typed array (or a SIMD load) views it where it lies. Only PANEL and RESULT carry a payload, and theirs is never empty.

The idea: `decode` looks at lengths before it touches bytes, so a hostile frame costs a bounded amount of work and no
memory beyond the frame that already arrived; the payload it returns is a view. Both ends use the same two functions.
Errors come in two kinds: `ProtocolError` is the peer's fault and ends its connection; `ValueError` is our own bug.

Left out: whose lease it is, whether a length fits the tile, and the order of messages (the server's and the session's
job).
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Final

import msgspec

from tileweave.protocol.elements import panel_bytes
from tileweave.protocol.messages import MESSAGES, PROTOCOL_VERSION, Kind, Message, Panel, Result

FRAME_BYTES_MAX: Final = 1 << 20
META_BYTES_MAX: Final = 1 << 16
NESTING_MAX: Final = 64  # objects and lists within each other, the outermost included
HEADER_BYTES: Final = 16
MAGIC: Final = b"TW"
ERROR_TEXT_MAX: Final = 300  # of an error that may quote the peer; BYE and ACK carry up to 500

_HEADER = struct.Struct("<2sBBIII")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]')
_ZEROS = bytes(HEADER_BYTES)
_NOTHING = memoryview(b"")
_encoder = msgspec.json.Encoder()
_decoders: dict[int, msgspec.json.Decoder[Message]] = {
    int(kind): msgspec.json.Decoder(cls) for kind, cls in MESSAGES.items()
}


class ProtocolError(Exception):
    """The peer sent bytes that are not this protocol. The text says what was got and what was expected."""

    def __init__(self, text: str) -> None:
        super().__init__(text[:ERROR_TEXT_MAX])


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol; a server answers it BYE `reload`."""


def encode(message: Message, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """One frame holding `message` and, for PANEL and RESULT, `payload` (any C-contiguous buffer, copied once).

    Raises ValueError when the frame would break a limit: that is a bug of the caller, not of the peer.
    """
    meta = _encoder.encode(message)
    payload_len = memoryview(payload).nbytes
    padding = -len(meta) % HEADER_BYTES
    if len(meta) > META_BYTES_MAX:
        raise ValueError(
            f"{message.KIND.name}: metadata of {len(meta)} bytes, at most {META_BYTES_MAX}; send it in several messages"
        )
    if HEADER_BYTES + len(meta) + padding + payload_len > FRAME_BYTES_MAX:
        raise ValueError(
            f"{message.KIND.name}: {payload_len} bytes of payload make a frame over {FRAME_BYTES_MAX}; use chunks()"
        )
    fault = _payload_fault(message, payload_len)
    if fault:
        raise ValueError(f"{message.KIND.name}: {fault}")
    header = _HEADER.pack(MAGIC, PROTOCOL_VERSION, message.KIND, len(meta), payload_len, 0)
    return b"".join((header, meta, _ZEROS[:padding], payload))


def decode(frame: bytes | bytearray | memoryview) -> tuple[Message, memoryview]:
    """The message in `frame` and a view of its payload (empty unless PANEL or RESULT); nothing is copied.

    Raises VersionMismatch for another protocol version and ProtocolError for anything else that is not a valid frame;
    no other exception, whatever the bytes.
    """
    view = memoryview(frame).cast("B")
    kind, meta_len, payload_len = _read_header(view)
    meta_end = HEADER_BYTES + meta_len
    payload_start = meta_end + (-meta_len % HEADER_BYTES)
    if payload_start + payload_len != len(view):
        raise ProtocolError(
            f"frame of {len(view)} bytes, but its header says {payload_start} + {payload_len} (metadata, payload)"
        )
    if view[meta_end:payload_start] != _ZEROS[: payload_start - meta_end]:
        raise ProtocolError(f"{kind.name}: the padding after the metadata is not zero")
    message = _decode_meta(kind, view[HEADER_BYTES:meta_end])
    fault = _payload_fault(message, payload_len)
    if fault:
        raise ProtocolError(f"{kind.name}: {fault}")
    return message, view[payload_start:] if payload_len else _NOTHING


def _read_header(view: memoryview) -> tuple[Kind, int, int]:
    """(message number, meta_len, payload_len) of a frame, each within its limit."""
    if not HEADER_BYTES <= len(view) <= FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {len(view)} bytes, expected {HEADER_BYTES} to {FRAME_BYTES_MAX}")
    magic, version, number, meta_len, payload_len, reserved = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"frame starts with {magic!r}, expected {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(f"protocol version {version}, expected {PROTOCOL_VERSION}; reload or update the client")
    if number not in _decoders:
        raise ProtocolError(f"unknown message number {number}, expected 1 to {max(_decoders)}")
    if reserved != 0:
        raise ProtocolError(f"reserved header bytes hold {reserved}, expected 0")
    if meta_len > META_BYTES_MAX:
        raise ProtocolError(f"metadata of {meta_len} bytes, at most {META_BYTES_MAX}")
    return Kind(number), meta_len, payload_len


def _decode_meta(kind: Kind, meta: memoryview) -> Message:
    """The message struct in `meta`, every field within the bounds of messages.py."""
    try:
        text = str(meta, "utf-8")
        _refuse_deep_nesting(text)
        message = _decoders[kind].decode(meta)
        # A second reading, 3 us for a RESULT, since msgspec takes the last of two equal keys without a word: two
        # readers could then see two different messages.
        _KEYS.decode(text)
    except ValueError as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors too
        raise ProtocolError(f"{kind.name}: {error}") from None
    return message


def _refuse_deep_nesting(text: str) -> None:
    """Keeps every reader within the same depth, and clear of its own recursion limit."""
    if text.count("[") + text.count("{") <= NESTING_MAX:
        return
    depth = 0
    for bracket in _STRING_OR_BRACKET.findall(text):
        depth += 1 if bracket in ("[", "{") else -1 if bracket in ("]", "}") else 0
        if depth > NESTING_MAX:
            raise ValueError(f"metadata nested over {NESTING_MAX} levels")


def _unique_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a JSON object names a key twice")


_KEYS = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=len)  # len: no big-integer arithmetic on long digits


def _payload_fault(message: Message, payload_len: int) -> str:
    """Why a payload of that many bytes cannot belong to `message`; "" when it can."""
    if not isinstance(message, Panel | Result):
        return f"carries a payload of {payload_len} bytes, expected none" if payload_len else ""
    if payload_len == 0:
        return "carries no payload"
    if message.offset + payload_len > message.size:
        return f"bytes {message.offset} + {payload_len} lie outside its size {message.size}"
    if isinstance(message, Panel):
        expected = panel_bytes(message.rows, message.columns, message.dtype)
        if message.size != expected:
            return f"size {message.size}, expected {expected} for {message.rows} x {message.columns} {message.dtype}"
    return ""
