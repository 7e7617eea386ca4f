"""Convolutions as GEMMs equal torch's, forward and backward, of any geometry (property tests)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tileweave.script.multiply import Pending, PlainMultiplier, Read
from tileweave.script.offload import Offloader, OffloadMode, math_attention


class Lent(PlainMultiplier):
    """Spoils a product once it was read, as the arena does when the next one takes its place."""

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        pending = super().start(a, bt, uses)

        class Spoiling:
            def read(self, read: Read) -> None:
                def lent(product: Tensor) -> None:
                    read(product)
                    product.fill_(float("nan"))

                pending.read(lent)

        return Spoiling()


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, list[Tensor], dict[str, Any], tuple[bool, ...]]:
    """A function, its tensors (x, weight, and perhaps bias), its settings, and which of the tensors want gradients."""
    dims = draw(st.integers(1, 3))
    groups, n, cin, cout = (draw(st.integers(1, 3)) for _ in range(4))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    given_settings = {
        "stride": [draw(st.integers(1, 3)) for _ in range(dims)],
        "padding": [draw(st.integers(0, 2)) for _ in range(dims)],
        "dilation": [draw(st.integers(1, 2)) for _ in range(dims)],
    }
    size = [draw(st.integers(1 + d * (k - 1), 7)) for d, k in zip(given_settings["dilation"], kernel, strict=True)]
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    transposed = draw(st.booleans())
    shape = (cin * groups, cout, *kernel) if transposed else (cout * groups, cin, *kernel)
    tensors = [torch.randn(n, cin * groups, *size, generator=seed), torch.randn(*shape, generator=seed)]
    if dims in LAST:
        tensors = [t.contiguous(memory_format=LAST[dims]) if draw(st.booleans()) else t for t in tensors]
    if draw(st.booleans()):
        tensors.append(torch.randn(cout * groups, generator=seed))
    if transposed:
        steps = zip(
            given_settings["stride"], given_settings["dilation"], given_settings["padding"], kernel, strict=True
        )
        lengths = [(s, d, (i - 1) * s - 2 * p + d * (k - 1) + 1) for i, (s, d, p, k) in zip(size, steps, strict=True)]
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d, _ in lengths]
        if min(length + e for (_, _, length), e in zip(lengths, extra, strict=True)) < 1:
            given_settings["padding"] = [0] * dims
        given_settings["output_padding"] = extra
    wanted = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
    return (TRANSPOSED if transposed else CONVOLVE)[dims], tensors, given_settings | {"groups": groups}, wanted


def run(function: Any, tensors: list[Tensor], how: dict[str, Any], wanted: tuple[bool, ...]) -> list[Tensor]:
    """The result and the gradients of its weighted sum."""
    leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=False)]
    y = function(*leaves, **how)
    if y.requires_grad:
        weights = torch.arange(y.numel(), dtype=torch.float32).view(y.shape).sin()
        (y * weights).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@settings(deadline=None, max_examples=300)
@given(convolutions())
def test_equals_plain_torch(drawn: tuple[Any, list[Tensor], dict[str, Any], tuple[bool, ...]]) -> None:
    offloader = Offloader(Lent(), min_gemm_flop=1)
    with math_attention():
        plain = run(*drawn)
        with OffloadMode(offloader):
            offloaded = run(*drawn)
    assert offloader.flop_offloaded > 0
    assert offloader.flop_local == 0
    assert len(plain) == len(offloaded)
    for found, expected in zip(offloaded, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if drawn[1][0].is_contiguous() and drawn[1][1].is_contiguous():
        assert [t.stride() for t in offloaded[1:]] == [t.stride() for t in plain[1:]]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_result_has_torchs_memory_format(layout: torch.memory_format) -> None:
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=layout)
    layer = torch.nn.Conv2d(4, 6, 3, padding=1).to(memory_format=layout)
    with math_attention(), torch.no_grad():
        plain = layer(x)
        with OffloadMode(Offloader(Lent(), 1)):
            found = layer(x)
    assert found.stride() == plain.stride()


def test_flop_are_2mnk_of_each_product() -> None:
    offloader = Offloader(Lent(), 1)
    x, weight = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    with math_attention(), OffloadMode(offloader):
        y = F.conv2d(x, weight, groups=2)
        forward = 2 * 2 * (6 * 6) * 6 * (2 * 9)
        assert offloader.flop_offloaded == forward
        y.sum().backward()
    assert offloader.flop_offloaded == 3 * forward


def test_autocast_offloads_its_bfloat16_products() -> None:
    layer, x = torch.nn.Conv2d(4, 6, 3), torch.randn(2, 4, 8, 8)
    offloader = Offloader(Lent(), 1)
    with math_attention(), torch.autocast("cpu", torch.bfloat16):
        plain = layer(x)
        with OffloadMode(offloader):
            found = layer(x)
    assert found.dtype is torch.bfloat16 is plain.dtype
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2)
    assert offloader.flop_local == 0 < offloader.flop_offloaded


X, WEIGHT = torch.ones(2, 3, 9, 9), torch.ones(8, 3, 3, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: F.conv2d(X, torch.ones(8, 4, 3, 3)),
        lambda: F.conv2d(X, WEIGHT, torch.ones(7)),
        lambda: F.conv2d(X, WEIGHT, torch.ones(8, 1)),
        lambda: F.conv2d(X, WEIGHT, stride=0),
        lambda: F.conv2d(X, WEIGHT, padding=-1),
        lambda: F.conv2d(X, WEIGHT, dilation=0),
        lambda: F.conv2d(X, WEIGHT, groups=2),
        lambda: F.conv2d(X[:, :, :2], WEIGHT),
        lambda: F.conv_transpose2d(X, torch.ones(4, 8, 3, 3)),
        lambda: F.conv_transpose2d(X, torch.ones(3, 8, 3, 3), stride=2, output_padding=2),
    ],
)
def test_what_torch_refuses_is_refused_by_torch(wrong: Any) -> None:
    with pytest.raises(RuntimeError) as plain, math_attention():
        wrong()
    with pytest.raises(RuntimeError) as offloaded, math_attention(), OffloadMode(Offloader(Lent(), 1)):
        wrong()
    assert str(offloaded.value) == str(plain.value)
