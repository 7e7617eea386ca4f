"""Writes the golden vectors: frames that both languages must read alike, and frames that both must refuse.

Run `python tests/golden/make_vectors.py` after adding a message or a case, and read the diff: a changed hex line of an
old case means that the wire changed and old clients break. Numbers with a fraction are chosen so that Python and
JavaScript write them alike; the cases marked `"canonical": false` are read by both but written differently.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from tileweave.protocol import MESSAGES, Kind, encode

HERE = Path(__file__).parent
SECRET = "s3cret-of-16-or-more-characters"
SAFE_MAX = 2**53 - 1
PROFILE = {
    "kernel": "wasm-simd",
    "flops": 2.5e9 + 0.5,
    "memory_bytes": 2**32,
    "workers": 8,
    "agent": "Firefox/141 é✓😀",
}
LIMITS = {
    "frame_bytes_max": 2**20, "panel_bytes_max": 2**26, "result_bytes_max": 2**26, "leases_max": 8, "ping_s": 2.5,
    "silence_s_max": 12.5,
}  # fmt: skip
LEASE = {
    "lease": 2**32 + 7, "job": "job-1", "batch": 2, "m": 64, "n": 32, "terms": [
        {"k": 128, "a": "x.0-127", "b": "w.0-63", "a_row": 0, "a_column": 0, "b_row": 0, "b_column": 0}],
    "deadline_s": 3.25, "a_by_k": False, "b_by_k": False, "kind": "tile", "dtype": "f32", "accuracy": "rowwise",
}  # fmt: skip
TERM = {"k": 3, "a": "dy.512-1023", "b": "x.512-1023", "a_row": 2**24, "a_column": 128, "b_row": 1, "b_column": 0}

# (name, message number, every field, payload)
VALID: list[tuple[str, Kind, dict[str, Any], bytes]] = [
    ("hello-new", Kind.HELLO, {
        "client": "tileweave-web/0.1.0", "profile": PROFILE, "device": None, "secret": None, "name": "", "panels": [],
        "leases": []}, b""),
    ("hello-back", Kind.HELLO, {
        "client": "x", "profile": PROFILE, "device": "d-1:a.b_c", "secret": SECRET, "name": "Zoë’s phone 📱",
        "panels": ["1.3.a.0-127"], "leases": [0, SAFE_MAX]}, b""),
    ("welcome-new", Kind.WELCOME, {"device": "d-1", "name": "quiet-otter", "limits": LIMITS, "secret": SECRET}, b""),
    ("welcome-back", Kind.WELCOME, {"device": "d-1", "name": "", "limits": LIMITS, "secret": None}, b""),
    ("panel-one-chunk", Kind.PANEL, {
        "panel": "1.3.a.0-1", "rows": 2, "columns": 3, "offset": 0, "size": 24, "dtype": "f32"},
        struct.pack("<6f", 0.0, -1.5, 2.0, 3.25, 1e-30, float("inf"))),
    ("panel-last-chunk", Kind.PANEL, {
        "panel": "p", "rows": 2, "columns": 3, "offset": 16, "size": 24, "dtype": "f32"}, bytes(range(8))),
    ("panel-bf16", Kind.PANEL, {
        "panel": "p", "rows": 2, "columns": 3, "offset": 0, "size": 12, "dtype": "bf16"}, bytes(range(12))),
    ("panel-f16", Kind.PANEL, {
        "panel": "p", "rows": 3, "columns": 3, "offset": 16, "size": 18, "dtype": "f16"}, bytes(range(2))),
    ("panel-i8", Kind.PANEL, {  # 3 x 129 elements, 1 of padding, 3 x 2 scales
        "panel": "p", "rows": 3, "columns": 129, "offset": 0, "size": 412, "dtype": "i8"},
        bytes(range(256)) + bytes(156)),
    ("drop", Kind.DROP, {"panels": ["1.3.a.0-127", "1.3.b.0-63"]}, b""),
    ("drop-nothing", Kind.DROP, {"panels": []}, b""),
    ("need", Kind.NEED, {"panel": "1.3.a.0-127", "lease": SAFE_MAX}, b""),
    ("lease", Kind.LEASE, LEASE, b""),
    ("lease-normwise", Kind.LEASE, LEASE | {"accuracy": "normwise"}, b""),
    ("lease-sum", Kind.LEASE, LEASE | {
        "batch": 1, "terms": [TERM, TERM | {"a": "dy2.512-1023"}], "a_by_k": True, "b_by_k": True,
        "dtype": "bf16"}, b""),
    ("lease-f16", Kind.LEASE, LEASE | {"dtype": "f16", "b_by_k": True}, b""),
    ("result", Kind.RESULT, {"lease": 2**32 + 7, "job": "job-1", "seconds": 0.125, "offset": 16, "size": 48},
        bytes(range(32))),
    ("fail", Kind.FAIL, {"lease": 0, "job": "job-1", "code": "memory", "message": "64 MiB asked, \"12\" free\n"}, b""),
    ("ack", Kind.ACK, {"lease": 1, "job": "job-1", "verdict": "accepted", "reason": "", "flop": 524288}, b""),
    ("ack-rejected", Kind.ACK, {
        "lease": 1, "job": "job-1", "verdict": "rejected", "reason": "é" * 500, "flop": 0}, b""),
    ("revoke", Kind.REVOKE, {"job": "job-1", "leases": [1, 2, 3]}, b""),
    ("status", Kind.STATUS, {
        "state": "paused", "reason": "on battery", "visible": False, "capacity_bytes": 2**40}, b""),
    ("ping", Kind.PING, {"nonce": SAFE_MAX}, b""),
    ("pong", Kind.PONG, {"nonce": 0}, b""),
    ("bye", Kind.BYE, {"code": "quarantined", "reason": "2 wrong results", "retry_s": 120.5}, b""),
]  # fmt: skip

# (name, message number, JSON as another client may write it, every field after reading)
READ_ONLY: list[tuple[str, Kind, str, dict[str, Any]]] = [
    ("hello-least", Kind.HELLO, '{"client":"c","profile":{}}', {
        "client": "c", "device": None, "secret": None, "name": "", "panels": [], "leases": [],
        "profile": {"kernel": "unknown", "flops": 0, "memory_bytes": 0, "workers": 1, "agent": ""}}),
    ("unknown-fields", Kind.PONG, ' {"later":{"nonce":[1,null,true,-1.5e3]},\n"nonce" : 7 } ', {"nonce": 7}),
    ("escapes", Kind.BYE, r'{"code":"done","reason":"\u00e9\ud83d\ude00\"\\:\"x\":"}', {
        "code": "done", "reason": 'é😀"\\:"x":', "retry_s": 0}),
    ("same-key-at-two-levels", Kind.PING, '{"nonce":1,"x":{"nonce":2,"x":{"nonce":3}}}', {"nonce": 1}),
    ("nothing-special-about-proto", Kind.PING, '{"nonce":1,"__proto__":{"nonce":2}}', {"nonce": 1}),
    ("64-levels", Kind.PING, '{"nonce":1,"x":' + "[" * 63 + "]" * 63 + "}", {"nonce": 1}),
    ("brackets-in-text", Kind.BYE, '{"code":"done","reason":"' + r"\\\"{[" * 40 + '"}', {
        "code": "done", "reason": r"\"{[" * 40, "retry_s": 0}),
    ("lease-least", Kind.LEASE,
        '{"lease":1,"job":"j","batch":1,"m":2,"n":3,"terms":[{"k":4,"a":"p","b":"q"}],"deadline_s":1.5}', {
        "lease": 1, "job": "j", "batch": 1, "m": 2, "n": 3,
        "terms": [{"k": 4, "a": "p", "b": "q", "a_row": 0, "a_column": 0, "b_row": 0, "b_column": 0}],
        "deadline_s": 1.5, "a_by_k": False, "b_by_k": False, "kind": "tile", "dtype": "f32", "accuracy": "rowwise"}),
    ("status-least", Kind.STATUS, '{"state":"ready"}', {
        "state": "ready", "reason": "", "visible": True, "capacity_bytes": 0}),
]  # fmt: skip


def raw(
    meta: bytes,
    *,
    number: int = Kind.PING,
    magic: bytes = b"TW",
    version: int = 2,
    meta_len: int | None = None,
    payload: bytes = b"",
    payload_len: int | None = None,
    reserved: int = 0,
    padding: bytes | None = None,
) -> bytes:
    """A frame with any part of its header wrong."""
    header = struct.pack(
        "<2sBBIII", magic, version, number, len(meta) if meta_len is None else meta_len,
        len(payload) if payload_len is None else payload_len, reserved,
    )  # fmt: skip
    return header + meta + (bytes(-len(meta) % 16) if padding is None else padding) + payload


def changed(kind: Kind, /, **fields: Any) -> bytes:
    """The first valid frame of that kind with some fields replaced, in JSON (so it may hold what no struct can)."""
    base, payload = next((valid[2], valid[3]) for valid in VALID if valid[1] == kind)
    return raw(json.dumps(base | fields).encode(), number=kind, payload=payload)


def without(kind: Kind, field: str) -> bytes:
    """The first valid frame of that kind without one field."""
    base, payload = next((valid[2], valid[3]) for valid in VALID if valid[1] == kind)
    return raw(json.dumps({k: v for k, v in base.items() if k != field}).encode(), number=kind, payload=payload)


def malformed() -> dict[str, bytes]:
    """Frames that must be refused, by what is wrong with them."""
    ping = b'{"nonce":1}'
    return {
        "empty": b"",
        "short-header": raw(ping)[:15],
        "bad-magic": raw(ping, magic=b"WT"),
        "version-0": raw(ping, version=0),
        "version-1": raw(ping, version=1),
        "version-3": raw(ping, version=3),
        "number-0": raw(ping, number=0),
        "number-15": raw(ping, number=15),
        "number-255": raw(ping, number=255),
        "reserved-bytes": raw(ping, reserved=1),
        "meta-len-too-long": raw(ping, meta_len=200),
        "meta-len-too-short": raw(ping, meta_len=10),
        "meta-len-max-u32": raw(ping, meta_len=2**32 - 1),
        "payload-len-max-u32": raw(ping, payload_len=2**32 - 1),
        "payload-len-too-long": raw(ping, payload_len=16),
        "trailing-bytes": raw(ping) + b"\0",
        "no-padding": raw(ping, padding=b""),
        "too-much-padding": raw(ping, padding=bytes(21)),
        "padding-not-zero": raw(ping, padding=b"\0\0\0\0x"),
        "no-meta": raw(b""),
        "meta-not-json": raw(b"nonce=1"),
        "meta-not-closed": raw(b'{"nonce":1'),
        "meta-trailing-comma": raw(b'{"nonce":1,}'),
        "meta-two-values": raw(b'{"nonce":1}{"nonce":2}'),
        "meta-array": raw(b"[1]"),
        "meta-null": raw(b"null"),
        "meta-number": raw(b"1"),
        "meta-byte-order-mark": raw(b"\xef\xbb\xbf" + ping),
        "meta-not-utf8": raw(b'{"nonce":1,"x":"\xff"}'),
        "meta-utf16": raw('{"nonce":1}'.encode("utf-16-le")),
        "meta-control-character": raw(b'{"nonce":1,"x":"\x01"}'),
        "meta-lone-surrogate": raw(rb'{"nonce":1,"x":"\ud800"}'),
        "meta-nan": raw(b'{"nonce":NaN}'),
        "meta-nan-in-unknown-field": raw(b'{"nonce":1,"x":NaN}'),
        "meta-infinity": raw(b'{"nonce":Infinity}'),
        "meta-leading-zero": raw(b'{"nonce":01}'),
        "meta-65-levels": raw(b'{"nonce":1,"x":' + b"[" * 64 + b"]" * 64 + b"}"),
        "meta-deep-arrays": raw(b'{"nonce":1,"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
        "meta-deep-objects": raw(b'{"nonce":1,"x":' + b'{"y":' * 1500 + b"1" + b"}" * 1500 + b"}"),
        "duplicate-key": raw(b'{"nonce":1,"nonce":1}'),
        "duplicate-key-escaped": raw(rb'{"nonce":1,"\u006eonce":1}'),
        "duplicate-key-nested": raw(b'{"nonce":1,"x":[{"y":1,"y":2}]}'),
        "nonce-missing": raw(b"{}"),
        "nonce-negative": raw(b'{"nonce":-1}'),
        "nonce-fraction": raw(b'{"nonce":1.5}'),
        "nonce-text": raw(b'{"nonce":"1"}'),
        "nonce-true": raw(b'{"nonce":true}'),
        "nonce-null": raw(b'{"nonce":null}'),
        "nonce-list": raw(b'{"nonce":[1]}'),
        "nonce-over-safe-integer": raw(b'{"nonce":9007199254740992}'),
        "nonce-huge": raw(b'{"nonce":' + b"9" * 400 + b"}"),
        "ping-with-payload": raw(ping, payload=bytes(16)),
        "panel-without-payload": raw(
            json.dumps(VALID[4][2]).encode(), number=Kind.PANEL),
        "panel-past-its-size": changed(Kind.PANEL, offset=4),
        "panel-size-not-rows-times-columns": changed(Kind.PANEL, size=28),
        "panel-i8-without-scales": changed(Kind.PANEL, dtype="i8", size=6),
        "panel-bf16-size-of-f32": changed(Kind.PANEL, dtype="bf16"),
        "panel-rows-zero": changed(Kind.PANEL, rows=0),
        "panel-rows-too-many": changed(Kind.PANEL, rows=2**24 + 1, columns=1, size=4 * (2**24 + 1)),
        "panel-dtype": changed(Kind.PANEL, dtype="f64"),
        "panel-offset-negative": changed(Kind.PANEL, offset=-8),
        "result-past-its-size": changed(Kind.RESULT, size=40),
        "result-seconds-negative": changed(Kind.RESULT, seconds=-0.5),
        "result-seconds-infinite": changed(Kind.RESULT).replace(b"0.125", b"1e999"),
        "result-size-too-large": changed(Kind.RESULT, size=2**40 + 1),
        "id-empty": changed(Kind.NEED, panel=""),
        "id-too-long": changed(Kind.NEED, panel="a" * 65),
        "id-slash": changed(Kind.NEED, panel="../etc"),
        "id-space": changed(Kind.NEED, panel="a b"),
        "id-newline-at-end": changed(Kind.NEED, panel="a\n"),
        "id-not-ascii": changed(Kind.NEED, panel="é"),
        "lease-kind": changed(Kind.LEASE, kind="slice"),
        "lease-no-terms": changed(Kind.LEASE, terms=[]),
        "lease-terms-missing": without(Kind.LEASE, "terms"),
        "lease-too-many-terms": changed(Kind.LEASE, terms=[{"k": 1, "a": "a", "b": "b"}] * 257),
        "lease-term-a-number": changed(Kind.LEASE, terms=[1]),
        "lease-term-without-k": changed(Kind.LEASE, terms=[{"a": "a", "b": "b"}]),
        "lease-term-offset-negative": changed(Kind.LEASE, terms=[TERM | {"a_row": -1}]),
        "lease-term-offset-too-large": changed(Kind.LEASE, terms=[TERM | {"b_column": 2**24 + 1}]),
        "lease-dtype": changed(Kind.LEASE, dtype="i8"),
        "lease-by-k-a-number": changed(Kind.LEASE, a_by_k=1),
        "lease-accuracy": changed(Kind.LEASE, accuracy="loose"),
        "lease-accuracy-null": changed(Kind.LEASE, accuracy=None),
        "lease-dimension-fraction": changed(Kind.LEASE, m=1.5),
        "hello-no-profile": without(Kind.HELLO, "profile"),
        "hello-profile-null": changed(Kind.HELLO, profile=None),
        "hello-profile-list": changed(Kind.HELLO, profile=[]),
        "hello-no-workers": changed(Kind.HELLO, profile={"workers": 0}),
        "hello-flops-text": changed(Kind.HELLO, profile={"flops": "fast"}),
        "hello-secret-short": changed(Kind.HELLO, secret="short"),
        "hello-name-too-long": changed(Kind.HELLO, name="é" * 65),
        "hello-name-null": changed(Kind.HELLO, name=None),
        "hello-too-many-leases": changed(Kind.HELLO, leases=[1] * 65),
        "hello-too-many-panels": changed(Kind.HELLO, panels=["p"] * 4097),
        "hello-panels-not-a-list": changed(Kind.HELLO, panels="p"),
        "hello-panel-a-number": changed(Kind.HELLO, panels=[1]),
        "welcome-no-limits": without(Kind.WELCOME, "limits"),
        "welcome-leases-max-zero": changed(Kind.WELCOME, limits=LIMITS | {"leases_max": 0}),
        "welcome-limit-missing": changed(Kind.WELCOME, limits={k: v for k, v in LIMITS.items() if k != "ping_s"}),
        "fail-code": changed(Kind.FAIL, code="tired"),
        "fail-message-too-long": changed(Kind.FAIL, message="😀" * 501),
        "ack-verdict": changed(Kind.ACK, verdict="maybe"),
        "ack-flop-negative": changed(Kind.ACK, flop=-1),
        "status-visible-number": changed(Kind.STATUS, visible=1),
        "status-state": changed(Kind.STATUS, state="asleep"),
        "drop-no-panels": raw(b"{}", number=Kind.DROP),
        "revoke-lease-text": changed(Kind.REVOKE, leases=["1"]),
        "bye-code": changed(Kind.BYE, code="why"),
        "bye-retry-too-long": changed(Kind.BYE, retry_s=2e7),
    }  # fmt: skip


def valid_vectors() -> list[dict[str, Any]]:
    """The frames to read, with every field as read."""
    vectors = [
        {
            "name": name, "type": kind.name, "canonical": True, "fields": fields, "payload": payload.hex(),
            "frame": encode(msgspec.convert(fields, MESSAGES[kind]), payload).hex(),
        }
        for name, kind, fields, payload in VALID
    ]  # fmt: skip
    return vectors + [
        {
            "name": name, "type": kind.name, "canonical": False, "fields": fields, "payload": "",
            "frame": raw(text.encode(), number=kind).hex(),
        }
        for name, kind, text, fields in READ_ONLY
    ]  # fmt: skip


def malformed_vectors() -> list[dict[str, Any]]:
    """The frames to refuse, with the error each side must raise."""
    return [
        {
            "name": name,
            "error": "VersionMismatch" if name.startswith("version-") else "ProtocolError",
            "frame": frame.hex(),
        }
        for name, frame in malformed().items()
    ]


def files() -> dict[str, str]:
    """File name -> content, one vector a line."""
    made = {"valid.json": valid_vectors(), "malformed.json": malformed_vectors()}
    return {
        name: "[\n" + ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in vectors) + "\n]\n"
        for name, vectors in made.items()
    }


if __name__ == "__main__":
    for file_name, content in files().items():
        (HERE / file_name).write_text(content, encoding="utf-8")
