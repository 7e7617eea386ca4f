"""Fine-tunes a checkpoint of gpt-bytes or llama by low-rank adapters (arXiv 2106.09685); `python lora.py DATA` by hand.

DATA is the checkpoint, a .safetensors file, and then the text is Python's own library; or a folder that holds one
checkpoint and, beside it, the text. The result is a small safetensors file:

    {layer}.a (rank, in)   {layer}.b (out, rank)       metadata: rank, alpha
    the fine-tuned weight of each layer is its own plus alpha / rank * b a

The idea: the base stays as it is, and only the linear layers get an addition, which starts at zero. What shape the
base has is read off its tensors; how many heads it has is not to be seen there, and has to be told.
Left out: adapters of embeddings and norms, going on from adapters, and models from elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import RECIPES, GptBytesConfig, LlamaConfig, LoraConfig
from backend.recipes.byte_text import FILES_MAX, byte_task, read_data
from backend.recipes.gpt_bytes import Gpt
from backend.recipes.llama import Llama
from tileweave.script import loop
from tileweave.script.run import Run, attach
from tileweave.script.task import Task

WANTED = (
    "lora fine-tunes a model: give as data the .safetensors checkpoint of a gpt-bytes or llama job "
    "(tileweave jobs download), or a folder with one such file and the text beside it"
)


class Adapted(nn.Module):
    """x W^T + alpha / rank * x A^T B^T of a linear layer without bias: W stays, A and B are trained."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight = linear.weight
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(x, self.weight) + self.scale * F.linear(F.linear(x, self.a), self.b)


def find_base(data: str | None) -> tuple[Path, str | None]:
    """The checkpoint, and where the text is (None: Python's own library). Raises ValueError with what is wanted."""
    if data is None:
        raise ValueError(WANTED)
    path = Path(data)
    if path.is_file():
        return path, None
    found = sorted(p for p in islice(path.rglob("*"), FILES_MAX) if p.suffix == ".safetensors")
    if len(found) != 1:
        raise ValueError(f"{path.name} holds {len(found)} .safetensors files, expected was one; {WANTED}")
    return found[0], data


def load_base(path: Path, c: LoraConfig) -> Gpt | Llama:
    """The model whose weights are `model.*` of the file. Raises ValueError where they are of no such model."""
    try:
        weights = {k.removeprefix("model."): v for k, v in load_file(path).items() if k.startswith("model.")}
        model = _empty(weights, c)
        model.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path.name} is no checkpoint of gpt-bytes or llama of {c.heads} heads: {error}") from error
    return model


def _empty(weights: dict[str, Tensor], c: LoraConfig) -> Gpt | Llama:
    """A model of the shape of these weights."""
    width = weights["tokens.weight"].shape[1]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    if "positions.weight" in weights:
        context = len(weights["positions.weight"])
        if c.context > context:
            raise ValueError(f"its context is {context}, less than the {c.context} that are asked for")
        return Gpt(GptBytesConfig(layers=layers, width=width, heads=c.heads, context=context))
    kv_heads = weights["blocks.0.k.weight"].shape[0] * c.heads // width
    return Llama(LlamaConfig(layers=layers, width=width, heads=c.heads, kv_heads=kv_heads, context=c.context))


def adapt(model: nn.Module, c: LoraConfig) -> None:
    """Freezes the model and puts an adapter into each of its linear layers."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapted(module, c.rank, c.alpha))


def save_adapters(model: nn.Module, path: Path, c: LoraConfig) -> None:
    """Writes A and B of each layer, atomically."""
    tensors = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"rank": str(c.rank), "alpha": str(c.alpha)})
    temporary.replace(path)


def lora_task(run: Run, c: LoraConfig) -> Task:
    """The base with its adapters, on the run's text."""
    base, text = find_base(run.data)
    data = read_data(text, without=base)
    model = load_base(base, c)
    torch.manual_seed(c.seed)
    adapt(model, c)
    task = byte_task(model, data, c, run.steps)
    assert task.validate is not None
    with torch.no_grad():
        print(f"{base.name}: loss {task.validate():.4f} on the text held out, before any step", flush=True)
    return task


def train(run: Run, c: LoraConfig) -> Iterator[float]:
    """Trains, reports and writes the adapters at the end; gives the loss of each step."""
    task = lora_task(run, c)
    yield from loop.train(run, task)
    save_adapters(task.model, run.result_path(".safetensors"), c)


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["lora"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, LoraConfig(**run.config)):
        pass
    run.finish(run.result_path(".safetensors"))


if __name__ == "__main__":
    main()
