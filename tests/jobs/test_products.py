"""What becomes of a request and of C: tiles in any order, partial sums, and requests that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.jobs.maps import Maps, RegionError
from backend.jobs.products import Product
from backend.jobs.requests import read_request
from planner.shapes import Rect
from tileweave.conversions import panel_floats, panel_of
from tileweave.protocol.elements import WIRES, Wire, panel_bytes, scales_offset
from tileweave.script.wire import GemmRequest, Part, Region


@given(st.data())
def test_tiles_that_cover_c_assemble_it_in_any_order_and_twice(data: st.DataObject) -> None:
    batch, m, n = (data.draw(st.integers(1, 5)) for _ in range(3))
    wanted = np.random.default_rng(batch * 25 + m * 5 + n).random((batch, m, n), np.float32)
    cut_m, cut_n = data.draw(st.integers(0, m)), data.draw(st.integers(0, n))
    product = Product(np.full((batch, m, n), np.nan, np.float32))
    tiles = []
    for b in range(batch):
        for m0, m1 in ((0, cut_m), (cut_m, m)):
            for n0, n1 in ((0, cut_n), (cut_n, n)):
                tile = np.ascontiguousarray(wanted[b : b + 1, m0:m1, n0:n1])
                if tile.size and data.draw(st.booleans()):  # as two halves of the sum, exact in float32
                    for k0, k1, part in ((0, 3, 0.5), (3, 8, 0.5)):
                        tiles.append((Rect(b, b + 1, m0, m1, n0, n1, k0, k1), tile * np.float32(part)))
                else:
                    tiles.append((Rect(b, b + 1, m0, m1, n0, n1), tile))
    for rect, tile in data.draw(st.permutations([*tiles, *tiles[:3]])):
        product.put(tile.ravel(), rect)
    assert product.partial == any(rect.partial for rect, _ in tiles)
    product.finish()
    assert (product.c == wanted).all()


def test_partial_sums_are_added_in_the_order_of_k_whatever_came_first() -> None:
    parts = {Rect(0, 1, 0, 1, 0, 1, k, k + 1): np.float32(value) for k, value in enumerate((1e8, 3.0, -1e8, 1.0))}
    found = set()
    for order in (list(parts), list(reversed(parts))):
        product = Product(np.zeros((1, 1, 1), np.float32))
        for rect in order:
            product.put(np.array([parts[rect]]), rect)
        product.finish()
        found.add(float(product.c[0, 0, 0]))
    assert len(found) == 1


class Asked:
    """A request whose operands lie in a file of the job."""

    def __init__(self, folder: Path, wire: Wire = "f32", batch: int = 1, parts: int = 1, **changes: Any) -> None:
        m, n, k, by_k = 5, 7, 130, {"a": changes.get("a_by_k", False), "b": changes.get("b_by_k", False)}
        self.elements = WIRES[wire]
        self.numbers: dict[str, list[np.ndarray]] = {}
        data, placed = bytearray(b"stamp..."), {}
        for name, lines in (("a", m), ("b", n)):
            rows, columns = (batch * k, lines) if by_k[name] else (batch * lines, k)
            placed[name] = []
            self.numbers[name] = []
            for part in range(parts):
                numbers = np.random.default_rng(part).standard_normal((rows, columns), dtype=np.float32)
                panel = bytes(panel_of(numbers, self.elements.panels))
                self.numbers[name].append(panel_floats(panel, rows, columns, self.elements.panels))
                region = Region(str(folder / "arena"), len(data), len(panel))
                placed[name].append(Part(region, f"{name}{part}", 0, 7))
                data += panel + bytes(-len(panel) % 8)
        c = Region(str(folder / "arena"), len(data), 4 * batch * m * n)
        (folder / "arena").write_bytes(data + bytes(c.size))
        request = GemmRequest(id=1, step=1, batch=batch, m=m, n=n, k=k, a=placed["a"], b=placed["b"], c=c)
        self.request = msgspec.structs.replace(request, **changes)
        self.maps = Maps(folder), Maps(folder, writable=True)

    def read(self) -> Any:
        return read_request(self.request, "j1", self.elements, *self.maps)


@pytest.mark.parametrize("wire", list(WIRES))
def test_a_request_is_read_as_it_was_stored(tmp_path: Path, wire: Wire) -> None:
    asked = Asked(tmp_path, wire, parts=2, b_by_k=True, b_uses=3)
    read = asked.read()
    shape = read.event.shape
    assert (shape.parts, shape.depth, shape.b_by_k, shape.b_uses) == (2, 260, True, 3)
    assert (read.a.read(0, 1, 1, 3, 10, 20)[0] == np.hstack([x[1:3, 10:20] for x in asked.numbers["a"]])).all()
    assert (read.bt.read(0, 1, 1, 3, 10, 20)[0] == np.vstack([x[10:20, 1:3] for x in asked.numbers["b"]]).T).all()
    first, second = read.event.a
    assert (first.content, second.content, first.stamp) == ("j1.a0", "j1.a1", 7)
    if wire == "int8":
        assert first.scales == first.offset + scales_offset(5, 130)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"m": 0}, "expected sizes from 1"),
        ({"k": 129}, "expected 2580"),
        ({"a": []}, "0 parts of A, 1 of B"),
        ({"a": [Part(Region("/etc/passwd", 8, 2600), "x", 0, 1)]}, "expected a file below"),
        ({"a": [Part(Region("", 8, 2600), "no/slash", 0, 1)]}, "expected 1 to 32 letters and digits"),
        ({"a": [Part(Region("", 8, 2600), "x" * 33, 0, 1)]}, "expected 1 to 32 letters and digits"),
        ({"a": [Part(Region("", 8, 2600), "x", 8, 1)]}, "expected it before the region"),
        ({"a": [Part(Region("", 8, 2600), "x", -1, 1)]}, "expected it before the region"),
    ],
)
def test_a_request_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    asked = Asked(tmp_path)
    asked.request = msgspec.structs.replace(asked.request, **changes)
    with pytest.raises(RegionError, match=why):
        asked.read()


def test_several_parts_of_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match="batch 1 where there are several"):
        Asked(tmp_path, batch=2, parts=2).read()


def test_the_size_of_an_operand_is_that_of_its_wire(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.elements = WIRES["bf16"]
    with pytest.raises(RegionError, match=f"expected {panel_bytes(5, 130, 'bf16')}"):
        asked.read()
