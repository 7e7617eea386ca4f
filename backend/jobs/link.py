"""The coordinator's end of the script's socket: frames of tileweave/script/wire.py over a unix stream.

The idea: the listening socket is bound by the supervisor before either process starts, so the script never waits for
the coordinator to come up. The first frame must be a hello with the one-off token; one script is let in, ever. A script
that reads slowly only delays itself: what it is told is small and bounded by what it asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import structlog

from tileweave.script.wire import FRAME_BYTES_MAX, FromScript, ScriptHello, ScriptWelcome, ToScript

HELLO_S_MAX = 10.0
log = structlog.get_logger("coordinator")


class ScriptError(RuntimeError):
    """The script broke the protocol; the message says how."""


class ScriptLink:
    """One script's connection. `received` yields what it says until it closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[FromScript] = msgspec.msgpack.Decoder(FromScript)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def accept(cls, listener: socket.socket, token: str, welcome: Callable[[], ScriptWelcome]) -> ScriptLink:
        """Waits for the script, checks its token and answers with the welcome. Others are closed and waited past."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            connection, _ = await loop.sock_accept(listener)
            link = cls(*await asyncio.open_unix_connection(sock=connection, limit=FRAME_BYTES_MAX))
            try:
                async with asyncio.timeout(HELLO_S_MAX):
                    hello = await link._read()
                if isinstance(hello, ScriptHello) and hmac.compare_digest(hello.token.encode(), token.encode()):
                    link.send(welcome())
                    log.info("script connected", pid=hello.pid)
                    return link
                log.warning("a connection without the job's token was closed")
            except (ScriptError, TimeoutError) as error:
                log.warning("a connection that is not the script was closed", error=str(error))
            await link.close()

    async def received(self) -> AsyncIterator[FromScript]:
        """What the script says, until it closes the connection or dies. Raises ScriptError."""
        while (message := await self._read()) is not None:
            yield message

    def send(self, message: ToScript) -> None:
        """Queues one message; a script that is gone misses it."""
        body = self._encoder.encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise ScriptError(f"a {type(message).__name__} of {len(body)} bytes, expected at most {FRAME_BYTES_MAX}")
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "little") + body)

    async def close(self) -> None:
        """Sends what is queued and closes."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> FromScript | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > FRAME_BYTES_MAX:
                raise ScriptError(f"the script announced a frame of {size} bytes, expected at most {FRAME_BYTES_MAX}")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.DecodeError as error:
            raise ScriptError(f"the script sent something else than a message of its protocol: {error}") from error
