"""What one device may say once it is let in, and what follows from it: frames in, effects out.

The session knows the leases that this connection was handed, and the results the device finished on an earlier
connection (HELLO.leases). A RESULT of a leased tile must have exactly the leased length; one that is sent again after
a reconnect may have any length within the limit, and it is the coordinator that knows whether it is still wanted.
Whatever else comes is answered `late` or `duplicate` at once, so that no client tries for ever.

Errors are of two kinds: the device's (a ProtocolError ends the connection with BYE; a result that cannot be right is
reported as `bad`), and ours, which raise. Pure: no socket, no clock, no Redis; `connection.py` carries the effects out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from backend.switchboard.messages import LeaseFailed, PanelRef, Push, ToCoordinator
from tileweave.protocol import (
    Ack,
    Bye,
    Fail,
    Message,
    Need,
    Ping,
    Pong,
    ProtocolError,
    Result,
    Revoke,
    Status,
    Verdict,
)
from tileweave.protocol.elements import result_bytes

ANSWERED_MAX = 512  # recent final words remembered, to answer a repeated result the same way
SMALL_CHUNK_BYTES = 64 << 10  # a chunk below this counts as a message of the rate limit, unless it ends a result


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this to the device."""

    message: Message


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the coordinator of `job`."""

    job: str
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class Begin:
    """A result of `size` bytes begins: it needs a slot. `leased` is False for one sent again."""

    lease: int
    job: str
    size: int
    leased: bool


@dataclass(frozen=True, slots=True)
class Write:
    """`payload` belongs at `offset` of the result's slot."""

    lease: int
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Finish:
    """The result is complete."""

    lease: int
    job: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """The result in progress will not be completed: its slot is free."""

    lease: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Send a panel again."""

    ref: PanelRef
    lease: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A PONG came."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The device's STATUS changed."""

    status: Status


@dataclass(frozen=True, slots=True)
class Leave:
    """The device said BYE."""

    reason: str


Effect = Reply | Publish | Begin | Write | Finish | Abandon | Resend | Answered | Changed | Leave


@dataclass(slots=True)
class _Lease:
    job: str
    size: int
    push: Push
    done: bool = False  # a complete result has been handed on


@dataclass(slots=True)
class _Upload:
    job: str
    size: int
    received: int = 0


