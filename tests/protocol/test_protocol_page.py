"""PROTOCOL.md against messages.py: every message, field, code and limit is on the page, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tileweave.protocol import (
    CHUNK_BYTES_MAX,
    ELEMENT_BYTES,
    FRAME_BYTES_MAX,
    MESSAGES,
    META_BYTES_MAX,
    PROTOCOL_VERSION,
    Accuracy,
    ByeCode,
    FailCode,
    Kind,
    Limits,
    Profile,
    Term,
    Verdict,
)
from tileweave.protocol.elements import SCALE_BLOCK

PAGE = (Path(__file__).parents[2] / "PROTOCOL.md").read_text(encoding="utf-8")
ROWS = {
    name: (int(number), direction, fields)
    for number, name, direction, fields in re.findall(r"^\| (\d+) \| ([A-Z]+) \| (\w+) \| (.+) \|$", PAGE, re.MULTILINE)
}


def documented_fields(text: str) -> set[str]:
    """Names in backticks up to the payload or the explanation."""
    return set(re.findall(r"`(\w+)`", re.split(r"; payload|: (?:they|a lease|no longer)| of the PING| \(of ", text)[0]))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_every_message_is_there_with_its_fields_and_direction(kind: Kind) -> None:
    number, direction, fields = ROWS[kind.name]
    message = MESSAGES[kind]
    assert number == kind
    assert documented_fields(fields) == set(message.__struct_fields__)
    said = (message.__doc__ or "").split(":")[0].split(",")[0]
    assert direction == {"Device -> server": "D", "Server -> device": "S"}.get(said, "both")


def test_no_other_message_is_there() -> None:
    assert set(ROWS) == {kind.name for kind in Kind}


@pytest.mark.parametrize("struct", [Profile, Limits, Term])
def test_nested_objects_are_there_with_their_fields(struct: Any) -> None:
    paragraph = re.search(rf"`{struct.__name__.lower()}` is an object(.*?)(?:`\w+` is an object|\n\n)", PAGE, re.DOTALL)
    assert paragraph is not None
    assert set(re.findall(r"`(\w+)`", paragraph[1])) == set(struct.__struct_fields__)


def test_element_types_and_their_layout_are_there() -> None:
    elements = PAGE.split("## Elements")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", elements, re.MULTILINE)) == set(ELEMENT_BYTES)
    for name, size in ELEMENT_BYTES.items():
        assert f"| `{name}` | {size} |" in elements
    assert f"ceil(columns / {SCALE_BLOCK})" in elements
    leases = PAGE.split("**Leases.**")[1].split("**Results.**")[0]
    formulas = [re.sub(r"\s+", " ", line).strip() for line in (Term.__doc__ or "").splitlines() if "_by_k" in line]
    said = re.sub(r"\s+", " ", leases)
    assert len(formulas) == 4 and all(formula in said for formula in formulas)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_defaults_are_those_of_the_structs(kind: Kind) -> None:
    documented = dict(re.findall(r"`(\w+)`=(\"[^\"]*\"|[\w\[\]]+)", ROWS[kind.name][2]))
    info = msgspec.inspect.type_info(MESSAGES[kind])
    assert isinstance(info, msgspec.inspect.StructType)
    actual = {
        field.name: msgspec.json.encode(
            field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        ).decode()
        for field in info.fields
        if not field.required
    }
    assert documented == {name: re.sub(r"^0\.0$", "0", value) for name, value in actual.items()}


@pytest.mark.parametrize(
    ("kind", "codes"), [(Kind.BYE, ByeCode), (Kind.FAIL, FailCode), (Kind.ACK, Verdict)], ids=["bye", "fail", "ack"]
)
def test_every_code_is_there(kind: Kind, codes: Any) -> None:
    listed = re.search(r"`(?:code|verdict)` \(([\w, ]+)\)", ROWS[kind.name][2])
    assert listed is not None
    assert tuple(listed[1].split(", ")) == get_args(codes)
    if kind is Kind.BYE:
        goodbye = PAGE.split("**Goodbye.**")[1].split("\n## ")[0]
        assert all(f"`{code}`" in goodbye for code in get_args(codes)), "each code says what to do"


def test_what_each_accuracy_allows_is_said() -> None:
    leases = PAGE.split("**Leases.**")[1].split("**Results.**")[0]
    assert all(f"`{accuracy}`" in leases for accuracy in get_args(Accuracy))


def test_limits_are_those_of_the_code() -> None:
    assert FRAME_BYTES_MAX == 1 << 20 and "| frame | 1 MiB" in PAGE
    assert META_BYTES_MAX == 64 << 10 and "| metadata | 64 KiB" in PAGE
    assert FRAME_BYTES_MAX - 4096 == CHUNK_BYTES_MAX and "frame limit - 4096" in PAGE
    assert f"version {PROTOCOL_VERSION}" in PAGE.splitlines()[0]
    assert f"0 and {max(Kind) + 1} to 255 are reserved" in PAGE
