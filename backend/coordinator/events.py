"""What goes into the coordinator's core and what comes out of it.

The core (`machine.py`) is a pure state machine: `handle(event, now_s) -> list[Effect]`. The shell (backend/jobs) turns
switchboard messages, script requests, finished checks and clock ticks into events, and carries the effects out. The
simulator does the same with a virtual clock. Nothing here touches a socket, a file or a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from backend.switchboard.messages import DeviceOnline, PanelRef, SlotRef
from planner.shapes import Gemm, Rect
from tileweave.protocol.elements import ELEMENT_BYTES, WIRES, Elements, panel_bytes
from tileweave.protocol.messages import Accuracy, Lease, Verdict

# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """One part of an operand as the script stored it: `rows` x `columns` of the wire's elements at `offset` of the file
    at `path` (i8: the scales at `scales`), unchanged for as long as the stamp is there (switchboard's PanelRef).
    `content` is the same for the same bytes only."""

    content: str
    path: str
    offset: int
    rows: int
    columns: int
    stamp_offset: int = 0
    stamp: int = 0
    scales: int = 0


@dataclass(frozen=True, slots=True)
class GemmSubmitted:
    """The script wants C_i[m,n] = A_i[m,k] B_i[k,n], i < batch, or with several parts the sum of A_p B_p. Each part of
    A is stored by lines, batch x m rows of k, or `a_by_k`, batch x k rows of m; of B so with n. `b_uses`: products that
    B is expected to be part of. `accuracy`: what its leases ask for."""

    gemm: int
    step: int
    batch: int
    m: int
    n: int
    k: int
    a: tuple[Matrix, ...]
    b: tuple[Matrix, ...]
    a_by_k: bool = False
    b_by_k: bool = False
    b_uses: int = 1
    elements: Elements = WIRES["f32"]
    accuracy: Accuracy = "rowwise"

    @property
    def shape(self) -> Gemm:
        """For the planner."""
        panels = self.elements.panels
        widest = min(matrix.columns for matrix in (*self.a, *self.b))
        return Gemm(
            self.batch, self.m, self.n, self.k, panel_bytes(1, widest, panels) / widest,
            ELEMENT_BYTES[self.elements.results], len(self.a), self.a_by_k, self.b_by_k, self.b_uses,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """A device was given to this job. `accepted` and `rejects` are its standing in the ledger."""

    device: str
    connection: str
    gateway: str
    flops: float
    memory_bytes: int
    workers: int
    rtt_s: float
    down_bps: float
    up_bps: float
    accepted: int
    rejects: int

    @classmethod
    def of(cls, online: DeviceOnline) -> Joined:
        """The event of a device that its gateway announced so."""
        profile = online.profile
        return cls(
            device=online.device, connection=online.connection, gateway=online.gateway, flops=profile.flops,
            memory_bytes=profile.memory_bytes, workers=profile.workers, rtt_s=online.rtt_s, down_bps=online.down_bps,
            up_bps=online.up_bps, accepted=online.accepted, rejects=online.rejects,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Left:
    """The device's connection closed, or the allocator took the device away."""

    device: str
    connection: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayRestarted:
    """Every device connected through `gateway` before this moment is gone."""

    gateway: str


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A complete upload lies in `slot`."""

    device: str
    connection: str
    lease: int
    seconds: float
    upload_s: float
    slot: SlotRef


class Check(Enum):
    """What verification says of a product."""

    GOOD = "good"
    BAD = "bad"
    UNSURE = "unsure"  # of a norm-wise product only: more rounding than is known of, less than a lie is sure to show
    OPERANDS_NOT_FINITE = "operands_not_finite"


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer to `StartCheck`. (The grey zone of trust is resolved by the verifier's own recomputation first.)"""

    lease: int
    verdict: Check
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to `Store`: the ledger has committed and the tile stands in C. `credited` is False where the ledger
    already held this rectangle."""

    lease: int
    credited: bool


@dataclass(frozen=True, slots=True)
class LeaseFail:
    """The device gave up, or (`bad`) sent something that cannot be the result."""

    device: str
    connection: str
    lease: int
    code: str
    message: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The device pauses or takes work again; or its link was measured (0: not measured)."""

    device: str
    connection: str
    ready: bool
    reason: str
    rtt_s: float = 0.0
    down_bps: float = 0.0
    up_bps: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. The shell sends one at least every `tick_s`; a gap much longer than that is the server's own stall
    and is not held against devices."""


Event = (
    GemmSubmitted
    | Joined
    | Left
    | GatewayRestarted
    | ResultArrived
    | Checked
    | Stored
    | LeaseFail
    | StatusChanged
    | Tick
)

# ---- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendLease:
    """Push this lease to the device through its gateway."""

    gateway: str
    device: str
    connection: str
    lease: Lease
    panels: tuple[PanelRef, ...]


@dataclass(frozen=True, slots=True)
class SendAck:
    """The final word on a result; sent to where the result came from, even a device that is no longer this job's."""

    gateway: str
    device: str
    connection: str
    lease: int
    verdict: Verdict
    reason: str
    flop: int


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Nobody reads this slot any more."""

    slot: SlotRef


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """These leases are not needed any more."""

    gateway: str
    device: str
    connection: str
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropPanels:
    """That device must make room: drop these panels there, after the leases already sent and before those that
    follow."""

    panels: tuple[str, ...]
    gateway: str
    device: str
    connection: str


@dataclass(frozen=True, slots=True)
class PrepareCheck:
    """A lease went out: what its check needs besides the result (B R once for all tiles of these columns, A (B R) for
    each)."""

    gemm: int
    rect: Rect


@dataclass(frozen=True, slots=True)
class StartCheck:
    """Is the product in `slot` that of `rect` of `gemm`, as exact as its lease asked for? Answer with `Checked`."""

    lease: int
    gemm: int
    rect: Rect
    slot: SlotRef
    accuracy: Accuracy = "rowwise"


@dataclass(frozen=True, slots=True)
class Store:
    """Commit the ledger row (credit, standing), then copy the slot into C. Answer with `Stored`. `seconds` is the
    device's kernel time, `span_s` the server's: from the lease's sending to its result."""

    lease: int
    device: str
    gemm: int
    step: int
    rect: Rect
    flop: int
    seconds: float
    span_s: float
    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Blame:
    """Record a reject against the device in the ledger: its count of good results starts anew, it is quarantined, and
    its connection is ended with the reason."""

    device: str
    connection: str
    gateway: str
    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class GemmDone:
    """Every tile of C is verified and in place. `span_s`: first lease sent to last tile stored."""

    gemm: int
    step: int
    tiles: int
    span_s: float
    kernel_seconds: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class GemmFailed:
    """The GEMM cannot be computed; no device is to blame."""

    gemm: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """For counters and the event log: a lease was taken back. `waited_s` is from its sending."""

    device: str
    lease: int
    why: str
    waited_s: float


Effect = (
    SendLease | SendAck | FreeSlot | SendRevoke | DropPanels | PrepareCheck | StartCheck | Store | Blame | GemmDone
    | GemmFailed | LeaseLost
)  # fmt: skip
