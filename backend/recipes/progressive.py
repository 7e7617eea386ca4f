"""Progressive depth (ProgFed, arXiv 2110.05323): early steps compute and train the first blocks only.

    steps  1 ............................ last, in equal stages
    blocks [1 2 . .]   [1 2 3 .]   [1 2 3 4]          embeddings, norm and head are always there

The idea: the residual stream goes from the last block in use straight to the head, so that a shallow model is a model;
a block that joins adds little at first. What it saves is GEMM FLOP: they are counted, and said in the job's log.
Left out: heads of their own for the early stages, and a warm-up of the learning rate at each one.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from backend.recipes.configs import TransformerConfig
from tileweave.script.task import Task


class Deep(Protocol):
    """A model that computes the first `depth` of its blocks."""

    blocks: nn.ModuleList
    head: nn.Linear
    depth: int


def depth_at(step: int, steps: int, stages: int, layers: int) -> int:
    """Blocks in use at step 1, 2, ... of `steps`; all of them at the last."""
    stage = -(-step * stages // steps)  # 1 ... stages
    return layers * stage // stages


def weights_flop(module: nn.Module, c: TransformerConfig) -> int:
    """2mnk of a step's products with the module's matrices: forward, and backward by the input and by the weight."""
    return 6 * c.batch * c.context * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)


def block_flop(block: nn.Module, c: TransformerConfig) -> int:
    """2mnk of all of a block's products in one step: those of its matrices, and the two of attention, six in all with
    their backward."""
    return weights_flop(block, c) + 6 * 2 * c.batch * c.context**2 * c.width


def grow_in_stages(task: Task, model: Deep, c: TransformerConfig, steps: int) -> None:
    """Has the task's model grow to its full depth in `c.stages` stages."""
    if c.stages == 1:
        return
    block = block_flop(model.blocks[0], c)
    whole = c.layers * block + weights_flop(model.head, c)
    model.depth = 0

    def grow(step: int) -> None:
        depth = depth_at(step, steps, c.stages, c.layers)
        changed = depth != model.depth
        if changed:
            model.depth = depth
            for number, one in enumerate(model.blocks):
                one.requires_grad_(number < depth)
        if changed or step == steps:
            saved = block * sum(c.layers - depth_at(s, steps, c.stages, c.layers) for s in range(1, step + 1))
            print(
                f"step {step}: {depth} of {c.layers} blocks; {saved:.4g} GEMM FLOP saved so far, "
                f"{saved / (whole * step):.1%} of what the whole model takes",
                flush=True,
            )

    task.grow = grow
    task.variant = lambda: model.depth
