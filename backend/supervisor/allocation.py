"""The allocator's shell: its stream in, its effects out, one entry at a time.

The idea: an allocator remembers nothing across a start. Whatever its stream still held is from processes that ended
with the last supervisor, so the stream is emptied; every gateway is asked to announce its connections again, and every
coordinator repeats now and then that it is ready. The same is done when Redis came back without its last second.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from backend.allocator.core import Allocator, Effect, TellGateway
from backend.switchboard.messages import SwitchMessage, ToAllocator
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, coordinator_stream, gateway_stream


class Allocation:
    """Runs the one allocator of a server; `gateways` are all there can be."""

    def __init__(self, switchboard: Switchboard, gateways: Sequence[str]) -> None:
        self._switchboard = switchboard
        self._gateways = gateways
        self._allocator = Allocator(_epoch_start())

    async def serve(self) -> None:
        """Runs until cancelled."""
        await self._switchboard.drop_stream(ALLOCATOR_STREAM)
        entries: AsyncIterator[tuple[str, list[ToAllocator]]]
        entries = self._switchboard.receive(ALLOCATOR_STREAM, ToAllocator)
        await self.start_anew()
        async for entry, messages in entries:
            effects = [effect for message in messages for effect in self._allocator.handle(message, time.monotonic())]
            await self._send(effects)
            await self._switchboard.ack(ALLOCATOR_STREAM, entry)

    async def start_anew(self) -> None:
        """Forget everything and ask: messages may have been lost."""
        self._allocator = Allocator(_epoch_start())
        await self._send(self._allocator.census(self._gateways))

    async def _send(self, effects: Sequence[Effect]) -> None:
        batches: dict[str, list[SwitchMessage]] = {}
        for effect in effects:
            if isinstance(effect, TellGateway):
                stream = gateway_stream(effect.gateway)
            else:
                stream = coordinator_stream(effect.job)
            batches.setdefault(stream, []).append(effect.message)
        await self._switchboard.send_many(batches)


def _epoch_start() -> int:
    """Grows from start to start: microseconds of the clock."""
    return time.time_ns() // 1000
