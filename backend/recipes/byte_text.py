"""Text as bytes, and the task of writing it: what the recipes over bytes have in common.

The idea: batch number i is drawn from (seed, i) alone, so the place in the data is one number; the tail of the text is
held out and never trained on. A model is anything that gives (B, T, 256) logits for (B, T) bytes.
Left out: other vocabularies than the 256 bytes, and text that does not fit in memory.
"""

from __future__ import annotations

import math
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes.configs import ByteConfig
from backend.recipes.draws import generator
from backend.recipes.optimizer import adamw, rate
from tileweave.script.task import Task

VOCABULARY = 256
DATA_BYTES_MAX = 8 << 20  # of the data that is read: more than a demo gets through
FILES_MAX = 100_000
VALIDATION_SHARE = 0.05  # the tail, never trained on
VALIDATION_BATCHES = 8
PROMPT = b"\ndef "


def read_data(path: str | None, without: Path | None = None) -> Tensor:
    """The text as (N,) uint8: a file, a folder's files in order of their names but for one, or Python's own library."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        files: list[Path] = [root]
    elif path is None:
        files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    else:
        files = sorted(p for p in islice(root.rglob("*"), FILES_MAX) if p.is_file() and p != without)
    text = bytearray()
    for file in files:
        with file.open("rb") as opened:
            text += opened.read(DATA_BYTES_MAX - len(text))
        if len(text) >= DATA_BYTES_MAX:
            break
    print(f"data: {len(text):,} bytes from {root}", flush=True)
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def split(data: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """What is trained on, and the tail that is held out. Raises ValueError where that is not one window."""
    at = int(len(data) * (1 - VALIDATION_SHARE))
    if len(data) - at <= context:
        raise ValueError(
            f"{len(data):,} bytes of data are too few for a context of {context}: "
            f"at least {math.ceil((context + 2) / VALIDATION_SHARE):,} are needed"
        )
    return data[:at], data[at:]


def batch(data: Tensor, c: ByteConfig, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T): windows drawn by (seed, number)."""
    starts = torch.randint(len(data) - c.context, (c.batch,), generator=generator(c.seed, number))  # (B,)
    windows = data[starts[:, None] + torch.arange(c.context + 1)].long()  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.reshape(-1))


def generate(model: nn.Module, c: ByteConfig) -> str:
    """`sample_tokens` bytes after the prompt; from its own generator, so that sampling does not change the training."""
    draw = torch.Generator().manual_seed(c.seed)
    tokens = torch.tensor([list(PROMPT)])  # (1, T)
    for _ in range(c.sample_tokens):
        logits = model(tokens[:, -c.context :])[0, -1]  # (256,)
        following = torch.multinomial(F.softmax(logits / 0.8, dim=0), 1, generator=draw)  # (1,)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", "replace")


def validation_loss(model: nn.Module, data: Tensor, c: ByteConfig) -> float:
    """Mean loss on fixed windows of the held-out tail."""
    return sum(loss_of(model, *batch(data, c, i)).item() for i in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES


def byte_task(model: nn.Module, data: Tensor, c: ByteConfig, steps: int) -> Task:
    """The task of predicting the next byte of `data`, (N,) uint8. Raises ValueError where it is too short."""
    training, held_out = split(data, c.context)
    return Task(
        model=model,
        optimizer=adamw(model, c),
        loss=loss_of,
        batch=lambda number: batch(training, c, number),
        samples=c.batch * c.context,
        unit="tokens",
        rate=rate(c, steps),
        micro_batches=c.micro_batches,
        clip=c.clip,
        validate=lambda: validation_loss(model, held_out, c),
        validate_every=c.validate_every,
        patience=c.patience,
        generate=(lambda: generate(model, c)) if c.sample_tokens else None,
        generate_every=c.sample_every,
    )
