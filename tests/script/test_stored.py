"""Operands in the arena: what is written is what was meant, and the same numbers have the same name."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tileweave.conversions import panel_floats, panel_of
from tileweave.protocol.elements import Dtype
from tileweave.script.arena import Arena
from tileweave.script.stored import BY_LINES, F16_SUM_MAX, Layout, exponents, store

DTYPES: list[Dtype] = ["f32", "bf16", "f16", "i8"]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


def numbers(arena: Arena, part: Tensor, layout: Layout, dtype: Dtype) -> np.ndarray:
    """(batch, lines, k) as a reader of the arena finds it."""
    block = store(arena, part, layout, dtype).block
    batch, lines, k = part.shape
    rows, columns = (batch * k, lines) if layout.by_k else (batch * lines, k)
    stored = panel_floats(bytes(block.buffer), rows, columns, dtype).reshape(batch, -1, columns)
    return stored.transpose(0, 2, 1) if layout.by_k else stored


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 20), st.integers(1, 300), st.booleans(), st.booleans()
)
def test_any_strides_are_stored_as_the_same_conversion_in_numpy(
    dtype: Dtype, batch: int, lines: int, k: int, by_k: bool, strided: bool
) -> None:
    torch.manual_seed(batch * lines + k)
    part = torch.randn(batch, k, lines).transpose(1, 2) if strided else torch.randn(batch, lines, k)
    layout = Layout(by_k)
    with TemporaryDirectory() as folder:
        found = numbers(Arena(Path(folder)), part, layout, dtype)
    matrix = layout.rows(part).numpy()
    flat = np.ascontiguousarray(matrix).reshape(-1, matrix.shape[2])
    expected = panel_floats(panel_of(flat, dtype), *flat.shape, dtype).reshape(matrix.shape)
    assert (found == (expected.transpose(0, 2, 1) if by_k else expected)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_name_is_the_contents(arena: Arena, dtype: Dtype) -> None:
    torch.manual_seed(1)
    w = torch.randn(1, 40, 60)
    name = store(arena, w, BY_LINES, dtype).content
    # W for Y = X W^T, and for dX = dY W: the same bytes, read by k.
    transposed = w.transpose(1, 2)
    layout = Layout.of([transposed])
    assert layout.by_k
    assert store(arena, transposed, layout, dtype).content == name
    assert store(arena, w.clone(), BY_LINES, dtype).content == name
    others = [w.reshape(1, 60, 40), w[:, :, :30], w.flip(2)]
    changed = w.clone()
    changed[0, 3, 5] += 1
    assert len({name, *(store(arena, part, BY_LINES, dtype).content for part in [*others, changed])}) == 5
    assert store(arena, w, BY_LINES, "f32" if dtype != "f32" else "bf16").content != name


def test_layouts_that_lie_neither_way_are_stored_by_lines() -> None:
    x = torch.randn(4, 6, 8)
    assert not Layout.of([x]).by_k
    assert not Layout.of([x[:, :, ::2]]).by_k
    assert not Layout.of([x.transpose(1, 2), x.transpose(0, 2).transpose(1, 2)]).by_k
    assert Layout.of([x.transpose(1, 2), torch.randn(4, 6, 8).transpose(1, 2)]).by_k


@given(st.floats(-100, 100), st.floats(-100, 100), st.integers(1, 3000))
def test_f16_is_scaled_into_its_range_and_so_is_the_product(left: float, right: float, k: int) -> None:
    a = torch.full((1, 2, k), 2.0**left)
    b = torch.full((1, 2, k), -(2.0**right))
    powers = exponents([a], [b])
    scaled = a * 2.0 ** powers[0], b * 2.0 ** powers[1]
    assert powers[1] % 4 == 0 and float(scaled[1].abs().max()) <= 1
    assert float(scaled[1].abs().max()) >= 1 / 16
    assert float((scaled[0].double() @ scaled[1].double().transpose(1, 2)).abs().max()) <= F16_SUM_MAX


def test_tensors_of_nearly_the_same_size_have_the_same_power() -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, 64, 64) for _ in range(20)]
    assert len({exponents([part], [part])[1] for part in x}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(arena: Arena, dtype: Dtype, value: float) -> None:
    part = torch.ones(1, 3, 200)
    part[0, 1, 150] = value
    found = numbers(arena, part, BY_LINES, dtype)
    assert not np.isfinite(found[0, 1]).all()
    assert np.isfinite(found[0, [0, 2]]).all()
    assert exponents([part], [part]) == (0, 0)
