"""The two uvicorn protocols with the limits that uvicorn leaves out.

HTTP: a request's headers must be complete within a time and a size, so that a slow or endless header costs one timer
and 64 KiB. Websocket: the connection's `Wire` lets the application see what arrives below the level of frames (a slow
upload is proof of life long before its 1 MiB is complete, and its bytes over time are the upload rate), keep little
unsent data in the kernel (a PING must not wait behind seconds of panels), and abort a peer that never reads (an
ordinary close waits for the send buffer). A message in very many fragments is refused: their number is bounded by
nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState
    from websockets.frames import Frame

HEADER_BYTES_MAX = 64 << 10
NOTSENT_BYTES_MAX = 256 << 10  # unsent bytes the kernel takes for one device's socket
FRAGMENTS_MAX = 4096
TOO_BIG = 1009  # websocket close code


class Wire:
    """What is known of a websocket's TCP connection. Without a transport (tests in one process) nothing is."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.last_byte_s = 0.0  # monotonic
        self._burst_started_s: float | None = None
        self._burst_bytes = 0

    def arrived(self, size: int, now_s: float) -> None:
        """`size` bytes came in."""
        if self._burst_started_s is None:
            self._burst_started_s = now_s  # the first bytes mark the start; their own transfer time is unknown
        else:
            self._burst_bytes += size
        self.last_byte_s = now_s

    def burst(self) -> tuple[int, float]:
        """(bytes, seconds) that came in since the last call."""
        if self._burst_started_s is None:
            return 0, 0.0
        burst = self._burst_bytes, self.last_byte_s - self._burst_started_s
        self._burst_started_s, self._burst_bytes = None, 0
        return burst

    def abort(self) -> None:
        """Ends the connection without waiting for anything."""
        if self.transport is not None:
            self.transport.abort()


class DeviceSocket(WebSocketsSansIOProtocol):
    """A websocket whose `Wire` is in scope["state"]["wire"]."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.wire = Wire()
        self.app_state = {**self.app_state, "wire": self.wire}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        super().connection_made(transport)
        self.wire.transport = self.transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES_MAX)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.wire.arrived(len(data), time.monotonic())
        super().data_received(data)

    def handle_cont(self, event: Frame) -> None:  # noqa: D102
        if len(self.frames) >= FRAGMENTS_MAX:
            self.conn.fail(TOO_BIG, f"a message of over {FRAGMENTS_MAX} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)


def guarded_http(header_s_max: float) -> type[HttpToolsProtocol]:
    """The HTTP protocol, whose request headers must be complete within `header_s_max` seconds of the connection's
    opening or of a request's first byte."""

    class GuardedHttp(HttpToolsProtocol):
        _guard: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _in_headers = True

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._header_bytes += len(data)
            super().data_received(data)
            if self._in_headers and self._header_bytes > HEADER_BYTES_MAX and self.parser is not None:
                self.send_400_response(f"request headers over {HEADER_BYTES_MAX} bytes")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            self._header_bytes = 0
            self._arm()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._disarm()
            super().on_headers_complete()

        def _arm(self) -> None:
            if self._guard is None:
                self._guard = self.loop.call_later(header_s_max, self._too_slow)

        def _disarm(self) -> None:
            if self._guard is not None:
                self._guard.cancel()
                self._guard = None

        def _too_slow(self) -> None:
            self._guard = None
            self.transport.abort()

    return GuardedHttp
