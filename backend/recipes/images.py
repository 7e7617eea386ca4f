"""Labelled images, and the task of telling them apart: what mlp, cnn and vit have in common.

The idea: data is one safetensors file with `images`, uint8 or float32, (N, C, H, W) or (N, H, W), and `labels`, whole
numbers, (N,). Without it a set is drawn from the seed: each class is a smooth pattern, each image its class's pattern,
moved by a few pixels, under noise and a fainter pattern of any class. One label of ten is drawn too: a loss that has a
floor can be compared by its digits, which one that goes to 0 cannot. A tenth of the images is held out.
Left out: augmentation, data that does not fit in memory, and more than one number for the scale of all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes.configs import TrainConfig
from backend.recipes.draws import generator
from backend.recipes.optimizer import adamw, rate
from tileweave.script.task import Task

CLASSES_MAX = 10_000
HELD_OUT_SHARE, HELD_OUT_MAX = 0.1, 1000
MEASURED_MAX = 4096  # images that the mean and the spread are taken from
DRAWN, DRAWN_CLASSES, DRAWN_SIDE = 8000, 10, 32
SHIFT_MAX = 4  # pixels
WRONG_LABELS = 0.1


@dataclass(frozen=True, slots=True)
class Images:
    """`pixels` (N, C, H, W), uint8 or float32; `labels` (N,), int64, each < `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, c, h, w = self.pixels.shape
        return c, h, w


def read_images(path: str | None, seed: int) -> Images:
    """The file's images, or drawn ones. Raises ValueError with what was found instead."""
    images = drawn_images(seed) if path is None else _file_images(Path(path))
    print(f"data: {len(images.labels):,} images of {images.shape}, {images.classes} classes", flush=True)
    return images


def drawn_images(seed: int) -> Images:
    """DRAWN images, 3 x 32 x 32, of 10 classes."""
    draw = generator(seed, -1)
    coarse = torch.randn(DRAWN_CLASSES, 3, 4, 4, generator=draw)
    patterns = F.interpolate(coarse, size=(DRAWN_SIDE, DRAWN_SIDE), mode="bilinear")  # (K, 3, S, S)

    def moved(classes: Tensor) -> Tensor:
        shifts = torch.randint(-SHIFT_MAX, SHIFT_MAX + 1, (2, DRAWN, 1), generator=draw)
        rows, columns = (torch.arange(DRAWN_SIDE) + shifts) % DRAWN_SIDE  # each (N, S)
        return patterns[classes[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (N, S, S, 3)

    labels, others = torch.randint(DRAWN_CLASSES, (2, DRAWN), generator=draw)
    pixels = moved(labels) + 0.7 * moved(others)
    pixels += torch.randn(pixels.shape, generator=draw)
    wrong = torch.rand(DRAWN, generator=draw) < WRONG_LABELS
    labels = torch.where(wrong, torch.randint(DRAWN_CLASSES, (DRAWN,), generator=draw), labels)
    pixels = (128 + 32 * pixels).clamp(0, 255).to(torch.uint8).permute(0, 3, 1, 2).contiguous()
    return Images(pixels, labels, DRAWN_CLASSES)


def _file_images(path: Path) -> Images:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path.name} cannot be read as one safetensors file: {error}") from error
    pixels, labels = tensors.get("images"), tensors.get("labels")
    if pixels is None or labels is None:
        raise ValueError(f"{path.name} holds {sorted(tensors)[:10]}, expected were `images` and `labels`")
    if pixels.dim() == 3:
        pixels = pixels[:, None]
    if pixels.dim() != 4 or pixels.dtype not in (torch.uint8, torch.float32) or pixels[0:1].numel() == 0:
        raise ValueError(
            f"`images` is {pixels.dtype} of shape {tuple(pixels.shape)}, expected was uint8 or float32, "
            "(N, C, H, W) or (N, H, W)"
        )
    if labels.shape != pixels.shape[:1] or labels.is_floating_point() or len(labels) < 2:
        raise ValueError(
            f"`labels` is {labels.dtype} of shape {tuple(labels.shape)}, expected were {len(pixels)} whole numbers, "
            "and at least two"
        )
    labels = labels.long()
    if labels.min() < 0 or labels.max() >= CLASSES_MAX:
        raise ValueError(f"`labels` go from {labels.min()} to {labels.max()}, expected were 0 to {CLASSES_MAX - 1}")
    if not pixels.float().isfinite().all():
        raise ValueError("`images` has numbers that are not finite")
    return Images(pixels, labels, int(labels.max()) + 1)


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per image."""
    return F.cross_entropy(model(inputs), labels)


def image_task(model: nn.Module, images: Images, c: TrainConfig, steps: int) -> Task:
    """The task of naming each image's class. `model` gives (B, classes) logits for (B, C, H, W) float32."""
    order = torch.randperm(len(images.labels), generator=generator(c.seed, -2))
    held_out, training = order[: (count := _held_out(len(order)))], order[count:]
    measured = _float(images.pixels[training[:MEASURED_MAX]])
    mean, spread = measured.mean(), measured.std().clamp_min(1e-6)

    def rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
        return (_float(images.pixels[chosen]) - mean) / spread, images.labels[chosen]

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return rows(training[torch.randint(len(training), (c.batch,), generator=generator(c.seed, number))])

    def validate() -> float:
        loss, right = 0.0, 0
        for chosen in held_out.tensor_split(tuple(range(c.batch, count, c.batch))):
            inputs, labels = rows(chosen)
            logits = model(inputs)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
        print(f"held out: {right} of {len(held_out)} right", flush=True)
        return loss / len(held_out)

    return Task(
        model=model,
        optimizer=adamw(model, c),
        loss=loss_of,
        batch=batch,
        samples=c.batch,
        unit="images",
        rate=rate(c, steps),
        micro_batches=c.micro_batches,
        clip=c.clip,
        validate=validate,
        validate_every=c.validate_every,
        patience=c.patience,
    )


def _held_out(count: int) -> int:
    return max(1, min(int(count * HELD_OUT_SHARE), HELD_OUT_MAX))


def _float(pixels: Tensor) -> Tensor:
    return pixels / 255 if pixels.dtype is torch.uint8 else pixels
