"""The messages of protocol v2: one struct each, with its number on the wire.

A frame is a 16-byte header, one JSON object (the fields below) and, for PANEL and RESULT, a run of payload bytes; see
`frames.py` for the layout and PROTOCOL.md for the page a stranger needs. Every field is bounded here, so that a message
that decodes is already within limits; the server still checks what only it can know (whose lease it is, whether the
length fits the tile). Numbers are never reused: a retired message keeps its number.

Sizes are bytes, times are seconds (`_s`), link rates are bytes per second (`_bps`), speeds are FLOP per second.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from tileweave.protocol.elements import Dtype, ResultDtype

PROTOCOL_VERSION = 2
JS_SAFE_INTEGER_MAX = 2**53 - 1
DIMENSION_MAX = 2**24
TEXT_CHARACTERS_MAX = 500
TERMS_MAX = 256  # of one lease

Id = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+\Z")]  # \Z: $ lets a newline by
LeaseId = Annotated[int, Meta(ge=0, le=JS_SAFE_INTEGER_MAX)]
Dimension = Annotated[int, Meta(ge=1, le=DIMENSION_MAX)]
Size = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Rate = Annotated[float, Meta(ge=0, le=1e18)]
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Name = Annotated[str, Meta(max_length=64)]
Secret = Annotated[str, Meta(min_length=16, max_length=128)]
Offset = Annotated[int, Meta(ge=0, le=DIMENSION_MAX)]


class Kind(IntEnum):
    """Message numbers; the `type` byte of a frame's header."""

    HELLO = 1
    WELCOME = 2
    PANEL = 3
    DROP = 4
    NEED = 5
    LEASE = 6
    RESULT = 7
    FAIL = 8
    ACK = 9
    REVOKE = 10
    STATUS = 11
    PING = 12
    PONG = 13
    BYE = 14


class Profile(Struct, frozen=True, kw_only=True):
    """What a device says of itself. Hints only: the server clamps them and then goes by what it measures."""

    kernel: Annotated[str, Meta(max_length=32)] = "unknown"
    flops: Rate = 0.0
    memory_bytes: Size = 0
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    agent: Annotated[str, Meta(max_length=300)] = ""


class Hello(Struct, frozen=True, kw_only=True):
    """Device -> server, first frame. Without `device` and `secret` a new device is made. `panels`: what it still holds,
    a hint (this server sends on each connection what its leases need, held or not); `leases`: results it finished and
    had no ACK for, which it sends again after WELCOME."""

    KIND: ClassVar[Kind] = Kind.HELLO
    client: Annotated[str, Meta(max_length=64)]
    profile: Profile
    device: Id | None = None
    secret: Secret | None = None
    name: Name = ""
    panels: Annotated[list[Id], Meta(max_length=4096)] = []
    leases: Annotated[list[LeaseId], Meta(max_length=64)] = []


class Limits(Struct, frozen=True, kw_only=True):
    """What the server accepts, told to the device in WELCOME."""

    frame_bytes_max: Size
    panel_bytes_max: Size
    result_bytes_max: Size
    leases_max: Annotated[int, Meta(ge=1, le=64)]
    ping_s: Seconds
    silence_s_max: Seconds


class Welcome(Struct, frozen=True, kw_only=True):
    """Server -> device: who you are. `secret` is sent once, when the device was made."""

    KIND: ClassVar[Kind] = Kind.WELCOME
    device: Id
    name: Name
    limits: Limits
    secret: Secret | None = None


class Panel(Struct, frozen=True, kw_only=True):
    """Server -> device: bytes [offset, offset + payload) of a panel of `rows` x `columns` elements of `dtype`, `size`
    bytes in all (elements.py says how they lie). The chunks of one panel come in order; chunks of two panels may
    interleave. A chunk at offset 0 begins the panel anew, whatever has come of it."""

    KIND: ClassVar[Kind] = Kind.PANEL
    panel: Id
    rows: Dimension
    columns: Dimension
    offset: Size
    size: Size
    dtype: Dtype = "f32"


class Drop(Struct, frozen=True, kw_only=True):
    """Server -> device: these panels will not be leased again; free them."""

    KIND: ClassVar[Kind] = Kind.DROP
    panels: Annotated[list[Id], Meta(max_length=4096)]


class Need(Struct, frozen=True, kw_only=True):
    """Device -> server: a lease names a panel the device does not hold; send it (again)."""

    KIND: ClassVar[Kind] = Kind.NEED
    panel: Id
    lease: LeaseId


Accuracy = Literal["rowwise", "normwise"]
"""What a product's errors must be small beside. rowwise: each row's own rounding, as in any order of summation.
normwise: the rounding of the largest terms of the whole product; Strassen-like algorithms give no more."""


