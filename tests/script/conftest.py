"""A coordinator's end of the script's socket, for tests: speaks wire.py and multiplies with NumPy out of the arena."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tileweave.conversions import panel_floats
from tileweave.protocol.elements import WIRES, Dtype, panel_bytes
from tileweave.script import wire

DEADLINE_S = 30.0


def matrix(region: wire.Region, shape: tuple[int, ...], mode: Any = "r") -> np.ndarray:
    assert region.size == 4 * int(np.prod(shape))
    assert region.offset % 64 == 0
    return np.memmap(region.path, np.float32, mode, region.offset, shape)


def operand(part: wire.Part, batch: int, lines: int, k: int, by_k: bool, dtype: Dtype) -> np.ndarray:
    """(batch, lines, k) float32 of a part as it is stored."""
    region = part.region
    rows, columns = (batch * k, lines) if by_k else (batch * lines, k)
    assert region.size == panel_bytes(rows, columns, dtype)
    assert region.offset % 64 == 0
    stamp = np.fromfile(region.path, "<u8", 1, offset=part.stamp_offset)
    assert stamp == part.stamp
    data = np.fromfile(region.path, np.uint8, region.size, offset=region.offset)
    stored = panel_floats(memoryview(data), rows, columns, dtype).reshape(batch, -1, columns)
    return stored.transpose(0, 2, 1) if by_k else stored


class Peer:
    """One accepted script. `answer` maps a message to the replies; by default every GEMM is multiplied."""

    def __init__(self, folder: Path, **welcome: Any) -> None:
        self.path = str(folder / "job.sock")
        self.checkpoints = folder / "checkpoints"
        arena = folder / "arena"
        arena.mkdir()
        defaults: dict[str, Any] = {
            "job": "j1", "epoch": 3, "steps": 3, "config": {}, "data": None, "arena_dir": str(arena),
            "checkpoint_dir": str(self.checkpoints), "checkpoint_every_s": 0.0, "min_gemm_flop": 1,
        }  # fmt: skip
        self.welcome = wire.ScriptWelcome(**{**defaults, **welcome})
        self.token = "secret"
        self.messages: list[wire.FromScript] = []
        self.answer: Callable[[wire.FromScript], list[wire.ToScript] | None] = self.default_answer
        self.connection: socket.socket | None = None
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.settimeout(DEADLINE_S)
        self._listening.bind(self.path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def of(self, kind: type) -> list[Any]:
        """Messages of one kind so far."""
        return [m for m in self.messages if isinstance(m, kind)]

    def default_answer(self, message: wire.FromScript) -> list[wire.ToScript] | None:
        if isinstance(message, wire.ScriptHello):
            return [self.welcome] if message.token == self.token else None
        if isinstance(message, wire.GemmRequest):
            return [self.product(message)]
        if isinstance(message, wire.CheckpointWritten):
            return [wire.Recorded(step=message.step)]
        return []

    def product(self, gemm: wire.GemmRequest) -> wire.Product:
        dtype = WIRES[self.welcome.wire].panels
        c = matrix(gemm.c, (gemm.batch, gemm.m, gemm.n), "r+")
        c[:] = 0
        for one, two in zip(gemm.a, gemm.b, strict=True):
            a = operand(one, gemm.batch, gemm.m, gemm.k, gemm.a_by_k, dtype)
            c += a @ operand(two, gemm.batch, gemm.n, gemm.k, gemm.b_by_k, dtype).transpose(0, 2, 1)
        return wire.Product(id=gemm.id)

    def send(self, *messages: wire.ToScript) -> None:
        self.send_raw(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages))

    def send_raw(self, data: bytes) -> None:
        assert self.connection is not None
        self.connection.sendall(data)

    def join(self) -> None:
        """Until the script has closed its end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes an accept
        self._listening.close()
        if self.connection is not None:
            self.connection.close()
        self.join()

    def _serve(self) -> None:
        try:
            self.connection, _ = self._listening.accept()
        except OSError:  # closed: nobody connected
            return
        self.connection.settimeout(DEADLINE_S)
        decoder = msgspec.msgpack.Decoder(wire.FromScript)
        with self.connection, self.connection.makefile("rb") as stream:
            while head := stream.read(4):
                message = decoder.decode(stream.read(int.from_bytes(head, "little")))
                self.messages.append(message)
                replies = self.answer(message)
                if replies is None:
                    return
                if replies:
                    self.send(*replies)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**welcome: Any) -> Peer:
        folder = tmp_path / f"peer{len(peers)}"
        folder.mkdir()
        peers.append(Peer(folder, **welcome))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()
