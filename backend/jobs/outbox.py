"""What the coordinator has to say to the switchboard, sent in turns.

The idea: handlers only append; one task sends all that has gathered, one stream entry for each gateway, while the next
turn gathers. Incoming entries are acknowledged in the same task and after the send, once nothing that they named is
still being worked on: a result's entry waits until its slot is freed, which follows the commit of its tile.
"""

from __future__ import annotations

import asyncio

from backend.switchboard.messages import SlotRef, SwitchMessage
from backend.switchboard.streams import Switchboard

_Slot = tuple[str, int]  # gateway, slot number


class Outbox:
    """Messages by stream, and the entries of `stream` that may be acknowledged."""

    def __init__(self, switchboard: Switchboard, stream: str) -> None:
        self._switchboard = switchboard
        self._stream = stream
        self._messages: dict[str, list[SwitchMessage]] = {}
        self._handled: list[str] = []
        self._entry_slots: dict[str, set[_Slot]] = {}
        self._slot_entry: dict[_Slot, str] = {}
        self._something = asyncio.Event()

    def put(self, stream: str, message: SwitchMessage) -> None:
        """Goes out in the next turn, after what was put before."""
        self._messages.setdefault(stream, []).append(message)
        self._something.set()

    def opened(self, entry: str, slots: list[SlotRef]) -> None:
        """An entry came in; call before its messages are handled. It is done when these slots are free."""
        pending = {(slot.gateway, slot.slot) for slot in slots}
        if pending:
            self._entry_slots[entry] = pending
            self._slot_entry.update(dict.fromkeys(pending, entry))
        else:
            self._done(entry)

    def freed(self, slot: SlotRef) -> None:
        """Nobody reads the slot any more."""
        self._free((slot.gateway, slot.slot))

    def forget_gateway(self, gateway: str) -> None:
        """It restarted: its slots will not be freed one by one."""
        for slot in [slot for slot in self._slot_entry if slot[0] == gateway]:
            self._free(slot)

    async def serve(self) -> None:
        """Sends and acknowledges, turn by turn, until cancelled."""
        while True:
            await self._something.wait()
            await self.flush()

    async def flush(self) -> None:
        """One turn. Raises SwitchboardError where Redis stays away."""
        self._something.clear()
        messages, self._messages = self._messages, {}
        handled, self._handled = self._handled, []
        await self._switchboard.send_many(messages, (self._stream, handled))

    def _free(self, slot: _Slot) -> None:
        entry = self._slot_entry.pop(slot, None)
        if entry is None:
            return
        pending = self._entry_slots[entry]
        pending.discard(slot)
        if not pending:
            del self._entry_slots[entry]
            self._done(entry)

    def _done(self, entry: str) -> None:
        self._handled.append(entry)
        self._something.set()
