"""A small GPT over bytes, trained on volunteers' devices; `python gpt_bytes.py [data]` trains it alone in this process.

The idea: a training loop as anyone would write it. What is Tileweave's are attach(), run.steps_left(), run.offload(),
run.step() and run.finish(). Batch number i is drawn from (seed, i) alone, so the place in the data is one number.
Left out: dropout (200 steps see no byte twice), tied weights, mixed precision, gradient accumulation.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import RECIPES, GptBytesConfig
from tileweave.script.checkpoint import TrainState
from tileweave.script.run import Run, attach

VOCABULARY = 256
DATA_BYTES_MAX = 8 << 20  # of the data that is read: more than a demo gets through
FILES_MAX = 100_000
VALIDATION_SHARE = 0.05  # the tail, never trained on
VALIDATION_BATCHES = 8
PROMPT = b"\ndef "


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c: GptBytesConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.proj = nn.Linear(c.width, c.width, bias=False)
        self.up = nn.Linear(c.width, 4 * c.width, bias=False)
        self.down = nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x))  # (B, T, 3C)
        q, k, v = qkv.view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)  # each (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C/H)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))  # (B, T, C)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))  # (B, T, C)
        return out


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, c: GptBytesConfig) -> None:
        super().__init__()
        self.context = c.context
        self.tokens = nn.Embedding(VOCABULARY, c.width)
        self.positions = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))  # GPT-2: the sum over layers keeps its size
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * c.layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T)
        """(B, T) bytes -> (B, T, 256) logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # (B, T, 256)
        return logits


def read_data(path: str | None) -> Tensor:
    """The text as (N,) uint8: a file, a folder's files in order of their names, or Python's own library."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        files: list[Path] = [root]
    elif path is None:
        files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    else:
        files = sorted(p for p in islice(root.rglob("*"), FILES_MAX) if p.is_file())
    text = bytearray()
    for file in files:
        with file.open("rb") as opened:
            text += opened.read(DATA_BYTES_MAX - len(text))
        if len(text) >= DATA_BYTES_MAX:
            break
    print(f"data: {len(text):,} bytes from {root}", flush=True)
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def batch(data: Tensor, c: GptBytesConfig, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T): windows drawn by (seed, number)."""
    draw = torch.Generator().manual_seed((c.seed * 1_000_003 + number) % (1 << 63))
    starts = torch.randint(len(data) - c.context, (c.batch,), generator=draw)  # (B,)
    windows = data[starts[:, None] + torch.arange(c.context + 1)].long()  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: Gpt, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.reshape(-1))


def learning_rate(c: GptBytesConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= c.warmup:
        return c.lr * step / c.warmup
    done = (step - c.warmup) / max(1, steps - c.warmup)
    return c.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def generate(model: Gpt, c: GptBytesConfig) -> str:
    """`sample_tokens` bytes after the prompt; from its own generator, so that sampling does not change the training."""
    draw = torch.Generator().manual_seed(c.seed)
    tokens = torch.tensor([list(PROMPT)])  # (1, T)
    for _ in range(c.sample_tokens):
        logits = model(tokens[:, -c.context :])[0, -1]  # (256,)
        following = torch.multinomial(F.softmax(logits / 0.8, dim=0), 1, generator=draw)  # (1,)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", "replace")


@torch.no_grad()
def validation_loss(model: Gpt, data: Tensor, c: GptBytesConfig) -> float:
    """Mean loss on fixed windows of the held-out tail."""
    return sum(loss_of(model, *batch(data, c, i)).item() for i in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES


def train(run: Run, c: GptBytesConfig) -> Iterator[float]:
    """Trains and reports; gives the loss of each step."""
    data = read_data(run.data)
    split = int(len(data) * (1 - VALIDATION_SHARE))
    training, held_out = data[:split], data[split:]
    if len(held_out) <= c.context:
        raise ValueError(
            f"{len(data):,} bytes of data are too few for a context of {c.context}: "
            f"at least {math.ceil((c.context + 2) / VALIDATION_SHARE):,} are needed"
        )
    torch.manual_seed(c.seed)
    model = Gpt(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95), weight_decay=c.weight_decay)
    state = TrainState(model, optimizer)
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for step in run.steps_left(state):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(c, step, run.steps)
        inputs, targets = batch(training, c, state.position)
        with run.offload():
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.position += 1
        run.step(step, loss.item(), samples=inputs.numel())
        if c.sample_tokens and (step % c.sample_every == 0 or step == run.steps):
            run.sample(step, generate(model, c))
        yield loss.item()
    print(f"validation loss: {validation_loss(model, held_out, c):.4f}", flush=True)


def main() -> None:
    """Runs under a job, or by hand."""
    run = attach(RECIPES["gpt-bytes"].default_steps, sys.argv[1] if len(sys.argv) > 1 else None)
    for _ in train(run, GptBytesConfig(**run.config)):
        pass
    run.finish()


if __name__ == "__main__":
    main()
