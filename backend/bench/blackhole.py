"""A TCP proxy whose link can be cut without closing it: bytes vanish both ways, the sockets stay open.

What a pulled network cable or a phone in a tunnel looks like to a server: no FIN, no reset, silence.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

READ_BYTES = 1 << 16


class Blackhole:
    """Forwards 127.0.0.1:port_of_proxy to `target_port` of the same address. Use as a context manager."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._swallowing = False
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def swallow(self) -> None:
        """From now on nothing passes, on open connections and new ones."""
        self._swallowing = True

    def open(self) -> None:
        """Let new bytes pass again; what was swallowed stays lost."""
        self._swallowing = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                if not self._swallowing:
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
