"""What only the WebGPU engine has: kernels to choose from, a tuner, pieces, and memory refused after the fact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Error

# The family as this machine's software adapter runs it; it has no shader-f16.
F32 = [
    "registers 8x8 4x1 step 1",
    "registers 8x8 2x2 step 2",
    "shared 8x8 8x8 step 16",
    "registers 4x4 16x8 step 4",
    "registers 16x8 2x2 step 1",
    "shared 4x4 16x16 step 16",
    "registers 8x4 8x8 step 2",
    "subgroups 8x4 32x1 step 2",
    "registers 8x8 8x8 step 2",
    "subgroups 8x8 32x1 step 2",
]
I8 = ["bytes 4x4 8x8 step 32", "bytes 8x4 4x1 step 32"]
FIRST, SECOND = F32[0], F32[6]
TILE = {"m": 70, "n": 33, "k": 90}

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(chromium: Browser, site: Any) -> Iterator[Call]:
    """One page for the whole file: `call(order, …)` runs an order of webgpu_page.js."""
    page = chromium.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{site.url}/suite/webgpu_page.html")
    page.wait_for_function("() => Boolean(globalThis.gpu)")
    yield lambda do, **values: page.evaluate("order => gpu(order)", {"do": do, **values})
    page.close()
    assert complaints == []


def remembered(name: str = SECOND, **changes: Any) -> str:
    text = {"adapter": "google swiftshader", "family": 2, "kernel": name, "flops": 2e9}
    return json.dumps({**text, **changes})


def test_these_are_the_kernels_that_run_without_halves(call: Call) -> None:
    family = call("family")
    assert [member["name"] for member in family if member["needs"] != "shader-f16"] == F32 + I8
    assert {member["form"] for member in family if member["needs"] == "shader-f16"} == {"f16"}


@pytest.mark.parametrize("name", F32 + I8)
def test_each_kernel_on_its_own_is_right_on_awkward_shapes(call: Call, name: str) -> None:
    assert call("fault", name=name) == ""


def test_a_kernel_that_doubles_is_caught(call: Call) -> None:
    assert re.match(r"1x1x1 \[0,0\]: .*, expected ", call("fault", name="wrong"))


def test_tuning_chooses_proves_and_remembers(call: Call) -> None:
    opened = call("open")
    assert opened["memory"]["bytes"] <= 64 << 20
    (text,) = opened["told"]
    choice = json.loads(text)
    assert (choice["adapter"], choice["family"]) == ("google swiftshader", 2)
    assert choice["kernel"] in F32 and choice["flops"] > 0
    assert choice["kernel"] in opened["note"]
    call("prove")


def test_a_remembered_choice_is_used_without_tuning(call: Call) -> None:
    opened = call("open", remembered=remembered())
    assert opened["told"] == []
    assert SECOND in opened["note"]
    assert call("tile", **TILE) == "right"


@pytest.mark.parametrize(
    "stale",
    [
        remembered(FIRST, adapter="another GPU"),
        remembered(FIRST, family=0),
        remembered("registers 3x5 1x1 step 7"),
        remembered(I8[0]),
        remembered(kernel=None),
        remembered(FIRST, flops=0),
        remembered(FIRST, flops=1e300),
        remembered(FIRST, flops="1e9"),
        "no JSON",
        "null",
    ],
)
def test_a_stale_text_is_ignored(call: Call, stale: str) -> None:
    opened = call("open", remembered=stale, names=[FIRST])
    assert json.loads(opened["told"][0])["kernel"] == FIRST


def test_a_remembered_kernel_that_is_wrong_now_is_not_used(call: Call) -> None:
    opened = call("open", remembered=remembered("wrong"), names=["wrong", FIRST])
    assert json.loads(opened["told"][0])["kernel"] == FIRST


def test_kernels_of_other_forms_are_measured_when_such_operands_come(call: Call) -> None:
    names = [FIRST, "broken bytes", I8[0]]
    opened = call("open", names=names)
    assert "broken" not in opened["note"] and call("compiled", text="dot4I8Packed") == 0
    assert call("multiplyBytes") == ""
    assert call("compiled", text="dot4I8Packed") == 1
    assert call("multiplyBytes") == ""
    assert call("compiled", text="dot4I8Packed") == 1, "once"


@pytest.mark.parametrize("bad", ["wrong", "broken"])
def test_a_bad_candidate_is_dropped_with_a_reason(call: Call, bad: str) -> None:
    opened = call("open", names=[bad, FIRST])
    assert json.loads(opened["told"][0])["kernel"] == FIRST
    assert f"not used: {bad}: " in opened["note"]
    assert call("tile", **TILE) == "right"
    with pytest.raises(Error, match=f"no kernel works on this GPU: {bad}"):
        call("open", names=[bad])


def test_a_slow_device_gets_its_product_in_many_pieces(call: Call) -> None:
    """A pace of 10 MFLOP/s: half a MFLOP to a dispatch, so that blocks are cut and even k is."""
    call("open", remembered=remembered(flops=1e7), names=[SECOND])
    cut = call("submissions", order={"m": 130, "n": 140, "k": 600})
    assert cut["ended"] == "right"
    call("open", remembered=remembered(flops=1e12), names=[SECOND])
    whole = call("submissions", order={"m": 130, "n": 140, "k": 600})
    assert whole["ended"] == "right"
    assert whole["submissions"] <= 5 < 30 < cut["submissions"]


@given(
    form=st.sampled_from(["f32", "i8"]),
    batch=st.integers(1, 5),
    units=st.integers(0, 60),
    a=st.integers(1, 6),
    b=st.integers(1, 6),
    flop=st.integers(1, 1 << 22),
    groups=st.sampled_from([2, 4, 65535]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_cover_a_product_once(
    call: Call, form: str, batch: int, units: int, a: int, b: int, flop: int, groups: int
) -> None:
    packed = units * (32 if form == "i8" else 16)
    size = {"form": form, "batch": batch, "kPacked": packed, "countA": a, "countB": b}
    assert call("pieces", **size, flopMax=flop, groupsMax=groups) == ""


def test_more_tiles_at_once_than_run_at_once(call: Call) -> None:
    call("open", remembered=remembered())
    tiles = [{"m": 40 + i, "n": 50, "k": 60, "seed": i} for i in range(7)]
    assert call("tiles", tiles=tiles) == ["right"] * 7


def test_a_refused_buffer_fails_one_tile_and_no_other(call: Call) -> None:
    """The refusal comes after createBuffer returned: of the product's buffer first, then of a panel's."""
    call("open", remembered=remembered())
    assert call("tile", **TILE) == "right"
    call("refuse", count=1, **{"from": 4 * 500 * 300})
    assert call("tile", m=500, n=300, k=4) == "OutOfMemory"
    assert call("tile", **TILE) == "right"
    call("open", remembered=remembered())
    call("refuse", count=1, **{"from": 4 * 900 * 300})
    assert call("tile", m=900, n=20, k=300, keep=True) == "OutOfMemory"
    assert call("takeLost") == ["a900x300.1"]
    call("drop", ids=["a900x300.1", "b20x300.1"])
    assert call("tile", **TILE) == "right"


def test_what_was_refused_becomes_the_bound(call: Call) -> None:
    call("open", remembered=remembered())
    call("refuse", count=1, **{"from": 1 << 22})
    call("put", id="big", floats=1 << 20)
    assert call("tile", **TILE) == "right"  # and by now the refusal has arrived
    assert call("takeLost") == ["big"]
    held = call("memory")["bytes"]
    call("put", id="big", floats=1 << 20)
    assert call("takeLost") == ["big"]
    assert call("memory")["bytes"] <= held


def test_memory_is_bounded_and_packed_copies_go_first(call: Call) -> None:
    """Six pairs of panels fill three of five MiB: their packed copies cannot all stay, and every tile is right."""
    limit = 5 << 20
    call("open", remembered=remembered(), bytesMax=limit)
    for _ in range(2):
        for seed in range(6):
            assert call("tile", m=256, n=256, k=256, seed=seed, keep=True) == "right"
            memory = call("memory")
            assert memory["used"] <= memory["bytes"] <= limit
    call("put", id="large", floats=limit // 4)
    assert call("takeLost") == ["large"]
    assert call("tile", m=1, n=1, k=1, seed=9) == "right"


def test_a_tile_that_does_not_fit_waits_for_the_one_beside_it(call: Call) -> None:
    call("open", remembered=remembered(), bytesMax=4 << 20)
    tiles = [{"m": 512, "n": 400, "k": 8, "seed": seed} for seed in range(3)]
    assert call("tiles", tiles=tiles) == ["right"] * 3


def test_close_gives_everything_back(call: Call) -> None:
    call("open", remembered=remembered())
    assert call("tile", **TILE, keep=True) == "right"
    call("close")
    assert call("memory") == {"bytes": 0, "used": 0}
    assert call("tile", **TILE) == "EngineGone"
