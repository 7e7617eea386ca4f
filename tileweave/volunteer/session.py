"""The volunteer's side of the conversation, sans-I/O: frames in, frames and work out.

    received(frame) ->  panels, leases, results  -> next_frame() to the socket, next_task() to a worker
    computed(task)  ->                           ->

The idea: nothing here waits, so every order of events can be tested. A lease waits until all its panels are here, is
computed, and its result is kept until the server's ACK, over as many connections as that takes (HELLO lists it).
Control frames go before result chunks, so a PONG waits for one chunk at most. Leases that had not been started when a
connection ended are forgotten: the server gave them to others the moment the socket closed.

Left out: sockets, time and back-off (net.py), arithmetic (compute.py), deadlines: a late answer costs nothing but its
upload, and the server wants some answer from a slow device before it trusts it with more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from tileweave.protocol import (
    TEXT_CHARACTERS_MAX,
    Ack,
    Bye,
    Drop,
    Fail,
    FailCode,
    Hello,
    Lease,
    Limits,
    Message,
    Need,
    Panel,
    Ping,
    Pong,
    ProtocolError,
    Result,
    Revoke,
    Status,
    Welcome,
    chunks,
    decode,
    encode,
)
from tileweave.protocol.elements import result_bytes
from tileweave.volunteer.panels import Held, PanelStore

HANDSHAKE_S_MAX = 10.0  # from connecting to WELCOME
RESULTS_KEPT_MAX = 64  # HELLO lists no more
PANELS_LISTED_MAX = 256  # in HELLO, so that its metadata stays small


@dataclass(frozen=True, slots=True)
class Task:
    """One tile to compute: `lease` with its panels."""

    lease: Lease
    panels: Mapping[str, Held]
    connection: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A result that has had no ACK."""

    lease: int
    job: str
    seconds: float
    data: memoryview


