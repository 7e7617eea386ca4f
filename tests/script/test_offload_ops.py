"""Every operator the mode takes equals plain torch on any shapes, strides, scalings and outputs (property tests)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tileweave.script.multiply import Multiplier, Pending, Read
from tileweave.script.offload import Offloader, OffloadMode

aten = torch.ops.aten
MATRIX = ("mm", "addmm")
BATCHED = ("bmm", "baddbmm", "addbmm")


class Product:
    def __init__(self, product: Tensor) -> None:
        self.product = product

    def read(self, read: Read) -> None:
        read(self.product)
        self.product.fill_(float("nan"))


class NumPyMultiplier:
    """Multiplies with NumPy, out of contiguous copies, and spoils the product once it was read."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int, int]] = []

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Product:
        ((one,), (two,)) = a, bt
        self.shapes.append((one.shape[0], one.shape[1], two.shape[1], one.shape[2]))
        left, right = (x.detach().float().contiguous().numpy() for x in (one, two))
        product = torch.from_numpy(np.matmul(left, right.transpose(0, 2, 1)))
        assert product.is_contiguous()
        return Product(product)

    def finished(self, pending: Collection[Pending], block: bool) -> list[Pending]:
        return list(pending)


class Offloading(OffloadMode):
    """A mode on an offloader of its own, with that one's counts."""

    def __init__(self, multiplier: Multiplier, min_gemm_flop: int = 1) -> None:
        self.counts = Offloader(multiplier, min_gemm_flop)
        super().__init__(self.counts)

    @property
    def flop_offloaded(self) -> int:
        return self.counts.flop_offloaded

    @property
    def flop_local(self) -> int:
        return self.counts.flop_local


def offloading(min_gemm_flop: int = 1) -> tuple[Offloading, NumPyMultiplier]:
    multiplier = NumPyMultiplier()
    return Offloading(multiplier, min_gemm_flop), multiplier


