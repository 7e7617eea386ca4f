"""The script's end of the unix socket to its coordinator (`wire.py` says what travels on it).

The idea: no reader thread. Whoever waits for an answer reads the socket itself and keeps what belongs to other waiters
(the others sleep until it has read something), so that an answer costs one wake-up and no switch of Python's global
lock. Between GEMMs nobody reads; `poll` looks at what has come in without blocking, which is how a cancel is noticed.
Left out: reconnecting. A lost coordinator ends this process; the job goes on in a new one from its last checkpoint.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Collection

import msgspec

from tileweave.script.wire import (
    FRAME_BYTES_MAX,
    Control,
    FromScript,
    GemmFailed,
    Product,
    Recorded,
    ScriptHello,
    ScriptWelcome,
    ToScript,
)

CONNECT_S_MAX = 30.0
"""How long connecting, and the answer to the hello, may take."""

READ_BYTES = 1 << 16

EXIT_CANCELLED = 3
"""Exit status of a script that was cancelled."""


class JobLost(RuntimeError):
    """The coordinator is gone, or does not speak this protocol: this process cannot go on."""


class JobCancelled(SystemExit):
    """The job was cancelled. A SystemExit, so that a script's own `except Exception` does not swallow it."""

    def __init__(self) -> None:
        super().__init__(EXIT_CANCELLED)

    def __str__(self) -> str:
        return "the job was cancelled"


class GemmError(RuntimeError):
    """The coordinator says that this product cannot be computed, and why."""


class Channel:
    """A connected, greeted socket. Every method may be called from any thread of the process that connected."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToScript] = msgspec.msgpack.Decoder(ToScript)
        self._sending = threading.Lock()
        self._buffer = bytearray()  # survives an interrupt in the middle of a frame
        self._turn = threading.Condition()  # guards all below
        self._reading = False
        self._products: set[int] = set()
        self._failed: dict[int, str] = {}
        self._recorded = -1
        self._welcome: ScriptWelcome | None = None
        self._over: BaseException | None = None

    @classmethod
    def connect(cls, path: str, token: str, pid: int) -> tuple[Channel, ScriptWelcome]:
        """Connects to the coordinator's socket at `path` and says hello. Raises JobLost."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_S_MAX)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise JobLost(f"no coordinator answers on {path}: {error}") from error
        channel = cls(connection)
        try:
            channel.send(ScriptHello(token=token, pid=pid))
            channel._wait(lambda: channel._welcome is not None)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        assert channel._welcome is not None
        return channel, channel._welcome

    def send(self, message: FromScript) -> None:
        """Sends one message. Raises JobLost."""
        body = self._encoder.encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise ValueError(
                f"a {type(message).__name__} of {len(body):,} bytes; at most {FRAME_BYTES_MAX:,} can be sent"
            )
        try:
            with self._sending:
                self._socket.sendall(len(body).to_bytes(4, "little") + body)
        except OSError as error:
            raise JobLost(f"the connection to the coordinator broke: {error}") from error

    def wait_product(self, gemm: int) -> None:
        """Returns when the product of `gemm` is in place. Raises GemmError, JobCancelled or JobLost."""
        self._wait(lambda: gemm in self._products or gemm in self._failed)
        with self._turn:
            self._products.discard(gemm)
            reason = self._failed.pop(gemm, None)
        if reason is not None:
            raise GemmError(reason)

    def answered(self, gemms: Collection[int], block: bool) -> list[int]:
        """Those of these GEMMs that have their product or have failed; if `block`, waits until there is one.

        Raises JobCancelled or JobLost."""
        found: list[int] = []

        def any_there() -> bool:
            found[:] = [gemm for gemm in gemms if gemm in self._products or gemm in self._failed]
            return bool(found)

        if block:
            self._wait(any_there)
        else:
            self.poll()
            with self._turn:
                any_there()
        return found

    def wait_recorded(self, step: int) -> None:
        """Returns when the checkpoint of `step`, or a later one, is in the store. Raises JobCancelled or JobLost."""
        self._wait(lambda: self._recorded >= step)

    def poll(self) -> int:
        """Takes what has come in, without blocking; the step of the last recorded checkpoint, or -1.

        Raises JobCancelled or JobLost."""
        while select.select([self._socket], [], [], 0)[0]:
            with self._turn:
                if self._reading or self._over is not None:  # another thread is at it, or nothing more will come
                    break
                self._reading = True
            self._read_some()
        with self._turn:
            if self._over is not None:
                raise self._over
            return self._recorded

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready` (called under the lock) holds, reads the socket or sleeps while another thread reads it."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._reading or self._over is not None or ready())
                if self._over is not None:
                    raise self._over
                if ready():
                    return
                self._reading = True
            self._read_some()

    def _read_some(self) -> None:
        """One read of the socket by the thread that set `_reading`; wakes the others."""
        messages: list[ToScript] = []
        over: BaseException | None = None
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                over = JobLost("the coordinator closed the connection; the job goes on from its last checkpoint")
            self._buffer += data
            messages = self._frames()
        except JobLost as error:
            over = error
        except OSError as error:
            over = JobLost(f"the connection to the coordinator broke: {error}")
        finally:
            with self._turn:
                for message in messages:
                    self._take(message)
                self._over = self._over or over
                self._reading = False
                self._turn.notify_all()

    def _frames(self) -> list[ToScript]:
        """The complete messages at the front of the buffer, which they leave."""
        messages: list[ToScript] = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if size > FRAME_BYTES_MAX:
                raise JobLost(
                    f"the coordinator announced a frame of {size:,} bytes; at most {FRAME_BYTES_MAX:,} is expected"
                )
            if len(self._buffer) < 4 + size:
                break
            try:
                messages.append(self._decoder.decode(self._buffer[4 : 4 + size]))
            except msgspec.DecodeError as error:
                raise JobLost(f"the coordinator sent something else than a message: {error}") from error
            del self._buffer[: 4 + size]
        return messages

    def _take(self, message: ToScript) -> None:
        if isinstance(message, Product):
            self._products.add(message.id)
        elif isinstance(message, GemmFailed):
            self._failed[message.id] = message.reason
        elif isinstance(message, Recorded):
            self._recorded = max(self._recorded, message.step)
        elif isinstance(message, Control):
            self._over = JobCancelled()
        else:
            self._welcome = message