class Session:
    """One connection's conversation. `finished`: HELLO.leases, results the device will send again."""

    def __init__(self, device: str, connection: str, finished: list[int], result_bytes_max: int) -> None:
        self.device = device
        self.connection = connection
        self._result_bytes_max = result_bytes_max
        self._leases: dict[int, _Lease] = {}
        self._finished = set(finished)
        self._uploads: dict[int, _Upload] = {}
        self._swallowed: OrderedDict[int, None] = OrderedDict()  # results whose remaining chunks are ignored
        self._answered: OrderedDict[int, Verdict] = OrderedDict()

    # ---- from the server ---------------------------------------------------------------------------------------------

    def leased(self, push: Push) -> None:
        """The device is being handed this lease."""
        lease = push.lease
        size = result_bytes(lease.batch * lease.m * lease.n, lease.dtype)
        self._leases[lease.lease] = _Lease(lease.job, size, push)
        self._answered.pop(lease.lease, None)

    def acknowledged(self, ack: Ack) -> None:
        """The coordinator's final word on a lease is on its way to the device."""
        self._leases.pop(ack.lease, None)
        self._finished.discard(ack.lease)
        self._answered[ack.lease] = ack.verdict
        if len(self._answered) > ANSWERED_MAX:
            self._answered.popitem(last=False)

    def revoked(self, job: str, leases: list[int]) -> list[Effect]:
        """These leases are not needed any more; a result of theirs in progress is dropped."""
        return [*self._abandon(leases), Reply(Revoke(job=job, leases=leases))]

    def job_ended(self, job: str) -> list[Effect]:
        """`job` takes no results any more: everything of it is answered, nothing stays open."""
        mine = [number for number, lease in self._leases.items() if lease.job == job]
        done = [number for number in mine if self._leases[number].done]
        not_done = [number for number in mine if number not in done]
        effects = self.revoked(job, not_done) if not_done else []
        for number in done:
            effects += self._late(number, job, f"job {job} has ended")
        return effects

    def failed(self, lease: int, message: str) -> list[Effect]:
        """We cannot send this lease's panels."""
        known = self._leases.pop(lease, None)
        if known is None:
            return []
        return [self._lease_failed(known.job, lease, message)]

    def jobs(self) -> set[str]:
        """Jobs of which something is open here."""
        return {lease.job for lease in self._leases.values()} | {upload.job for upload in self._uploads.values()}

    def uploading(self, lease: int) -> bool:
        """Whether a result of this lease has begun and is not complete."""
        return lease in self._uploads

    def close(self) -> list[Effect]:
        """The connection is gone."""
        effects: list[Effect] = [Abandon(lease) for lease in self._uploads]
        self._uploads.clear()
        return effects

    # ---- from the device ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, payload: memoryview) -> list[Effect]:
        """What follows from a message. Raises ProtocolError for one that a device may not send (now)."""
        match message:
            case Result():
                return self._result(message, payload)
            case Ping(nonce=nonce):
                return [Reply(Pong(nonce=nonce))]
            case Pong(nonce=nonce):
                return [Answered(nonce)]
            case Status():
                return [Changed(message)]
            case Fail():
                return self._fail(message)
            case Need():
                return self._need(message)
            case Bye():
                return [Leave(f"{message.code} {message.reason}".strip())]
            case _:
                raise ProtocolError(f"{message.KIND.name} from a device that is already connected")

    def is_bulk(self, message: Message, payload: memoryview) -> bool:
        """Whether this is a chunk such as a busy device sends, which the limit on messages does not count: a large
        one, or the last of a result that is still expected."""
        if not isinstance(message, Result):
            return False
        if len(payload) >= SMALL_CHUNK_BYTES:
            return True
        lease = self._leases.get(message.lease)
        expected = message.lease in self._uploads or (lease is not None and not lease.done)
        return expected and message.offset + len(payload) == message.size

    def _result(self, message: Result, payload: memoryview) -> list[Effect]:
        upload = self._uploads.get(message.lease)
        effects: list[Effect] = []
        if upload is None:
            if message.offset > 0:
                if message.lease in self._swallowed:
                    if message.offset + len(payload) == message.size:
                        del self._swallowed[message.lease]
                    return []
                raise ProtocolError(f"lease {message.lease}: a result's first chunk is at byte {message.offset}, not 0")
            self._swallowed.pop(message.lease, None)
            upload, effects = self._begin(message)
            if upload is None:
                if len(payload) < message.size:
                    self._swallow(message.lease)
                return effects
        if message.offset != upload.received or message.size != upload.size:
            raise ProtocolError(
                f"lease {message.lease}: chunk at byte {message.offset} of {message.size}, "
                f"expected byte {upload.received} of {upload.size}"
            )
        upload.received += len(payload)
        effects.append(Write(message.lease, message.offset, payload))
        if upload.received == upload.size:
            del self._uploads[message.lease]
            lease = self._leases.get(message.lease)
            if lease is not None:
                lease.done = True
            effects.append(Finish(message.lease, upload.job, message.seconds))
        return effects

    def _begin(self, message: Result) -> tuple[_Upload | None, list[Effect]]:
        """The upload that starts with this chunk, or None and what is said instead."""
        lease = self._leases.get(message.lease)
        if lease is None:
            return self._begin_unleased(message)
        if lease.done:
            return None, []  # sent twice: the first one's answer is on its way
        if message.size != lease.size:
            del self._leases[message.lease]
            text = f"result of {message.size} bytes, expected {lease.size}"
            return None, [self._lease_failed(lease.job, message.lease, text, bad=True)]
        upload = self._uploads[message.lease] = _Upload(lease.job, lease.size)
        return upload, [Begin(message.lease, lease.job, lease.size, leased=True)]

    def _begin_unleased(self, message: Result) -> tuple[_Upload | None, list[Effect]]:
        if message.lease not in self._finished:
            before = self._answered.get(message.lease)
            if before == "accepted":
                ack = Ack(lease=message.lease, job=message.job, verdict="duplicate", reason="already accepted")
                return None, [Reply(ack)]
            return None, self._late(message.lease, message.job, "this lease is not open on this connection")
        if message.size > self._result_bytes_max:
            raise ProtocolError(f"result of {message.size} bytes, expected at most {self._result_bytes_max}")
        if any(number not in self._leases for number in self._uploads):
            raise ProtocolError("two results sent again at once; send them one after the other")
        self._finished.discard(message.lease)
        upload = self._uploads[message.lease] = _Upload(message.job, message.size)
        return upload, [Begin(message.lease, message.job, message.size, leased=False)]

    def refuse(self, lease: int, job: str, reason: str) -> list[Effect]:
        """The result that just began is not taken: its job has ended."""
        if self._uploads.pop(lease, None) is not None:
            self._swallow(lease)
        return self._late(lease, job, reason)

    def _late(self, lease: int, job: str, reason: str) -> list[Effect]:
        ack = Ack(lease=lease, job=job, verdict="late", reason=reason)
        self.acknowledged(ack)
        return [Reply(ack)]

    def _fail(self, message: Fail) -> list[Effect]:
        known = self._leases.pop(message.lease, None)
        if known is None:
            return []
        effects = self._abandon([message.lease])
        failed = LeaseFailed(
            device=self.device,
            connection=self.connection,
            lease=message.lease,
            code=message.code,
            message=message.message,
        )
        return [*effects, Publish(known.job, failed)]

    def _abandon(self, leases: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        for lease in leases:
            self._leases.pop(lease, None)
            if self._uploads.pop(lease, None) is not None:
                self._swallow(lease)
                effects.append(Abandon(lease))
        return effects

    def _need(self, message: Need) -> list[Effect]:
        known = self._leases.get(message.lease)
        refs = [] if known is None else [ref for ref in known.push.panels if ref.panel == message.panel]
        return [Resend(ref, message.lease) for ref in refs[:1]]

    def _lease_failed(self, job: str, lease: int, message: str, bad: bool = False) -> Publish:
        return Publish(
            job,
            LeaseFailed(
                device=self.device,
                connection=self.connection,
                lease=lease,
                code="unsupported" if bad else "panel",
                message=message,
                bad=bad,
            ),
        )

    def _swallow(self, lease: int) -> None:
        self._swallowed[lease] = None
        if len(self._swallowed) > ANSWERED_MAX:
            self._swallowed.popitem(last=False)
