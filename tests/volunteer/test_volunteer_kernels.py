"""A native volunteer proves its kernels before it joins: one that is wrong is not used, and the reason is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tileweave.volunteer.compute import fastest_kernel, installed_kernels, multiply_numpy
from tileweave.volunteer.errors import VolunteerEnded
from tileweave.volunteer.main import status_text
from tileweave.volunteer.net import VolunteerState
from tileweave.volunteer.prove import SHAPES, first_fault

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
