"""`torch.compile(model, backend="tileweave")`: the GEMMs of a compiled model go to the job's devices.

The idea: Dynamo finds the backend by an entry point of this package, so the script imports nothing of ours. AOTAutograd
takes what Dynamo captured apart into a forward and a backward graph of aten operators; each is run by its data, as the
graph executor does (graph.py). Under a job the products go to its coordinator; by hand they are computed here.
Left out: choosing what to compile; whatever Dynamo leaves to Python runs here, and is not offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tileweave.script.graph import run
from tileweave.script.offload import math_attention
from tileweave.script.program import Instance, Program
from tileweave.script.run import attach


def tileweave(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A Dynamo backend: the callable that computes `module`."""
    with math_attention():
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=_compile, bw_compiler=_compile)(module, inputs)
    return compiled


def _compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs one graph of aten operators."""
    program = Program(module)

    def call(*given: Any) -> list[Any]:
        instance = Instance(program, given)
        with torch.no_grad(), math_attention():
            run([instance], attach().offloader)
        return [instance.result(number) for number in range(len(program.results))]

    boxed: Callable[..., Any] = make_boxed_func(call)
    return boxed
