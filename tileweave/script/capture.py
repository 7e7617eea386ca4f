"""Capture: the loss function of a task and its gradients as one graph of aten operators, before anything is computed.

The idea: the model is called as a function of its parameters and buffers, under fake tensors (shapes without numbers),
and autograd runs there too, so that `make_fx` sees forward and backward as one stream of operators: no weights in
memory, a second or two for a billion parameters. Attention is captured as plain GEMMs. Where the model changes
something in place (a ReLU, BatchNorm's running statistics) a second pass undoes that, but for `copy_` onto inputs.
Left out: symbolic shapes (a batch of another shape is captured anew) and branches on values, which cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tileweave.script.offload import math_attention
from tileweave.script.task import Batch

_Place = tuple[dict[str, Any], str]


class CaptureError(RuntimeError):
    """The loss function cannot be captured; the message says at what, and what to do."""


@dataclass(frozen=True, slots=True)
class Captured:
    """`graph` maps parameters that train, other parameters and buffers, then the batch, to (loss, one gradient for each
    parameter, or None where the loss does not depend on it)."""

    graph: fx.GraphModule
    trained: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


@contextmanager
def _standing_in(places: Sequence[_Place], tensors: dict[int, Tensor]) -> Iterator[None]:
    """The model with other tensors in the places of its own; `tensors` by the id of what they stand for."""
    own = [holder[name] for holder, name in places]
    try:
        for (holder, name), tensor in zip(places, own, strict=True):
            holder[name] = tensors[id(tensor)]
        yield
        for (holder, name), tensor in zip(places, own, strict=True):
            if holder[name] is not tensors[id(tensor)]:
                raise CaptureError(f"the loss function replaces the model's {name}: use the eager executor")
    finally:
        for (holder, name), tensor in zip(places, own, strict=True):
            holder[name] = tensor


def _places(model: nn.Module) -> list[_Place]:
    """Where the model keeps its parameters and buffers; each once, however often a module is used."""
    holders: list[dict[str, Any]] = [held for m in model.modules() for held in (m._parameters, m._buffers)]
    return [(holder, name) for holder in holders for name, tensor in holder.items() if tensor is not None]


def _check(trained: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Raises CaptureError where a graph would not do what PyTorch does."""
    for p in trained:
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                "a parameter has a hook on its gradient, which a graph would not call: use the eager executor"
            )
    spans = sorted(_span(t) for t in (*trained, *others) if t.numel())
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise CaptureError("parameters or buffers of the model share memory in part: use the eager executor")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def capture(model: nn.Module, loss: Callable[..., Tensor], batch: Batch) -> Captured:
    """The graph of `loss(model, *batch)` and its gradients. Raises CaptureError."""
    places = _places(model)
    every = {id(tensor := holder[name]): tensor for holder, name in places}
    trained = [t for t in every.values() if t.requires_grad]
    others = [t for t in every.values() if not t.requires_grad]
    _check(trained, others)

    def joint(parameters: Sequence[Tensor], rest: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        leaves = [p.detach().requires_grad_() for p in parameters]
        named = dict(zip(map(id, (*trained, *others)), (*leaves, *rest), strict=True))
        with _standing_in(places, named):
            value = loss(model, *inputs)
            if value.numel() != 1:
                raise CaptureError(f"the loss has the shape {tuple(value.shape)}, expected was one number")
            gradients = torch.autograd.grad(value.reshape(()), leaves, allow_unused=True)
        return [value.detach(), *gradients]

    arguments = [t.detach() for t in trained], [t.detach() for t in others], list(batch)
    try:
        with math_attention():
            graph = make_fx(joint, tracing_mode="fake")(*arguments)
            if any(_mutates(node) for node in graph.graph.nodes):
                functional = torch.func.functionalize(graph, remove="mutations")
                graph = make_fx(functional, tracing_mode="fake")(*arguments)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}: the loss function cannot be "
            "captured as a graph (it may branch on values, say, or call .item()): use the eager executor"
        ) from error
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if _mutates(node) and not (node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"):
            raise CaptureError(f"{node.target} changes its argument in place: use the eager executor")
    return Captured(graph, tuple(trained), tuple(others))


def _mutates(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)
