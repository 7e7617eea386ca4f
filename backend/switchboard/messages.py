"""What the server's processes say to each other through Redis Streams: gateways, coordinators, the allocator.

One stream per reader: `tw:gw:{gateway}` (a gateway), `tw:co:{job}` (a coordinator), `tw:al` (the allocator). One stream
entry carries a msgpack list of these structs, so that a turn of the sender costs one XADD. Every message is idempotent
or fenced: device connections by `connection` (new for each socket), allocations by `epoch`, results by lease id.
Tensors never travel here: panels are named as regions of the script's arena, results as slots of a gateway's file.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tileweave.protocol.elements import Dtype, panel_bytes
from tileweave.protocol.messages import Ack, ByeCode, FailCode, Lease, Profile


class PanelRef(Struct, frozen=True, array_like=True):
    """Where a gateway finds a panel's bytes in the file at `path`: `rows` x `columns` elements of `dtype` at `offset`,
    for i8 the scales at `scales`. They are this panel's for as long as the 8 bytes at `stamp_offset` hold `stamp`
    (little-endian): who writes something else there changes the stamp first (tileweave/script/arena.py)."""

    panel: str
    path: str
    offset: int
    rows: int
    columns: int
    stamp_offset: int
    stamp: int
    dtype: Dtype = "f32"
    scales: int = 0

    @property
    def size(self) -> int:
        """Its bytes, as PANEL carries them."""
        return panel_bytes(self.rows, self.columns, self.dtype)


class SlotRef(Struct, frozen=True, array_like=True):
    """A complete upload: `size` bytes at `offset` of the gateway's file at `path`; slot `slot` of gateway `gateway`.
    Never written again until its `Release`."""

    gateway: str
    slot: int
    path: str
    offset: int
    size: int


class SwitchMessage(Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Base of all switchboard messages; `tag` names the message on the stream."""


# ---- to a gateway ----------------------------------------------------------------------------------------------------


class Push(SwitchMessage, frozen=True, tag="push"):
    """Send a lease to a device, after whichever of its panels this connection has not been sent."""

    device: str
    connection: str
    lease: Lease
    panels: list[PanelRef]


class Acknowledge(SwitchMessage, frozen=True, tag="ack"):
    """Send an ACK. The slot is released by its own message."""

    device: str
    connection: str
    ack: Ack


class Release(SwitchMessage, frozen=True, tag="release"):
    """The coordinator has read these result slots; they may be used again."""

    slots: list[int]


class RevokeLeases(SwitchMessage, frozen=True, tag="revoke"):
    """Send REVOKE; an upload of such a lease in progress is dropped."""

    device: str
    connection: str
    job: str
    leases: list[int]


class DropPanels(SwitchMessage, frozen=True, tag="drop"):
    """Send DROP for these panels, in order with the device's leases. They may be leased again."""

    device: str
    connection: str
    panels: list[str]


class Assign(SwitchMessage, frozen=True, tag="assign"):
    """From the allocator: this connection now serves `job` (None: nobody)."""

    device: str
    connection: str
    job: str | None
    epoch: int


class Kick(SwitchMessage, frozen=True, tag="kick"):
    """Send BYE and close."""

    device: str
    connection: str
    code: ByeCode
    reason: str
    retry_s: float = 0.0


class Census(SwitchMessage, frozen=True, tag="census"):
    """From a fresh allocator: announce every open connection again with `DeviceOnline`."""


# ---- to the allocator ------------------------------------------------------------------------------------------------


class DeviceOnline(SwitchMessage, frozen=True, tag="online"):
    """A device said HELLO and was let in. Measured link figures are 0 where unknown."""

    device: str
    connection: str
    gateway: str
    profile: Profile
    rtt_s: float = 0.0
    down_bps: float = 0.0
    up_bps: float = 0.0
    accepted: int = 0
    rejects: int = 0


class DeviceOffline(SwitchMessage, frozen=True, tag="offline"):
    """The connection is closed; also sent to the coordinator it served."""

    device: str
    connection: str
    reason: str


class GatewayUp(SwitchMessage, frozen=True, tag="gateway_up"):
    """A gateway (re)started: whatever was connected to an earlier `incarnation` of it is gone. To the allocator and to
    every coordinator."""

    gateway: str
    incarnation: str


class JobReady(SwitchMessage, frozen=True, tag="job_ready"):
    """A coordinator (re)started and takes devices."""

    job: str
    epoch: int
    weight: float


class JobGone(SwitchMessage, frozen=True, tag="job_gone"):
    """A coordinator ended or died; its devices are free."""

    job: str
    epoch: int


# ---- to a coordinator ------------------------------------------------------------------------------------------------


class DeviceJoined(SwitchMessage, frozen=True, tag="joined"):
    """From the allocator: this connection is the job's until `DeviceLeft`."""

    online: DeviceOnline
    epoch: int


class DeviceLeft(SwitchMessage, frozen=True, tag="left"):
    """From the allocator: taken away or gone."""

    device: str
    connection: str
    reason: str


class ResultReady(SwitchMessage, frozen=True, tag="result"):
    """A complete RESULT lies in a slot. `upload_s` is from its first byte to its last by the gateway's clock."""

    device: str
    connection: str
    lease: int
    seconds: float
    upload_s: float
    slot: SlotRef


class LeaseFailed(SwitchMessage, frozen=True, tag="lease_failed"):
    """The device sent FAIL, or a result of the wrong length (code `unsupported`, and `bad` set)."""

    device: str
    connection: str
    lease: int
    code: FailCode
    message: str = ""
    bad: bool = False


class DeviceStatus(SwitchMessage, frozen=True, tag="status"):
    """The device's STATUS, or fresh link measurements by the gateway (rates 0 where not measured)."""

    device: str
    connection: str
    state: Literal["ready", "paused", "stopping"] = "ready"
    reason: str = ""
    rtt_s: float = 0.0
    down_bps: float = 0.0
    up_bps: float = 0.0


class JobControl(SwitchMessage, frozen=True, tag="control"):
    """From REST, through the supervisor."""

    what: Literal["cancel"]


ToGateway = Push | Acknowledge | Release | RevokeLeases | DropPanels | Assign | Kick | Census
ToAllocator = DeviceOnline | DeviceOffline | GatewayUp | JobReady | JobGone
ToCoordinator = (
    DeviceJoined | DeviceLeft | DeviceOffline | GatewayUp | ResultReady | LeaseFailed | DeviceStatus | JobControl
)
