"""A real gateway process and clients that send bytes as no library would."""

from __future__ import annotations

import base64
import contextlib
import os
import socket as sockets
import struct

TOKEN = "a-token-for-tests-only"


def dial(served) -> sockets.socket:
    raw = sockets.create_connection(("127.0.0.1", served.port), timeout=20)
    served.stack.callback(raw.close)
    return raw


def answer(raw: sockets.socket) -> bytes:
    """Everything until the server closes."""
    got = b""
    try:
        while piece := raw.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def test_a_header_that_is_slow_or_endless_ends_the_connection(make_served) -> None:
    served = make_served(request_idle_s_max=1.0)
    slow, idle, endless = dial(served), dial(served), dial(served)
    slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    assert answer(idle) == b""
    assert answer(slow) == b""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        endless.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (1 << 20))
    assert answer(endless)[:12] in (b"HTTP/1.1 400", b"")


def test_an_endless_chunked_body_is_stopped_at_its_limit(make_served) -> None:
    served = make_served(body_bytes_max=1 << 16, upload_bytes_max=1 << 20)
    raw = dial(served)
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n"
    raw.sendall(head.encode() + b"\r\n")
    sent, piece = 0, b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    try:
        while sent < 5 << 30:
            raw.sendall(piece)
            sent += 0x8000
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert sent < 64 << 20


def test_a_body_that_pauses_is_given_up(make_served) -> None:
    served = make_served(request_idle_s_max=0.5)
    raw = dial(served)
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
    raw.sendall(head.encode() + b"{")
    assert answer(raw).startswith(b"HTTP/1.1 408")


def test_a_message_in_endless_fragments_is_refused(make_served) -> None:
    served = make_served()
    raw = dial(served)
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET /ws/device HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101" in raw.recv(4096).split(b"\r\n")[0]
    fragment = b"\x00\x80" + bytes(4)  # an empty continuation frame, masked
    try:
        raw.sendall(b"\x02\x81" + bytes(4) + b"x")
        for _ in range(64):
            raw.sendall(fragment * 1024)
    except (BrokenPipeError, ConnectionResetError):
        pass
    got = answer(raw)
    assert got == b"" or (got[0] == 0x88 and struct.unpack(">H", got[2:4])[0] == 1009)


def test_the_log_has_no_queries_and_no_tokens(make_served, capfd) -> None:
    served = make_served()
    raw = dial(served)
    raw.sendall(
        f"GET /api/v1/jobs?token={TOKEN}&secret=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    assert answer(raw).startswith(b"HTTP/1.1 200")
    served.device()
    served.stop()
    log = capfd.readouterr().err
    assert '"path": "/api/v1/jobs"' in log
    assert TOKEN not in log
    assert "secret" not in log
