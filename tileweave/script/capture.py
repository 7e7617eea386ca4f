"""Capture: the loss function of a task and its gradients as one graph of aten operators, before anything is computed.

The idea: the model is called as a function of its parameters and buffers, under fake tensors (shapes without numbers),
and autograd runs there too, so that `make_fx` sees forward and backward as one stream of operators: no weights in
memory, a second or two for a billion parameters. Attention is captured as plain GEMMs. Where the model changes
something in place (a ReLU, BatchNorm's running statistics) a second pass undoes that, but for `copy_` onto inputs.
Left out: symbolic shapes (a batch of another shape is captured anew) and branches on values, which cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tileweave.script.offload import math_attention
from tileweave.script.task import Batch


class CaptureError(RuntimeError):
    """The loss function cannot be captured; the message says at what, and what to do."""


@dataclass(frozen=True, slots=True)
class Captured:
    """`graph` maps parameters that train, other parameters and buffers, then the batch, to (loss, one gradient for each
    parameter, or None where the loss does not depend on it)."""

    graph: fx.GraphModule
    trained: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


class _Loss(nn.Module):
    """The loss function as a module, so that `functional_call` can exchange the model's tensors."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, *batch)


def capture(model: nn.Module, loss: Callable[..., Tensor], batch: Batch) -> Captured:
    """The graph of `loss(model, *batch)` and its gradients. Raises CaptureError."""
    holder = _Loss(model, loss)
    trained = {name: p for name, p in holder.named_parameters() if p.requires_grad}
    others = {name: p for name, p in holder.named_parameters() if not p.requires_grad} | dict(holder.named_buffers())

    def joint(parameters: Sequence[Tensor], rest: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        leaves = [p.detach().requires_grad_() for p in parameters]
        named = dict(zip(trained, leaves, strict=True)) | dict(zip(others, rest, strict=True))
        value = torch.func.functional_call(holder, named, tuple(inputs))
        if value.numel() != 1:
            raise CaptureError(f"the loss has the shape {tuple(value.shape)}, expected was one number")
        return [value.detach(), *torch.autograd.grad(value.reshape(()), leaves, allow_unused=True)]

    arguments = [p.detach() for p in trained.values()], [p.detach() for p in others.values()], list(batch)
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
            "captured as a graph (does it branch on values, or call .item()?): use the eager executor"
        ) from error
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if _mutates(node) and not (node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"):
            raise CaptureError(f"{node.target} changes its argument in place: use the eager executor")
    return Captured(graph, tuple(trained.values()), tuple(others.values()))


def _mutates(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)