class Term(Struct, frozen=True, kw_only=True):
    """One of the products whose sum a tile is: where its operands lie in two panels. `k` is the length of this term's
    sums. Lines are rows of A, or columns of B; where the lease says `by_k`, the panel's rows run along k instead.

        a_by_k false   A_i[r, l] = a[a_row + i m + r, a_column + l]        i < batch, r < m, l < k
        a_by_k true    A_i[r, l] = a[a_row + i k + l, a_column + r]
        b_by_k false   B_i[l, c] = b[b_row + i n + c, b_column + l]        c < n
        b_by_k true    B_i[l, c] = b[b_row + i k + l, b_column + c]
    """

    k: Dimension
    a: Id
    b: Id
    a_row: Offset = 0
    a_column: Offset = 0
    b_row: Offset = 0
    b_column: Offset = 0


class Lease(Struct, frozen=True, kw_only=True):
    """Server -> device: compute one tile. `batch` independent products C_i[m,n], each the sum of A_i[m,k] B_i[k,n] over
    `terms`. Answer with RESULT (batch x m x n elements of `dtype`, row-major) or FAIL within `deadline_s` of its
    arrival. Sums are float32 or better; a narrower result is rounded once, to the nearest, at the end. `job` is echoed
    in the answer. `accuracy`: what the result will be checked for."""

    KIND: ClassVar[Kind] = Kind.LEASE
    lease: LeaseId
    job: Id
    batch: Dimension
    m: Dimension
    n: Dimension
    terms: Annotated[list[Term], Meta(min_length=1, max_length=TERMS_MAX)]
    deadline_s: Seconds
    a_by_k: bool = False
    b_by_k: bool = False
    kind: Literal["tile"] = "tile"
    dtype: ResultDtype = "f32"
    accuracy: Accuracy = "rowwise"


class Result(Struct, frozen=True, kw_only=True):
    """Device -> server: bytes [offset, offset + payload) of a result of `size` bytes; chunks of one result in order.
    `seconds` is the time inside the kernel by the device's own monotonic clock (a hint, never trusted)."""

    KIND: ClassVar[Kind] = Kind.RESULT
    lease: LeaseId
    job: Id
    seconds: Seconds
    offset: Size
    size: Size


FailCode = Literal["memory", "kernel", "panel", "unsupported", "stopped"]


class Fail(Struct, frozen=True, kw_only=True):
    """Device -> server: this lease will not be answered; give the tile to another."""

    KIND: ClassVar[Kind] = Kind.FAIL
    lease: LeaseId
    job: Id
    code: FailCode
    message: Text = ""


Verdict = Literal["accepted", "duplicate", "late", "rejected"]


class Ack(Struct, frozen=True, kw_only=True):
    """Server -> device: the final word on a result; the device forgets it and never sends it again. `flop` is what was
    credited for it, 0 unless accepted."""

    KIND: ClassVar[Kind] = Kind.ACK
    lease: LeaseId
    job: Id
    verdict: Verdict
    reason: Text = ""
    flop: Annotated[int, Meta(ge=0, le=JS_SAFE_INTEGER_MAX)] = 0


class Revoke(Struct, frozen=True, kw_only=True):
    """Server -> device: these leases are not needed any more; stop where you can, send nothing."""

    KIND: ClassVar[Kind] = Kind.REVOKE
    job: Id
    leases: Annotated[list[LeaseId], Meta(max_length=4096)]


class Status(Struct, frozen=True, kw_only=True):
    """Device -> server: whether it takes work (and if not, why). `visible` and `capacity_bytes` are hints that this
    server makes no use of: it plans with the memory of the profile."""

    KIND: ClassVar[Kind] = Kind.STATUS
    state: Literal["ready", "paused", "stopping"]
    reason: Text = ""
    visible: bool = True
    capacity_bytes: Size = 0


class Ping(Struct, frozen=True, kw_only=True):
    """Either way: answer at once with the same nonce. Proof of life and the measure of the round trip."""

    KIND: ClassVar[Kind] = Kind.PING
    nonce: Annotated[int, Meta(ge=0, le=JS_SAFE_INTEGER_MAX)]


class Pong(Struct, frozen=True, kw_only=True):
    """The answer to PING."""

    KIND: ClassVar[Kind] = Kind.PONG
    nonce: Annotated[int, Meta(ge=0, le=JS_SAFE_INTEGER_MAX)]


ByeCode = Literal["done", "reload", "protocol", "refused", "quarantined", "busy", "shutdown", "replaced", "silent"]


class Bye(Struct, frozen=True, kw_only=True):
    """Either way, last frame: why the connection ends. `reload`: the page is older than the server; `busy` and
    `quarantined`: come back after `retry_s`; `replaced`: the same device connected elsewhere."""

    KIND: ClassVar[Kind] = Kind.BYE
    code: ByeCode
    reason: Text = ""
    retry_s: Seconds = 0.0


Message = Hello | Welcome | Panel | Drop | Need | Lease | Result | Fail | Ack | Revoke | Status | Ping | Pong | Bye
MESSAGES: dict[Kind, type[Message]] = {
    cls.KIND: cls
    for cls in (
        Hello, Welcome, Panel, Drop, Need, Lease, Result, Fail, Ack, Revoke, Status, Ping, Pong, Bye,
    )
}  # fmt: skip
