"""An operator as GEMMs: the matrix products that aten operators are, read into one form.

The idea: below autograd a training step is a stream of aten operators, and nearly all its FLOP are in a handful of them
(mm, addmm, bmm, baddbmm, addbmm, with their out= and in-place forms, and convolutions: convolutions.py). Each becomes a
`Call`: products C_i = A_i B_i to be computed by whoever, and what makes the operator's result of them,

    out[i] = beta * base[i] + alpha * A[i] B[i]          i < batch, A: (batch, m, k), B^T: (batch, n, k)

Operands of bfloat16 and float16 are multiplied as float32 and the result is rounded once, as torch does on a CPU.
What does not fit (other dtypes, devices, layouts, tensor subclasses, empty products, shapes that torch would refuse)
is no call: it runs where it is. Left out: matrix times vector, whose operands cost more to send than it to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Factors:
    """The operands of C_i = A_i B_i: A (batch, m, k) and B^T (batch, n, k)."""

    a: Tensor
    bt: Tensor

    @property
    def flop(self) -> int:
        """2mnk for each batch entry."""
        batch, m, k = self.a.shape
        return 2 * batch * m * self.bt.shape[1] * k


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's products, and `finish`, which gets them in order as (batch, m, n) float32, lent for the call only,
    and gives the operator's result."""

    factors: tuple[Factors, ...]
    finish: Callable[[Sequence[Tensor]], Any]

    @property
    def flop(self) -> int:
        """Of all its products."""
        return sum(factors.flop for factors in self.factors)


_Shape = tuple[int, ...]


def _matrices(left: Tensor, right: Tensor) -> tuple[Factors, _Shape]:
    return Factors(left.unsqueeze(0), right.t().unsqueeze(0)), (left.shape[0], right.shape[1])


def _batches(left: Tensor, right: Tensor) -> tuple[Factors, _Shape]:
    return Factors(left, right.transpose(1, 2)), (left.shape[0], left.shape[1], right.shape[2])


def _summed_batches(left: Tensor, right: Tensor) -> tuple[Factors, _Shape]:
    """A sum of products over the batch is one product with a batch times longer k."""
    batch, m, k = left.shape
    n = right.shape[2]
    a = left.transpose(0, 1).reshape(1, m, batch * k)
    return Factors(a, right.permute(2, 0, 1).reshape(1, n, batch * k)), (m, n)


@dataclass(frozen=True, slots=True)
class _Form:
    """How to read an operator's arguments: rank of both factors, whether a base comes first, whether it is the out."""

    rank: int
    has_base: bool
    in_place: bool
    read: Callable[[Tensor, Tensor], tuple[Factors, _Shape]]


_FORMS: dict[Any, _Form] = {
    aten.mm.default: _Form(2, False, False, _matrices),
    aten.mm.out: _Form(2, False, False, _matrices),
    aten.bmm.default: _Form(3, False, False, _batches),
    aten.bmm.out: _Form(3, False, False, _batches),
    aten.addmm.default: _Form(2, True, False, _matrices),
    aten.addmm.out: _Form(2, True, False, _matrices),
    aten.addmm_.default: _Form(2, True, True, _matrices),
    aten.baddbmm.default: _Form(3, True, False, _batches),
    aten.baddbmm.out: _Form(3, True, False, _batches),
    aten.baddbmm_.default: _Form(3, True, True, _batches),
    aten.addbmm.default: _Form(3, True, False, _summed_batches),
    aten.addbmm.out: _Form(3, True, False, _summed_batches),
    aten.addbmm_.default: _Form(3, True, True, _summed_batches),
}


def is_plain(*tensors: Any) -> bool:
    """All CPU tensors of one of DTYPES, strided, in memory of their own. (Lazily negated ones never get here.)"""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype in DTYPES
        and tensor.dtype is tensors[0].dtype
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        for tensor in tensors
    )


def is_product(func: Any) -> bool:
    """Is the operator one of the matrix products above?"""
    return func in _FORMS


def factors_of(func: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """A matrix product's two factors among its arguments."""
    first = _FORMS[func].has_base
    return args[first], args[first + 1]


def product_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, int]:
    """A matrix product as a Call, None where it has to run where it is; and its 2mnk."""
    form = _FORMS[func]
    left, right = factors_of(func, args)
    call = _read(form, args, kwargs, left, right)
    return call, factor_flop(left, right) if call is None else call.flop


def factor_flop(left: Tensor, right: Tensor) -> int:
    """2mnk of a product of matrices (batches of them), or 2mk where `right` is a vector."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _read(form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any], left: Any, right: Any) -> Call | None:
    base = args[0] if form.has_base else None
    out = base if form.in_place else kwargs.get("out")
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if not is_plain(*(t for t in (left, right, base, out) if t is not None)):
        return None
    if left.dim() != form.rank or right.dim() != form.rank or left.shape[-1] != right.shape[-2]:
        return None
    if form.rank == 3 and left.shape[0] != right.shape[0]:
        return None
    if alpha == 0 or left.numel() == 0 or right.numel() == 0:
        return None
    factors, shape = form.read(left, right)
    if out is not None and tuple(out.shape) != shape:
        return None
    if base is not None and not _broadcasts(base.shape, shape):
        return None

    def finish(products: Sequence[Tensor]) -> Tensor:
        result: Tensor = out if out is not None else left.new_empty(shape)
        _scale_and_add(products[0].view(shape), None if beta == 0 else base, beta, alpha, result)
        return result

    return Call((factors,), finish)


def _scale_and_add(product: Tensor, base: Tensor | None, beta: Any, alpha: Any, result: Tensor) -> None:
    """result = beta * base + alpha * product, in float32, rounded to the result's dtype at the end."""
    if base is None:
        result.copy_(product * alpha if alpha != 1 else product)
        return
    scaled = base.float() if beta == 1 else base.float() * beta
    if result.dtype is torch.float32:
        torch.add(scaled, product, alpha=alpha, out=result)
    else:
        result.copy_(torch.add(scaled, product, alpha=alpha))


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    return len(shape) <= len(target) and all(s in (1, t) for s, t in zip(shape[::-1], target[::-1], strict=False))
