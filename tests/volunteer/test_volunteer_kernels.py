"""A native volunteer proves its kernels before it joins: one that is wrong is not used, and the reason is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileweave.conversions import panel_floats, panel_of
from tileweave.protocol import Dtype, Lease, Term
from tileweave.volunteer.compute import Kernel, compute, fastest_kernel, flop, installed_kernels, multiply_numpy
from tileweave.volunteer.errors import VolunteerEnded
from tileweave.volunteer.main import status_text
from tileweave.volunteer.net import VolunteerState
from tileweave.volunteer.panels import Held
from tileweave.volunteer.prove import SHAPES, first_fault
from tileweave.volunteer.session import Task

Array = np.ndarray[Any, Any]


def where(
    condition: Callable[[Array, Array], bool], spoil: Callable[[Array], Array]
) -> Callable[[Array, Array], Array]:
    """NumPy's product, spoiled for some operands."""

    def multiply(a: Array, bt: Array) -> Array:
        product = multiply_numpy(a, bt)
        return spoil(product) if condition(a, bt) else product

    return multiply


def half(a: Array, bt: Array) -> Array:
    """A kernel that stages its operands in half precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        a, bt = a.astype(np.float16).astype(np.float32), bt.astype(np.float16).astype(np.float32)
        return multiply_numpy(a, bt)


def last_row_lost(product: Array) -> Array:
    product[:, -1] = 0
    return product


def one_nan(product: Array) -> Array:
    product[0, 0, 0] = np.nan
    return product


FAULTY: dict[str, Callable[[Array, Array], Array]] = {
    "zeros": where(lambda a, bt: True, np.zeros_like),
    "from_500_rows": where(lambda a, bt: a.shape[1] >= 500, last_row_lost),
    "flat": where(lambda a, bt: (a.shape[1], bt.shape[1], a.shape[2]) == (257, 1152, 384), last_row_lost),
    "narrow": where(lambda a, bt: bt.shape[1] <= 8, last_row_lost),
    "batches": where(lambda a, bt: len(a) > 1, lambda product: product[::-1]),
    "large_values": where(lambda a, bt: np.abs(a).max() > 65504, last_row_lost),
    "one_nan": where(lambda a, bt: a.shape[1] == 31, one_nan),
    "half_precision": half,
    "a_term_lost": lambda a, bt: multiply_numpy(a[:, :, :-1], bt[:, :, :-1]),
    "another_shape": lambda a, bt: multiply_numpy(bt, a),
    "raises": lambda a, bt: multiply_numpy(a, bt[:, :, 1:]),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_wrong_kernel_is_found_and_not_used(fault: str) -> None:
    assert first_fault(FAULTY[fault])
    kernel = fastest_kernel({"native-numpy": multiply_numpy, "native-torch": FAULTY[fault]})
    assert kernel.name == "native-numpy"
    assert kernel.note.startswith("native-torch not used: wrong product ")


def test_without_a_right_kernel_nothing_is_volunteered() -> None:
    with pytest.raises(VolunteerEnded, match="no kernel here multiplies right: native-numpy not used: wrong product"):
        fastest_kernel({"native-numpy": FAULTY["zeros"]})


def test_the_kernels_of_this_machine_are_right_and_the_faster_one_is_taken() -> None:
    kernels = installed_kernels()
    assert set(kernels) == {"native-numpy", "native-torch"}
    assert [first_fault(multiply) for multiply in kernels.values()] == ["", ""]
    kernel = fastest_kernel(kernels)
    assert kernel.name in kernels and kernel.flops > 1e8 and kernel.note == ""

    def slow(a: Array, bt: Array) -> Array:
        for _ in range(20):
            product = multiply_numpy(a, bt)
        return product

    assert fastest_kernel({"native-torch": slow, "native-numpy": multiply_numpy}).name == "native-numpy"


def test_the_shapes_are_those_that_have_failed() -> None:
    sides = {side for _, *rest in SHAPES for side in rest}
    assert {1, 31, 32, 33, 499, 500, 513} <= sides
    assert any(n <= 8 < m for _, m, n, _ in SHAPES) and (1, 257, 1152, 384) in SHAPES


def test_the_status_says_why_a_kernel_is_not_used() -> None:
    state = VolunteerState("connected", "", "d", "otter", "native-numpy", "", 0, 0, 0, {}, 0, 0, 0)
    assert "not used" not in status_text(state)
    told = dataclasses.replace(state, note="native-torch not used: wrong product 1x2x3 by 3x4")
    assert status_text(told).endswith(" | native-torch not used: wrong product 1x2x3 by 3x4")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.booleans(), st.booleans(), st.sampled_from(["f32", "bf16", "f16", "i8"]), st.data(),
)  # fmt: skip
def test_any_lease_is_the_sum_that_the_protocol_says(
    batch: int, m: int, n: int, ks: list[int], a_by_k: bool, b_by_k: bool, dtype: Dtype, data: st.DataObject
) -> None:
    draw = np.random.default_rng(len(ks) * m + n)
    panels: dict[str, Held] = {}
    values: dict[str, np.ndarray[Any, Any]] = {}
    terms = []
    expected = np.zeros((batch, m, n))
    for number, k in enumerate(ks):
        term: dict[str, Any] = {"k": k}
        for side, lines, by_k in (("a", m, a_by_k), ("b", n, b_by_k)):
            row, column = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, 1, 128, 130]))
            height, width = (k, lines) if by_k else (lines, k)
            rows, columns = row + batch * height + 1, column + width + 2
            name = f"{side}{number}"
            stored = bytes(panel_of(draw.standard_normal((rows, columns), dtype=np.float32), dtype))
            panels[name] = Held(rows, columns, dtype, memoryview(bytearray(stored)))
            values[name] = panel_floats(stored, rows, columns, dtype).astype(np.float64)
            term |= {side: name, f"{side}_row": row, f"{side}_column": column}
        terms.append(Term(**term))
        t = terms[-1]
        for i in range(batch):  # the formulas of class Term, element by element
            for r in range(m):
                for c in range(n):
                    a = (
                        values[t.a][t.a_row + i * k : t.a_row + i * k + k, t.a_column + r] if a_by_k
                        else values[t.a][t.a_row + i * m + r, t.a_column : t.a_column + k]
                    )  # fmt: skip
                    b = (
                        values[t.b][t.b_row + i * k : t.b_row + i * k + k, t.b_column + c] if b_by_k
                        else values[t.b][t.b_row + i * n + c, t.b_column : t.b_column + k]
                    )  # fmt: skip
                    expected[i, r, c] += a @ b
    lease = Lease(
        lease=1, job="j", batch=batch, m=m, n=n, terms=terms, deadline_s=9.0, a_by_k=a_by_k, b_by_k=b_by_k
    )  # fmt: skip
    task = Task(lease, panels, 1)
    assert flop(task) == 2 * batch * m * n * sum(ks)
    for multiply in installed_kernels().values():
        product, seconds = compute(Kernel("k", multiply, 1.0), task)
        assert product.dtype == np.float32 and product.flags.c_contiguous and seconds > 0
        np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))