def strided(draw: st.DrawFn, shape: tuple[int, ...], seed: torch.Generator) -> Tensor:
    """A tensor of this shape in one of the layouts that training code makes."""
    kind = draw(st.sampled_from(["contiguous", "transposed", "permuted", "offset", "step", "expanded"]))
    if kind == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=seed).transpose(-1, -2)
    if kind == "permuted":
        return torch.randn(*shape[::-1], generator=seed).permute(*reversed(range(len(shape))))
    if kind == "offset":
        return torch.randn(*(s + 3 for s in shape), generator=seed)[tuple(slice(2, 2 + s) for s in shape)]
    if kind == "step":
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=seed)[..., ::2]
    if kind == "expanded":
        axis = draw(st.integers(0, len(shape) - 1))
        return torch.randn(*(1 if i == axis else s for i, s in enumerate(shape)), generator=seed).expand(shape)
    return torch.randn(*shape, generator=seed)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, list[Tensor], dict[str, float], Tensor]:
    """An operator, the form to call it in, its tensors, its scalings, and memory for the result."""
    name = draw(st.sampled_from(MATRIX + BATCHED))
    form = draw(st.sampled_from(["default", "out", "in place"]))
    batch, m, n, k = (draw(st.integers(1, 9)) for _ in range(4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lead = (batch,) if name in BATCHED else ()
    result = (*lead, m, n) if name != "addbmm" else (m, n)
    tensors = [strided(draw, (*lead, m, k), seed), strided(draw, (*lead, k, n), seed)]
    scalings = {}
    if name.startswith(("add", "badd")):
        scalings = {key: draw(st.sampled_from([1, 0, 0.5, -2, 3])) for key in ("beta", "alpha")}
        kept = draw(st.integers(0, len(result)))  # leading dimensions that broadcast
        base = (
            strided(draw, result, seed) if len(result) > 1 and kept == 0 else torch.randn(result[kept:], generator=seed)
        )
        if form == "in place":
            base = strided(draw, result, seed).clone()
            if draw(st.booleans()):
                base = torch.randn(result[::-1], generator=seed).permute(*reversed(range(len(result))))
        if scalings["beta"] == 0:
            base = torch.full_like(base, float("nan"))  # must not show
        tensors.insert(0, base)
    elif form == "in place":
        form = "default"
    out = torch.full(result[::-1], 7.0).permute(*reversed(range(len(result))))  # not contiguous
    return name, form, tensors, scalings, out


def call(name: str, form: str, tensors: list[Tensor], scalings: dict[str, float], out: Tensor) -> Tensor:
    """Calls on copies with the same strides, so that it can be repeated."""
    if form == "in place":
        base = tensors[0].clone(memory_format=torch.preserve_format)
        result: Tensor = getattr(base, name + "_")(*tensors[1:], **scalings)
        assert result is base
        return result
    if form == "out":
        into = out.clone(memory_format=torch.preserve_format)
        result = getattr(torch, name)(*tensors, **scalings, out=into)
        assert result is into
        return result
    return getattr(torch, name)(*tensors, **scalings)  # type: ignore[no-any-return]


@settings(deadline=None, max_examples=300)
@given(calls())
def test_equals_plain_torch(drawn: tuple[str, str, list[Tensor], dict[str, float], Tensor]) -> None:
    _, _, tensors, scalings, _ = drawn
    plain = call(*drawn)
    mode, multiplier = offloading()
    with mode:
        offloaded = call(*drawn)
    torch.testing.assert_close(offloaded, plain, rtol=1e-5, atol=2e-5)
    assert offloaded.stride() == plain.stride()
    left, right = tensors[-2:]
    flop = 2 * left.numel() * right.shape[-1]
    if scalings.get("alpha") == 0:  # torch then ignores the factors: no work for anybody else
        assert multiplier.shapes == []
        assert (mode.flop_offloaded, mode.flop_local) == (0, flop)
    else:
        assert len(multiplier.shapes) == 1
        assert (mode.flop_offloaded, mode.flop_local) == (flop, 0)


def test_sizes_and_types_that_stay_at_home_are_counted_and_right() -> None:
    eye = torch.eye(4)
    cases: list[tuple[Callable[[], Tensor], int]] = [
        (lambda: eye.double() @ eye.double(), 128),
        (lambda: torch.complex(eye, eye) @ torch.complex(eye, eye), 128),
        (lambda: eye.long() @ eye.long(), 128),
        (lambda: eye.to_sparse() @ eye, 128),
        (lambda: torch.zeros(0, 4) @ eye, 0),
        (lambda: torch.zeros(4, 0) @ torch.zeros(0, 4), 0),
        (lambda: eye @ torch.ones(4), 32),
        (lambda: torch.dot(torch.ones(4), torch.ones(4)), 8),
        (lambda: torch.addmv(torch.ones(4), eye, torch.ones(4)), 32),
        (lambda: torch.nn.functional.conv2d(*(torch.ones(1, 2, 5, 5).double(),) * 2), 2 * 2 * 25),
    ]
    for number, (case, flop) in enumerate(cases):
        plain = case()
        mode, multiplier = offloading()
        with mode:
            result = case()
        torch.testing.assert_close(result, plain, msg=f"case {number}")
        assert multiplier.shapes == [], number
        assert (mode.flop_offloaded, mode.flop_local) == (0, flop), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    seed = torch.Generator().manual_seed(1)
    a, b, base = (torch.randn(32, 32, generator=seed).to(dtype) for _ in range(3))
    mode, multiplier = offloading()
    with mode:
        found = [a @ b, torch.addmm(base, a, b, beta=0.5, alpha=2)]
    exact = [a.float() @ b.float(), 0.5 * base.float() + 2 * (a.float() @ b.float())]
    for result, expected in zip(found, exact, strict=True):
        assert result.dtype is dtype
        torch.testing.assert_close(result, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert len(multiplier.shapes) == 2
    with mode:
        assert (a @ b.to(torch.bfloat16)).dtype is torch.bfloat16 if dtype is torch.bfloat16 else True


@pytest.mark.parametrize(
    "lazy", [lambda: torch.complex(torch.eye(4), torch.eye(4)).conj().imag, lambda: torch._efficientzerotensor(4, 4)]
)
def test_lazily_negated_and_zero_tensors_are_what_they_stand_for(lazy: Callable[[], Tensor]) -> None:
    other = torch.arange(16.0).view(4, 4)
    mode, _ = offloading()
    with mode:
        result = lazy() @ other
    torch.testing.assert_close(result, lazy() @ other)


def test_fake_and_meta_tensors_stay_fake() -> None:
    mode, multiplier = offloading()
    with mode:
        assert (torch.ones(4, 4, device="meta") @ torch.ones(4, 4, device="meta")).device.type == "meta"
        with torch._subclasses.FakeTensorMode():
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).shape == (4, 4)
    assert multiplier.shapes == []


def test_the_minimum_is_inclusive() -> None:
    mode, multiplier = offloading(min_gemm_flop=128)
    with mode:
        torch.ones(4, 4) @ torch.ones(4, 4)  # 128 FLOP
        torch.ones(4, 4) @ torch.ones(4, 3)  # 96
    assert multiplier.shapes == [(1, 4, 4, 4)]
    assert (mode.flop_offloaded, mode.flop_local) == (128, 96)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
        lambda: torch.bmm(torch.ones(2, 2, 3), torch.ones(3, 3, 2)),
        lambda: torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 2)),
        lambda: torch.ones(2, 1).addmm_(torch.ones(2, 3), torch.ones(3, 2)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(2, 2, dtype=torch.float64)),
    ],
)
def test_wrong_shapes_raise_what_torch_raises(wrong: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError) as plain:
        wrong()
    mode, _ = offloading()
    with mode, pytest.raises(RuntimeError) as offloaded:
        wrong()
    assert str(offloaded.value) == str(plain.value)