@dataclass(slots=True)
class Tally:
    """What came of the work so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    flop: int = 0


class Session:
    """All connections of one volunteer, one after the other. `hello` is the first frame's content, without panels and
    leases; `memory_bytes` bounds panels and results together."""

    def __init__(self, hello: Hello, memory_bytes: int) -> None:
        self._hello = hello
        self._memory_bytes = memory_bytes
        self._panels = PanelStore()
        self._waiting: OrderedDict[int, Lease] = OrderedDict()
        self._needed: set[str] = set()
        self._computing: dict[int, Task] = {}
        self._results: OrderedDict[int, Finished] = OrderedDict()
        self._control: deque[Message] = deque()
        self._uploads: deque[int] = deque()
        self._upload: Iterator[bytes] = iter(())
        self._connection = 0
        self._heard_s = 0.0
        self.limits: Limits | None = None  # None while not welcomed
        self.bye: Bye | None = None  # the server's last word on this connection
        self.tally = Tally()

    # ---- the connection ----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> tuple[str | None, str | None, str]:
        """(device id, secret, name) to join with next time."""
        return self._hello.device, self._hello.secret, self._hello.name

    def connected(self, now_s: float) -> None:
        """A socket is open: HELLO goes out first."""
        self._connection += 1
        self._heard_s = now_s
        self.limits, self.bye = None, None
        self._control.append(
            msgspec.structs.replace(
                self._hello, panels=self._panels.ids()[:PANELS_LISTED_MAX], leases=list(self._results)
            )
        )

    def disconnected(self) -> None:
        """The socket is gone. Results are kept, and so is what is being computed until the next HELLO."""
        self.limits = None
        self._panels.disconnect()
        self._waiting.clear()
        self._needed.clear()
        self._control.clear()
        self._uploads.clear()
        self._upload = iter(())

    def silence_left_s(self, now_s: float) -> float:
        """Seconds until the server counts as gone unless it says something; negative when it is."""
        limit = self.limits.silence_s_max if self.limits else HANDSHAKE_S_MAX
        return self._heard_s + limit - now_s

    # ---- out ---------------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | None:
        """What to send next, or None when there is nothing."""
        while True:
            if self._control:
                return encode(self._control.popleft())
            frame = next(self._upload, None)
            if frame is not None:
                return frame
            if not self._uploads:
                return None
            self._upload = self._result_frames(self._uploads.popleft())

    def _result_frames(self, lease: int) -> Iterator[bytes]:
        done = self._results.get(lease)
        if done is None or self.limits is None:
            return
        for offset, length in chunks(len(done.data), self.limits.frame_bytes_max):
            if self._results.get(lease) is not done:
                return  # revoked or answered meanwhile
            head = Result(lease=lease, job=done.job, seconds=done.seconds, offset=offset, size=len(done.data))
            yield encode(head, done.data[offset : offset + length])

    def next_task(self) -> Task | None:
        """The oldest lease whose panels are here; the caller answers it by `computed` or `failed`."""
        for number, lease in self._waiting.items():
            panels = {panel: held for panel in panels_of(lease) if (held := self._panels.get(panel)) is not None}
            if len(panels) < len(panels_of(lease)):
                continue
            del self._waiting[number]
            fault = _mismatch(lease, panels)
            if fault:
                self._fail(lease, "panel", fault)
                return self.next_task()
            task = Task(lease, panels, self._connection)
            self._computing[number] = task
            return task
        return None

    @property
    def load(self) -> tuple[int, int, int]:
        """(leases waiting, tiles being computed, results without an ACK)."""
        return len(self._waiting), len(self._computing), len(self._results)

    # ---- from a worker -----------------------------------------------------------------------------------------------

    def computed(self, task: Task, data: memoryview, seconds: float) -> None:
        """`task` gave `data` (batch*m*n of the lease's dtype) in `seconds`. A revoked one is dropped, and so is
        one that a newer connection's HELLO did not list."""
        if not self._finish(task):
            return
        lease = task.lease
        self._results[lease.lease] = Finished(lease.lease, lease.job, seconds, data.cast("B"))
        if len(self._results) > RESULTS_KEPT_MAX:
            self._results.popitem(last=False)
        if self.limits is not None:
            self._uploads.append(lease.lease)

    def failed(self, task: Task, code: FailCode, message: str) -> None:
        """`task` could not be computed."""
        if self._finish(task) and self.limits is not None:
            self._fail(task.lease, code, message)

    def _finish(self, task: Task) -> bool:
        if self._computing.get(task.lease.lease) is not task:
            return False
        del self._computing[task.lease.lease]
        return task.connection == self._connection

    # ---- from the server ---------------------------------------------------------------------------------------------

    def received(self, frame: bytes, now_s: float) -> None:
        """Takes one frame. Raises ProtocolError for one that a server may not send (now)."""
        self._heard_s = now_s
        message, payload = decode(frame)
        match message:
            case Ping():
                self._control.append(Pong(nonce=message.nonce))
            case Bye():
                self.bye = message
            case Welcome() if self.limits is None:
                self._welcome(message)
            case _ if self.limits is None or isinstance(message, Welcome):
                raise ProtocolError(f"{message.KIND.name} when it was not expected; WELCOME comes first, and once")
            case Panel():
                self._panel(message, payload)
            case Lease():
                self._lease(message)
            case Drop():
                self._panels.drop(message.panels)
            case Ack():
                self._ack(message)
            case Revoke():
                self._revoke(message.leases)
            case Pong():
                pass  # life, which `_heard_s` has noted
            case _:
                raise ProtocolError(f"{message.KIND.name} from a server")

    def _welcome(self, welcome: Welcome) -> None:
        self.limits = welcome.limits
        self._hello = msgspec.structs.replace(
            self._hello, device=welcome.device, secret=welcome.secret or self._hello.secret, name=welcome.name
        )
        self._control.append(Status(state="ready", capacity_bytes=self._memory_bytes))
        self._uploads.extend(self._results)

    def _panel(self, chunk: Panel, payload: memoryview) -> None:
        assert self.limits is not None
        if chunk.size > self.limits.panel_bytes_max:
            raise ProtocolError(f"panel of {chunk.size} bytes, WELCOME allowed {self.limits.panel_bytes_max}")
        room = self._memory_bytes - sum(len(done.data) for done in self._results.values())
        pinned = {panel for lease in self._waiting.values() for panel in panels_of(lease)}
        self._needed.discard(chunk.panel)
        if self._panels.take(chunk, payload, room, pinned):
            return
        for lease in [lease for lease in self._waiting.values() if chunk.panel in panels_of(lease)]:
            del self._waiting[lease.lease]
            self._fail(lease, "memory", f"no room for panel {chunk.panel} of {chunk.size} bytes")

    def _lease(self, lease: Lease) -> None:
        assert self.limits is not None
        if len(self._waiting) + len(self._computing) >= self.limits.leases_max:
            self._fail(lease, "memory", f"already {self.limits.leases_max} leases in hand")
            return
        needs = result_bytes(lease.batch * lease.m * lease.n, lease.dtype)
        if needs > self._memory_bytes:
            self._fail(lease, "memory", f"the result needs {needs} bytes of the {self._memory_bytes} this device gives")
            return
        self._waiting[lease.lease] = lease
        for panel in panels_of(lease):
            missing = self._panels.get(panel) is None and not self._panels.is_arriving(panel)
            if missing and panel not in self._needed:
                self._needed.add(panel)
                self._control.append(Need(panel=panel, lease=lease.lease))

    def _ack(self, ack: Ack) -> None:
        self._results.pop(ack.lease, None)
        self._revoke([ack.lease])
        self.tally.verdicts[ack.verdict] += 1
        self.tally.flop += ack.flop

    def _revoke(self, leases: list[int]) -> None:
        for lease in leases:
            self._waiting.pop(lease, None)
            self._computing.pop(lease, None)
            self._results.pop(lease, None)

    def _fail(self, lease: Lease, code: FailCode, message: str) -> None:
        self._control.append(Fail(lease=lease.lease, job=lease.job, code=code, message=message[:TEXT_CHARACTERS_MAX]))


def panels_of(lease: Lease) -> dict[str, None]:
    """The panels that its terms name, each once, in order."""
    return dict.fromkeys(panel for term in lease.terms for panel in (term.a, term.b))


def _mismatch(lease: Lease, panels: Mapping[str, Held]) -> str:
    """Why these panels cannot be the lease's operands; "" when they can."""
    for term in lease.terms:
        for name, by_k, lines, row, column in (
            (term.a, lease.a_by_k, lease.m, term.a_row, term.a_column),
            (term.b, lease.b_by_k, lease.n, term.b_row, term.b_column),
        ):
            height, width = (term.k, lines) if by_k else (lines, term.k)
            rows, columns, held = row + lease.batch * height, column + width, panels[name]
            if rows > held.rows or columns > held.columns:
                return f"panel {name} is {held.rows} x {held.columns}, the lease reaches to {rows} x {columns}"
    return ""
