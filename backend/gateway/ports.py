"""What a connection needs of the world: a websocket, and the gateway it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backend.gateway.maps import PanelSource
from backend.gateway.slots import Slot
from backend.settings import Settings
from backend.switchboard.messages import PanelRef, SlotRef, SwitchMessage
from tileweave.protocol import Profile


class Closed(Exception):
    """The peer is gone."""


class Transport(Protocol):
    """A websocket, as far as a connection needs it."""

    async def receive(self) -> bytes | None:
        """The next binary message; None for a text message. Raises Closed."""

    async def send(self, frame: bytes) -> None:
        """Sends a binary message; waits while the peer does not read. Raises Closed."""


class House(Protocol):
    """What a connection needs of its gateway."""

    settings: Settings

    async def tell_job(self, job: str, message: SwitchMessage) -> None:
        """To the coordinator of `job`."""

    def offer_job(self, job: str, message: SwitchMessage) -> None:
        """The same for what may be lost, since it will be said again."""

    async def takes_results(self, job: str) -> bool:
        """Whether the job is still to be computed."""

    async def take_slot(self, size: int, job: str, leased: bool) -> Slot | None:
        """A slot, waiting for one if need be; None where none came free in time. Not `leased`: a result sent again."""

    def slot_view(self, slot: Slot) -> memoryview:
        """The slot's bytes."""

    def slot_ref(self, slot: Slot) -> SlotRef:
        """How the coordinator finds it."""

    def slot_filled(self, slot: Slot) -> None:
        """The slot is now the coordinator's to release."""

    def free_slot(self, slot: Slot) -> None:
        """The slot is not needed."""

    def panel(self, ref: PanelRef) -> PanelSource:
        """Where a panel's bytes are. Raises PanelGone."""

    def count(self, direction: str, size: int) -> None:
        """Bytes on a device socket, `in` or `out`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is connected. `accepted` and `rejects` are its standing when it was let in."""

    device: str
    connection: str
    name: str
    profile: Profile
    accepted: int
    rejects: int
