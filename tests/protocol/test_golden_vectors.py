"""The golden vectors, read and written by Python and (through `node --test`) by the browser's protocol module."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tileweave.protocol as protocol
from tileweave.protocol import MESSAGES, Kind, ProtocolError, VersionMismatch, decode, encode

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
VALID: list[dict[str, Any]] = json.loads((GOLDEN / "valid.json").read_text(encoding="utf-8"))
MALFORMED: list[dict[str, Any]] = json.loads((GOLDEN / "malformed.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
def test_reads_and_writes_the_vector(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame"])
    message, payload = decode(frame)
    assert message.KIND.name == vector["type"]
    assert msgspec.to_builtins(message) == vector["fields"]
    assert payload.hex() == vector["payload"]
    written = encode(message, payload)
    if vector["canonical"]:
        assert written == frame
    assert decode(written)[0] == message


@pytest.mark.parametrize("vector", MALFORMED, ids=lambda vector: vector["name"])
def test_refuses_the_vector(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(bytes.fromhex(vector["frame"]))
    assert type(caught.value) is (VersionMismatch if vector["error"] == "VersionMismatch" else ProtocolError)
    assert len(str(caught.value)) <= 300


def test_vectors_cover_every_kind_and_every_code() -> None:
    assert {vector["type"] for vector in VALID} == {kind.name for kind in Kind}
    assert set(MESSAGES) == set(Kind)


def test_files_are_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_vectors", GOLDEN / "make_vectors.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, content in script.files().items():
        assert (GOLDEN / name).read_text(encoding="utf-8") == content, (
            f"{name} differs: run tests/golden/make_vectors.py"
        )


def test_browser_module_agrees() -> None:
    run = subprocess.run(
        ["node", "--test", str(HERE / "protocol.test.mjs")], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_browser_constants_agree() -> None:
    names = ["PROTOCOL_VERSION", "FRAME_BYTES_MAX", "META_BYTES_MAX", "CHUNK_BYTES_MAX", "DIMENSION_MAX", "TERMS_MAX"]
    module = (HERE.parents[1] / "web/static/js/protocol.js").as_uri()
    program = f"import({module!r}).then((p) => console.log(JSON.stringify([p.KIND, ...{names}.map((n) => p[n])])))"
    run = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    kinds, *constants = json.loads(run.stdout)
    assert kinds == {kind.name: int(kind) for kind in Kind}
    assert constants == [getattr(protocol, name) for name in names]
