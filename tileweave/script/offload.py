"""The offload mode: a TorchDispatchMode that sends every large float32 GEMM of unmodified PyTorch code to a multiplier.

The idea: below autograd a training step is a stream of aten operators, and nearly all its FLOP are in a handful of them
(mm, addmm, bmm, baddbmm, addbmm, with their out= and in-place forms). Each is brought to one form,

    out[i] = beta * base[i] + alpha * A[i] B[i]          i < batch, A: (batch, m, k), B^T: (batch, n, k)

whose product the multiplier computes; scaling and adding happen here while the product is copied out. Everything else
runs as it would without the mode: other dtypes, devices, layouts, tensor subclasses, empty products, anything whose
shapes do not fit (torch then raises its own error), and GEMMs below `min_gemm_flop`.
FLOP are counted as 2mnk on both sides, small and odd ones and convolutions included, so that the offloaded share is
honest. Attention is opaque to the mode unless it runs inside `math_attention()`.
Left out: convolutions as GEMMs, low precision, and torch.compile (which runs eagerly under an active mode).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tileweave.script.multiply import Multiplier

aten = torch.ops.aten

MIN_GEMM_FLOP = 1_000_000
"""Below this a round trip to a device costs more than the product."""


@contextmanager
def math_attention() -> Iterator[None]:
    """Attention, LSTM and GRU run as plain GEMMs inside: fused kernels are off in the whole process meanwhile."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@dataclass(frozen=True, slots=True)
class Gemm:
    """One operator in the form above; `shape` is that of the result, `out` where it goes if the caller said."""

    a: Tensor  # (batch, m, k)
    bt: Tensor  # (batch, n, k)
    shape: tuple[int, ...]
    base: Tensor | None
    beta: Any
    alpha: Any
    out: Tensor | None

    @property
    def flop(self) -> int:
        """2mnk for each batch entry."""
        batch, m, k = self.a.shape
        return 2 * batch * m * self.bt.shape[1] * k


def _matrices(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    return left.unsqueeze(0), right.t().unsqueeze(0), (left.shape[0], right.shape[1])


def _batches(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    return left, right.transpose(1, 2), (left.shape[0], left.shape[1], right.shape[2])


def _summed_batches(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """A sum of products over the batch is one product with a batch times longer k."""
    batch, m, k = left.shape
    n = right.shape[2]
    a = left.transpose(0, 1).reshape(1, m, batch * k)
    return a, right.permute(2, 0, 1).reshape(1, n, batch * k), (m, n)


@dataclass(frozen=True, slots=True)
class _Form:
    """How to read an operator's arguments: rank of both factors, whether a base comes first, whether it is the out."""

    rank: int
    has_base: bool
    in_place: bool
    factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, tuple[int, ...]]]


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

_MATRIX_VECTOR: dict[Any, int] = {
    aten.mv.default: 0,
    aten.mv.out: 0,
    aten.addmv.default: 1,
    aten.addmv.out: 1,
    aten.addmv_.default: 1,
    aten.dot.default: 0,
    aten.dot.out: 0,
    aten.vdot.default: 0,
    aten._addmm_activation.default: 1,
}
"""Further local products, and which argument is their first factor; the second follows it."""


def _is_plain(tensor: Any) -> bool:
    """A float32 CPU tensor of its own memory: strided. (Lazily negated and zero tensors never get here.)"""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    return len(shape) <= len(target) and all(s in (1, t) for s, t in zip(shape[::-1], target[::-1], strict=False))


def _read(form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gemm | None:
    """The operator as a Gemm, or None where it has to run locally."""
    base = args[0] if form.has_base else None
    left, right = args[form.has_base : form.has_base + 2]
    out = base if form.in_place else kwargs.get("out")
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if not all(_is_plain(t) for t in (base, left, right, out) if t is not None):
        return None
    if left.dim() != form.rank or right.dim() != form.rank or left.shape[-1] != right.shape[-2]:
        return None
    if form.rank == 3 and left.shape[0] != right.shape[0]:
        return None
    if alpha == 0 or left.numel() == 0 or right.numel() == 0:
        return None
    a, bt, shape = form.factors(left, right)
    if out is not None and tuple(out.shape) != shape:
        return None
    if base is not None and not _broadcasts(base.shape, shape):
        return None
    return Gemm(a, bt, shape, None if beta == 0 else base, beta, alpha, out)


class OffloadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with OffloadMode(multiplier):` offloads the GEMMs of the thread that entered it.

    Only of that thread (a dispatch mode is thread-local, and backward passes of CPU tensors run in the calling thread),
    and only in the process that made it: forked DataLoader workers inherit the mode, but compute for themselves.
    `flop_offloaded` and `flop_local` count from the start on. Raises what the multiplier raises."""

    def __init__(self, multiplier: Multiplier, min_gemm_flop: int = MIN_GEMM_FLOP) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._multiplier = multiplier
        self._min_gemm_flop = min_gemm_flop
        self._process = os.getpid()
        self.flop_offloaded = 0
        self.flop_local = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator, with the mode itself off."""
        kwargs = kwargs or {}
        if os.getpid() != self._process:
            return func(*args, **kwargs)
        form = _FORMS.get(func)
        if form is None:
            return self._other(func, args, kwargs)
        gemm = _read(form, args, kwargs)
        if gemm is not None and gemm.flop >= self._min_gemm_flop:
            return self._offload(gemm)
        factors = args[form.has_base : form.has_base + 2]
        self.flop_local += _factor_flop(*factors)
        return func(*args, **kwargs)

    def _offload(self, gemm: Gemm) -> Tensor:
        result = gemm.out if gemm.out is not None else gemm.a.new_empty(gemm.shape)

        def read(product: Tensor) -> None:
            product = product.view(gemm.shape)
            if gemm.base is None:
                torch.mul(product, gemm.alpha, out=result) if gemm.alpha != 1 else result.copy_(product)
            else:
                base = gemm.base if gemm.beta == 1 else gemm.base * gemm.beta
                torch.add(base, product, alpha=gemm.alpha, out=result)

        self._multiplier.multiply(gemm.a, gemm.bt, read)
        self.flop_offloaded += gemm.flop
        return result

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other operator. In inference mode composites (linear, matmul, attention) come whole: take them apart."""
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if func in _MATRIX_VECTOR:
            first = _MATRIX_VECTOR[func]
            self.flop_local += _factor_flop(*args[first : first + 2])
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flop_local += int(count(*args, **kwargs, out_val=result))
        return result


def _factor_flop(left: Tensor, right: Tensor) -> int:
    """2mnk of a product of matrices (batches of them), or 2mk where `right` is a vector."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
