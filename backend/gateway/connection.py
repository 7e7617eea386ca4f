"""One device's connection: a session and an outbox tied to a socket.

Two tasks: the reader carries out what the session makes of each frame, the writer sends what the outbox gives. They end
together. The fleet's clock calls `tick`. A connection is ended by `finish`, which sends BYE after the ACKs that still
wait; a peer that takes nothing any more is aborted.

Left out: who is let in (`socket.py`), and what the other processes want of the device (`fleet.py` calls in here).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import structlog

from backend.gateway import session as said
from backend.gateway.link import LinkFigures, LinkMeter
from backend.gateway.maps import PanelGone, PanelSource
from backend.gateway.outbox import Chunk, Outbox
from backend.gateway.ports import Closed, House, Identity, Transport
from backend.gateway.session import Session
from backend.gateway.slots import Slot
from backend.gateway.wire import Wire
from backend.switchboard.messages import DeviceOnline, DeviceStatus, PanelRef, Push, ResultReady
from tileweave.protocol import (
    TEXT_CHARACTERS_MAX,
    Ack,
    Bye,
    ByeCode,
    Message,
    Panel,
    Ping,
    ProtocolError,
    Revoke,
    Status,
    VersionMismatch,
    decode,
    encode,
)

RUN_BYTES_MAX = 4 << 20  # panel bytes after which a PING measures the link, while more follow
BYE_S_MAX = 1.0  # for the last words to a peer that may be gone
CHANGES_PER_S = 5.0  # of a device's status that are told at once: each has the coordinator look for work again

log = structlog.get_logger("gateway")


@dataclass(slots=True)
class _Budget:
    """A token bucket of messages."""

    per_s: float
    left: float
    at_s: float

    def take(self, now_s: float) -> bool:
        self.left = min(2 * self.per_s, self.left + (now_s - self.at_s) * self.per_s) - 1
        self.at_s = now_s
        return self.left >= 0


@dataclass(slots=True)
class _Upload:
    slot: Slot
    started_s: float


@dataclass(eq=False)
class Connection:
    """A device that was let in. `job` is whom it serves, by the allocator's word of `epoch`."""

    house: House
    transport: Transport
    wire: Wire
    identity: Identity
    finished: list[int]
    job: str | None = None
    epoch: int = -1
    end_reason: str = ""
    status: Status = field(default_factory=lambda: Status(state="ready"))

    def __post_init__(self) -> None:
        settings = self.house.settings
        self.settings = settings
        self.session = Session(self.identity.device, self.identity.connection, self.finished, settings.result_bytes_max)
        self.outbox = Outbox(settings.frame_bytes_max, settings.outbox_messages_max)
        self.meter = LinkMeter()
        now_s = time.monotonic()
        self._budget = _Budget(settings.device_messages_per_s_max, 2 * settings.device_messages_per_s_max, now_s)
        self._uploads: dict[int, _Upload] = {}
        self._chunk_s = now_s
        self._heard_s = now_s
        self._told = LinkFigures()
        self._wake = asyncio.Event()
        self._bye: Bye | None = None
        self._view: tuple[PanelRef, PanelSource] | None = None
        self._changes = _Budget(CHANGES_PER_S, 2 * CHANGES_PER_S, now_s)
        self._untold = False  # the status changed too often to be told at once; the next tick tells it

    # ---- called by the fleet -----------------------------------------------------------------------------------------

    def push(self, push: Push) -> None:
        """Send a lease and what it needs."""
        self.session.leased(push)
        self.outbox.push(push)
        self._wake.set()

    def acknowledge(self, ack: Ack) -> None:
        """Send the coordinator's final word."""
        self.session.acknowledged(ack)
        self.say(ack)

    async def revoke(self, job: str, leases: list[int]) -> None:
        """These leases are not needed any more."""
        await self._carry_out(self.session.revoked(job, leases))

    def drop(self, panels: list[str]) -> None:
        """These panels will not be leased again."""
        self.outbox.drop(panels)
        self._wake.set()

    async def job_ended(self, job: str) -> None:
        """`job` takes no results any more."""
        await self._carry_out(self.session.job_ended(job))

    def assign(self, job: str | None, epoch: int) -> None:
        """The allocator's word; an older one than the last is ignored."""
        if epoch < self.epoch:
            return
        if (job, epoch) != (self.job, self.epoch) and self.job is not None:
            self.outbox.drop_all()  # its coordinator may have died without a word
            self._wake.set()
        self.job, self.epoch = job, epoch
        self._told = LinkFigures()
        if self.status.state != "ready":
            self.tell_status()

    def say(self, message: Message) -> None:
        """Send a control message."""
        self.outbox.control(message)
        self._wake.set()

    def finish(self, code: ByeCode, reason: str, retry_s: float = 0.0) -> None:
        """Send BYE and close. The first reason stands."""
        if self._bye is None:
            self._bye = Bye(code=code, reason=reason[:TEXT_CHARACTERS_MAX], retry_s=retry_s)
            self.end_reason = f"{code}: {reason}" if reason else code
            self._wake.set()

    def tick(self, now_s: float) -> None:
        """A PING, and an end for a device that is silent, stalled or does not read. Called each `ping_s`."""
        settings = self.settings
        silent_s = now_s - max(self._heard_s, self.wire.last_byte_s)
        if silent_s > settings.silence_s_max:
            self.finish(
                "silent", f"nothing came for {silent_s:.1f} s, expected a frame within {settings.silence_s_max} s"
            )
        elif self._uploads and now_s - self._chunk_s > settings.upload_stall_s_max:
            self.finish(
                "protocol", f"a result broke off; expected its next chunk within {settings.upload_stall_s_max} s"
            )
        elif self.outbox.full:
            self.finish("protocol", "the connection is not read")
            self.wire.abort()
        else:
            self.say(Ping(nonce=self.meter.ping(now_s)))
        if self._untold or self._told.differ(self.meter.figures) or self.status.state != "ready":
            self._untold = False
            self.tell_status()

    def tell_status(self) -> None:
        """The device's state and link, to the coordinator it serves."""
        if self.job is None:
            return
        link = self._told = self.meter.figures
        message = DeviceStatus(
            device=self.identity.device,
            connection=self.identity.connection,
            state=self.status.state,
            reason=self.status.reason,
            rtt_s=link.rtt_s,
            down_bps=link.down_bps,
            up_bps=link.up_bps,
        )
        self.house.offer_job(self.job, message)

    def online(self, gateway: str) -> DeviceOnline:
        """How this connection is announced to the allocator."""
        identity, meter = self.identity, self.meter
        return DeviceOnline(
            device=identity.device,
            connection=identity.connection,
            gateway=gateway,
            profile=identity.profile,
            rtt_s=meter.rtt_s,
            down_bps=meter.down_bps,
            up_bps=meter.up_bps,
            accepted=identity.accepted,
            rejects=identity.rejects,
        )

    def live(self, gateway: str) -> dict[str, Any]:
        """What the pages show of it."""
        profile = self.identity.profile
        return {
            "connection": self.identity.connection,
            "gateway": gateway,
            "job": self.job,
            "state": self.status.state,
            "reason": self.status.reason,
            "kernel": profile.kernel,
            "workers": profile.workers,
            "claimed_flops": profile.flops,
            "rtt_s": self.meter.rtt_s,
            "down_bps": self.meter.down_bps,
            "up_bps": self.meter.up_bps,
        }

    # ---- the two tasks -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves the device until either side ends it; afterwards nothing of it is held."""
        reader = asyncio.create_task(self._read(), name="device-reader")
        writer = asyncio.create_task(self._write(), name="device-writer")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if self._bye is not None and not writer.done():
                await asyncio.wait({writer}, timeout=BYE_S_MAX)
        finally:
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            await self._carry_out(self.session.close())
            if not (writer.done() and not writer.cancelled() and self._bye is not None):
                self.wire.abort()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, Closed):
                log.error("connection failed", device=self.identity.device, exc_info=result)

    async def _read(self) -> None:
        try:
            while self._bye is None:
                frame = await self.transport.receive()
                now_s = time.monotonic()
                self._heard_s = now_s
                await self._handle(frame, now_s)
        except VersionMismatch as error:
            self.finish("reload", str(error))
        except ProtocolError as error:
            self.finish("protocol", str(error))
        except Closed as error:
            self.end_reason = self.end_reason or str(error) or "the connection was closed"

    async def _handle(self, frame: bytes | None, now_s: float) -> None:
        if frame is None:
            raise ProtocolError("got a text message, expected binary frames")
        message, payload = decode(frame)
        self.house.count("in", len(frame))
        if not self.session.is_bulk(message, payload) and not self._budget.take(now_s):
            raise ProtocolError(
                f"over {self.settings.device_messages_per_s_max:.0f} messages a second; send results in chunks of "
                f"{self.settings.frame_bytes_max} bytes"
            )
        if not payload and not self._uploads:
            self.wire.burst()  # idle talk does not belong to the next result's transfer
        await self._carry_out(self.session.receive(message, payload))
        for lease in [lease for lease in self._uploads if not self.session.uploading(lease)]:
            self.house.free_slot(self._uploads.pop(lease).slot)  # revoked while it waited for its slot

    async def _write(self) -> None:
        try:
            while self._bye is None:
                self._wake.clear()
                frame = await self._next_frame()
                if frame is None:
                    await self._wake.wait()
                else:
                    await self._send(frame)
            async with asyncio.timeout(BYE_S_MAX):
                for message in self.outbox.last_words():
                    await self._send(encode(message))
                await self._send(encode(self._bye))
        except TimeoutError:
            self.end_reason = self.end_reason or f"took nothing for {self.settings.send_stall_s_max} s"
            self.wire.abort()
        except Closed as error:
            self.end_reason = self.end_reason or str(error) or "the connection was closed"

    async def _next_frame(self) -> bytes | None:
        while True:
            piece = self.outbox.next()
            if piece is None:
                if not self.meter.run_bytes:
                    return None
                return encode(Ping(nonce=self.meter.ping(time.monotonic())))
            if not isinstance(piece, Chunk):
                return encode(piece)
            try:
                return self._chunk(piece)
            except PanelGone as error:
                self.outbox.lost(piece)
                await self._carry_out(self.session.failed(piece.lease, str(error)))

    def _chunk(self, chunk: Chunk) -> bytes:
        if self._view is None or self._view[0] is not chunk.ref:
            # Kept to the panel's last chunk: a file that vanishes meanwhile leaves no half panel behind.
            self._view = (chunk.ref, self.house.panel(chunk.ref))
        end = chunk.offset + chunk.length
        ref, source = self._view
        panel = Panel(
            panel=ref.panel, rows=ref.rows, columns=ref.columns, offset=chunk.offset, size=ref.size, dtype=ref.dtype
        )
        frame = encode(panel, source.data[chunk.offset : end])
        if not source.intact:  # looked at after the copy: what was copied is the panel's
            self._view = None
            raise PanelGone(f"panel {ref.panel} was overwritten while it was sent; nobody waits for it any more")
        if end == ref.size:
            self._view = None
        self.meter.chunk(chunk.length, time.monotonic())
        if self.meter.run_bytes >= RUN_BYTES_MAX:
            self.say(Ping(nonce=self.meter.ping(time.monotonic())))
        return frame

    async def _send(self, frame: bytes) -> None:
        started_s = time.monotonic()
        async with asyncio.timeout(self.settings.send_stall_s_max):
            await self.transport.send(frame)
        self.house.count("out", len(frame))
        now_s = time.monotonic()
        if now_s - started_s > self.settings.ping_s:
            self._heard_s = now_s  # it took long, but its TCP did take it: a slow link is alive

    # ---- effects -----------------------------------------------------------------------------------------------------

    async def _carry_out(self, effects: list[said.Effect]) -> None:
        for effect in effects:
            await self._one(effect)

    async def _one(self, effect: said.Effect) -> None:
        match effect:
            case said.Write(lease=lease, offset=offset, payload=payload):
                upload = self._uploads.get(lease)
                if upload is not None:
                    self.house.slot_view(upload.slot)[offset : offset + len(payload)] = payload
                    self._chunk_s = time.monotonic()
            case said.Begin():
                await self._begin(effect)
            case said.Finish():
                await self._finish_upload(effect)
            case said.Reply(message=message):
                if isinstance(message, Revoke):
                    self.outbox.revoke(set(message.leases))
                self.say(message)
            case said.Publish(job=job, message=message):
                await self.house.tell_job(job, message)
            case said.Abandon(lease=lease):
                upload = self._uploads.pop(lease, None)
                if upload is not None:
                    self.house.free_slot(upload.slot)
            case said.Resend(ref=ref, lease=lease):
                self.outbox.resend(ref, lease)
                self._wake.set()
            case said.Answered(nonce=nonce):
                self.meter.pong(nonce, time.monotonic())
            case said.Changed(status=status):
                self.status = status
                self._untold = not self._changes.take(time.monotonic())
                if not self._untold:
                    self.tell_status()
            case said.Leave(reason=reason):
                raise Closed(f"left: {reason}")

    async def _begin(self, effect: said.Begin) -> None:
        if not await self.house.takes_results(effect.job):
            await self._carry_out(self.session.refuse(effect.lease, effect.job, f"job {effect.job} has ended"))
            return
        slot = await self.house.take_slot(effect.size, effect.job, effect.leased)
        if slot is None:
            self.finish("busy", "no room for a result at the moment; come back with it", retry_s=1.0)
            return
        now_s = time.monotonic()
        self._uploads[effect.lease] = _Upload(slot, now_s)
        self._chunk_s = now_s

    async def _finish_upload(self, effect: said.Finish) -> None:
        upload = self._uploads.pop(effect.lease, None)
        if upload is None:
            return
        burst_bytes, burst_s = self.wire.burst()
        self.meter.upload(burst_bytes, burst_s)
        self.house.slot_filled(upload.slot)
        result = ResultReady(
            device=self.identity.device,
            connection=self.identity.connection,
            lease=effect.lease,
            seconds=effect.seconds,
            upload_s=max(burst_s, time.monotonic() - upload.started_s),
            slot=self.house.slot_ref(upload.slot),
        )
        await self.house.tell_job(effect.job, result)