def test_an_empty_out_is_resized_as_ever() -> None:
    mode, _ = offloading()
    out = torch.empty(0)
    with mode:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=out)
    assert out.tolist() == [[3, 3], [3, 3]]


def test_inference_mode_is_taken_apart_into_gemms() -> None:
    layer, x = torch.nn.Linear(8, 5), torch.randn(2, 3, 8)
    q = torch.randn(2, 2, 6, 4)
    with torch.inference_mode():
        plain = [layer(x), x @ torch.ones(8, 4), torch.einsum("bij,bkj->bik", x, x)]
        mode, multiplier = offloading()
        with mode:
            offloaded = [layer(x), x @ torch.ones(8, 4), torch.einsum("bij,bkj->bik", x, x)]
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for result, expected in zip(offloaded, plain, strict=True):
        torch.testing.assert_close(result, expected)
    assert [flop for b, m, n, k in multiplier.shapes[:3] if (flop := 2 * b * m * n * k)] == [480, 384, 288]


def test_a_forked_child_computes_for_itself() -> None:
    mode, multiplier = offloading()
    with mode:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            right = bool((torch.eye(4) @ torch.eye(4) == torch.eye(4)).all())
            os._exit(0 if right and not multiplier.shapes else 1)
        assert os.waitpid(child, 0)[1] == 0
        torch.eye(4) @ torch.eye(4)
    assert len(multiplier.shapes) == 1


def test_other_threads_are_not_offloaded() -> None:
    mode, multiplier = offloading()
    with mode:
        thread = threading.Thread(target=lambda: torch.eye(4) @ torch.eye(4))
        thread.start()
        thread.join()
    assert multiplier.shapes == []


def test_the_multipliers_error_comes_through_a_backward_pass_unchanged() -> None:
    class Cancelled(SystemExit):
        pass

    class Failing:
        def start(self, a: Any, bt: Any, uses: int = 1) -> Any:
            raise Cancelled(3)

        def finished(self, pending: Any, block: bool) -> Any:
            raise AssertionError("nothing was started")

    x = torch.ones(4, 4, requires_grad=True)
    loss = (x @ x).sum()
    with Offloading(Failing()), pytest.raises(Cancelled) as caught:
        loss.backward()
    assert caught.value.code == 3
