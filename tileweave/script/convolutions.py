"""Convolutions as GEMMs: im2col, forward and backward; any dimensions, strides, dilations, groups, transposed or not.

The idea: with the windows that the kernel sees laid out as rows ("columns" in the trade; windows (g, N*L, K) here, of g
groups, N batch entries, L places of the kernel, K = channels of a group times kernel elements), a convolution is one
product for each group, and so is each of its gradients:

    y = W windows(x)        dW = dy windows(x)        dx = fold(W^T dy)        fold: adds windows back where they lay

and a transposed convolution is the same with x and dy, y and dx exchanged. A kernel of one element makes windows that
are x itself. Results have torch's memory format: channels-last where an operand has it.
Left out: padding modes other than zeros (torch pads before), and convolutions without a batch (torch adds one).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tileweave.script.calls import Call, Factors, is_plain

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Of windows over one tensor, the larger one: `kernel`, `stride`, `padding`, `dilation` by dimension; `groups`."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def places(self, size: Sequence[int]) -> tuple[int, ...]:
        """How many places the kernel has along each dimension of a tensor of this size."""
        return tuple(
            (s + 2 * p - d * (k - 1) - 1) // stride + 1
            for s, k, stride, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def windows(self, x: Tensor, places: Sequence[int]) -> Tensor:
        """(N, C, *size) -> (g, N*L, C/g * kernel elements)."""
        n, c, *size = x.shape
        dims = len(size)
        padded = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)]) if any(self.padding) else x
        batch, channel, *steps = padded.stride()
        view = padded.as_strided(
            (self.groups, n, *places, c // self.groups, *self.kernel),
            (c // self.groups * channel, batch, *(s * t for s, t in zip(steps, self.stride, strict=True)), channel,
             *(s * d for s, d in zip(steps, self.dilation, strict=True))),
            padded.storage_offset(),
        )  # fmt: skip
        return view.flatten(2 + dims).flatten(1, 1 + dims)

    def fold(self, windows: Tensor, places: Sequence[int], shape: Sequence[int]) -> Tensor:
        """(g, C/g * kernel elements, N*L) -> `shape`, (N, C, *size): each element is added where its window had it."""
        n, c, *size = shape
        parts = windows.view(self.groups, c // self.groups, *self.kernel, n, *places)
        padded_size = [s + 2 * p for s, p in zip(size, self.padding, strict=True)]
        padded = windows.new_zeros(n, self.groups, c // self.groups, *padded_size)
        every = slice(None)
        for at in itertools.product(*(range(k) for k in self.kernel)):
            where = [
                slice(i * d, i * d + (count - 1) * s + 1, s)
                for i, d, count, s in zip(at, self.dilation, places, self.stride, strict=True)
            ]
            window: list[int | slice] = [every, every, *at]
            part = parts[tuple(window)]  # (g, C/g, N, *places)
            padded[(every, every, every, *where)] += part.movedim(2, 0)
        inside = [slice(p, p + s) for s, p in zip(size, self.padding, strict=True)]
        return padded.flatten(1, 2)[(every, every, *inside)]


def _grouped(y: Tensor, groups: int) -> Tensor:
    """(N, C, *places) -> (g, C/g, N*L)."""
    n, c = y.shape[:2]
    return y.reshape(n, groups, c // groups, -1).permute(1, 2, 0, 3).reshape(groups, c // groups, -1)


def _weights(weight: Tensor, groups: int) -> Tensor:
    """(C, C'/g, *kernel) -> (g, C/g, C'/g * kernel elements)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def _format(*tensors: Tensor) -> torch.memory_format:
    """What torch gives a convolution's result: channels-last where an operand is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensors[0].dim(), torch.contiguous_format)
    last = any(t.is_contiguous(memory_format=wanted) and not t.is_contiguous() for t in tensors)
    return wanted if last else torch.contiguous_format


def _placed(value: Tensor, like: Tensor, layout: torch.memory_format) -> Tensor:
    """A copy, always: `value` may be a view of a product, which is only lent."""
    return value.to(like.dtype, memory_format=layout, copy=True)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Call | None:  # fmt: skip
    """aten.convolution: x (N, C, *size), weight (C', C/g, *kernel), transposed (C, C'/g, *kernel)."""
    geometry = _geometry(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if geometry is None or not is_plain(*(t for t in (x, weight, bias) if t is not None)):
        return None
    if bias is not None and bias.shape != (weight.shape[1] * groups if transposed else weight.shape[0],):
        return None
    layout = _format(x, weight)

    def with_bias(y: Tensor) -> Tensor:
        return y if bias is None else y + bias.view(-1, *[1] * (y.dim() - 2))

    if transposed:
        size = [
            (s - 1) * t - 2 * p + d * (k - 1) + o + 1
            for s, t, p, d, k, o in zip(
                x.shape[2:], geometry.stride, geometry.padding, geometry.dilation, geometry.kernel,
                _spread(output_padding, x.dim() - 2), strict=True,
            )
        ]  # fmt: skip
        shape = (x.shape[0], weight.shape[1] * groups, *size)
        if min(shape) < 1:
            return None
        factors = Factors(_weights(weight, groups).transpose(1, 2), _grouped(x, groups).transpose(1, 2))
        return Call((factors,), lambda p: _placed(with_bias(geometry.fold(p[0], x.shape[2:], shape)), x, layout))
    places = geometry.places(x.shape[2:])
    if min(places) < 1:
        return None
    factors = Factors(_weights(weight, groups), geometry.windows(x, places))

    def finish(products: Sequence[Tensor]) -> Tensor:
        y = products[0].view(weight.shape[0], x.shape[0], *places).transpose(0, 1)
        return _placed(with_bias(y), x, layout)

    return Call((factors,), finish)


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Call | None:  # fmt: skip
    """aten.convolution_backward: the gradients of x, weight and bias that `mask` asks for."""
    geometry = _geometry(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if geometry is None or not is_plain(dy, x, weight):
        return None
    large, small = (dy, x) if transposed else (x, dy)
    rows = _grouped(small, groups)  # (g, C'/g, N*L)
    windows = geometry.windows(large, small.shape[2:]) if transposed or mask[1] else None
    factors: list[Factors] = []
    makers: list[Callable[[Tensor], Tensor]] = []
    layout = _format(x, weight)
    if mask[0]:
        if transposed:
            assert windows is not None
            factors.append(Factors(_weights(weight, groups), windows))
            shape = (x.shape[1], x.shape[0], *x.shape[2:])
            makers.append(lambda p: _placed(p.view(shape).transpose(0, 1), x, layout))
        else:
            factors.append(Factors(_weights(weight, groups).transpose(1, 2), rows.transpose(1, 2)))
            makers.append(lambda p: _placed(geometry.fold(p, dy.shape[2:], x.shape), x, layout))
    if mask[1]:
        assert windows is not None
        factors.append(Factors(rows, windows.transpose(1, 2)))
        makers.append(lambda p: _placed(p.view(weight.shape), weight, layout))
    if not factors:
        return None

    def finish(products: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        made = iter([make(product) for make, product in zip(makers, products, strict=True)])
        bias = dy.sum([0, *range(2, dy.dim())]) if mask[2] else None
        return next(made) if mask[0] else None, next(made) if mask[1] else None, bias

    return Call(tuple(factors), finish)


CONVOLUTIONS: dict[Any, Callable[..., Call | None]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}


def _geometry(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int,
) -> _Geometry | None:  # fmt: skip
    """None where torch would refuse it, or there is nothing to compute."""
    dims = x.dim() - 2
    if dims < 1 or weight.dim() != x.dim() or 0 in (*x.shape, *weight.shape) or groups < 1 or weight.shape[0] % groups:
        return None
    if x.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        return None
    kernel = tuple(weight.shape[2:])
    steps, pads, apart = (_spread(value, dims) for value in (stride, padding, dilation))
    extra = _spread(output_padding, dims) if transposed else (0,) * dims
    if min(*steps, *apart) < 1 or min(*pads, *extra) < 0:
        return None
    if any(e >= max(s, d) for e, s, d in zip(extra, steps, apart, strict=True)):
        return None
    return _Geometry(kernel, steps, pads, apart, groups)


def _spread(value: Any, dims: int) -> tuple[int, ...]:
    """torch takes one number for all dimensions too."""
    return tuple(value) * dims if len(value) == 1 else tuple(value)
