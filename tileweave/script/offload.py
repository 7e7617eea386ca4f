"""Offloading: sends every large GEMM of PyTorch operators to a multiplier, by itself or as a TorchDispatchMode.

The idea: an operator is read into products (calls.py, convolutions.py); those of at least `min_gemm_flop` are computed
by the multiplier, everything else runs where it is, as it would without. `Offloader.start` leaves the products under
way, for the graph executor; `OffloadMode` waits for each, so that unmodified PyTorch code runs as ever.
FLOP are counted as 2mnk on both sides, small and odd ones included, so that the offloaded share is honest. Attention,
LSTM and GRU are opaque unless they run inside `math_attention()`.
Left out: torch.compile under the mode, which runs eagerly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tileweave.script.calls import Call, factor_flop, is_product, product_of
from tileweave.script.convolutions import CONVOLUTIONS
from tileweave.script.multiply import Multiplier, Pending

aten = torch.ops.aten

MIN_GEMM_FLOP = 1_000_000
"""Below this a round trip to a device costs more than the product."""

SUMMED_USES = 2
"""Products that each operand of a sum is part of."""

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


@contextmanager
def math_attention() -> Iterator[None]:
    """Attention, LSTM and GRU run as plain GEMMs inside: fused kernels are off in the whole process meanwhile."""
    before = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder in evaluation mode
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch.backends.mha.set_fastpath_enabled(before[1])


@dataclass(frozen=True, slots=True)
class Started:
    """An operator whose products are under way."""

    call: Call
    pending: tuple[Pending, ...]

    def result(self) -> Any:
        """The operator's result; waits for its products. Raises what the multiplier raises."""
        results: list[Any] = []

        def read(products: list[Tensor], left: Sequence[Pending]) -> None:
            if left:
                left[0].read(lambda product: read([*products, product], left[1:]))
            else:
                results.append(self.call.finish(products))

        read([], self.pending)
        return results[0]


class Offloader:
    """Starts operators' products on the multiplier. `flop_offloaded` and `flop_local` count from the start on."""

    def __init__(self, multiplier: Multiplier, min_gemm_flop: int = MIN_GEMM_FLOP) -> None:
        self.multiplier = multiplier
        self.flop_offloaded = 0
        self.flop_local = 0
        self._min_gemm_flop = min_gemm_flop

    def takes(self, func: Any) -> bool:
        """Whether `start` may take this operator."""
        return func in CONVOLUTIONS or is_product(func)

    def start(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: int = 1) -> Started | None:
        """The operator with its products under way; None where it has to run here (`local`). `uses`: see Multiplier."""
        call: Call | None = None
        if func in CONVOLUTIONS:
            call = CONVOLUTIONS[func](*args, **kwargs)
        elif is_product(func):
            call, _ = product_of(func, args, kwargs)
        if call is None or call.flop < self._min_gemm_flop:
            return None
        self.flop_offloaded += call.flop
        return Started(call, tuple(self.multiplier.start([f.a], [f.bt], uses) for f in call.factors))

    def start_sum(self, func: Any, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Started | None:
        """The sum of a matrix product of several pairs of operands of the same shapes, as one product under way; None
        where they have to be computed here."""
        calls = [call for args, kwargs in arguments if (call := product_of(func, args, kwargs)[0]) is not None]
        if len(calls) < len(arguments) or calls[0].flop * len(calls) < self._min_gemm_flop:
            return None
        self.flop_offloaded += sum(call.flop for call in calls)
        (first, *_), factors = calls, [call.factors[0] for call in calls]
        # What is added up was part of other products before: dW = dY^T X.
        pending = self.multiplier.start([f.a for f in factors], [f.bt for f in factors], uses=SUMMED_USES)
        return Started(first, (pending,))

    def local(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operator here, and counts."""
        flop = product_of(func, args, kwargs)[1] if is_product(func) else 0
        result = func(*args, **kwargs)
        if is_product(func):
            self.flop_local += flop
        elif func in _MATRIX_VECTOR:
            first = _MATRIX_VECTOR[func]
            self.flop_local += factor_flop(*args[first : first + 2])
        elif (count := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self.flop_local += int(count(*args, **kwargs, out_val=result))
        return result


class OffloadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with OffloadMode(offloader):` offloads the GEMMs of the thread that entered it, each at once.

    Only of that thread (a dispatch mode is thread-local, and backward passes of CPU tensors run in the calling thread),
    and only in the process that made it: forked DataLoader workers inherit the mode, but compute for themselves.
    Raises what the multiplier raises."""

    def __init__(self, offloader: Offloader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offloader = offloader
        self._process = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator, with the mode itself off."""
        kwargs = kwargs or {}
        if os.getpid() != self._process:
            return func(*args, **kwargs)
        started = self._offloader.start(func, args, kwargs)
        if started is not None:
            return started.result()
        if torch.is_inference_mode_enabled():  # composites (linear, matmul, attention) come whole: take them apart
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._offloader.local(func, args, kwargs)
