"""mlp, cnn and vit: they read files of images, learn the drawn ones, and go on exactly where they were."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.recipes import RECIPES, images
from tileweave.script.run import Run, local_welcome

TINY: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 2, "width": 64, "batch": 64, "lr": 3e-3},
    "cnn": {"layers": 2, "width": 16, "batch": 32, "lr": 1e-2},
    "vit": {"layers": 1, "width": 32, "heads": 2, "patch": 8, "batch": 32, "lr": 1e-2},
}
every_recipe = pytest.mark.parametrize("name", TINY)


def recipe(name: str, **over: Any) -> tuple[Callable[..., Any], Any]:
    config = RECIPES[name].config(**{**TINY[name], "warmup": 3, **over})
    return importlib.import_module(f"backend.recipes.{name}").train, config


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "DRAWN", 1000)


@every_recipe
def test_drawn_images_are_learnt(name: str, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    train, config = recipe(name, validate_every=25)
    losses = list(train(Run(local_welcome(50, None)), config))
    assert losses[0] == pytest.approx(np.log(10), abs=0.3)
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    out = capsys.readouterr().out
    assert "validation after step 25: " in out and "validation after step 50: " in out
    right = [int(line.split()[2]) for line in out.splitlines() if line.startswith("held out: ")]
    assert right[-1] > 20  # of 100; guessing makes 10


@every_recipe
def test_micro_batches_give_the_loss_of_the_whole_batch(name: str, few: None) -> None:
    """As far as rounding goes: nothing in these models looks at more than one image."""
    curves = []
    for count in (1, 4):
        train, config = recipe(name, micro_batches=count, lr=1e-3)
        curves.append(list(train(Run(local_welcome(3, None)), config)))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


@every_recipe
def test_a_resumed_run_goes_on_to_the_last_bit(name: str, few: None, tmp_path: Path, check_resume: Any) -> None:
    check_resume(*recipe(name), None, tmp_path / "checkpoints")


@every_recipe
def test_the_checkpoint_is_read_by_plain_torch(name: str, few: None, tmp_path: Path) -> None:
    train, config = recipe(name)
    run = Run(local_welcome(1, None, str(tmp_path)))
    list(train(run, config))
    run.finish()
    [file] = tmp_path.iterdir()
    weights = {key[6:]: value for key, value in load_file(file).items() if key.startswith("model.")}
    assert weights["head.bias"].shape == (10,)


def test_drawn_images_are_of_the_seed_and_some_labels_are_wrong(few: None) -> None:
    first, again, other = images.drawn_images(1), images.drawn_images(1), images.drawn_images(2)
    assert torch.equal(first.pixels, again.pixels) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.pixels, other.pixels)
    assert first.pixels.dtype is torch.uint8 and first.pixels.shape == (1000, 3, 32, 32)
    assert first.labels.unique().tolist() == list(range(10))


def write(path: Path, pixels: torch.Tensor, labels: torch.Tensor) -> str:
    save_file({"images": pixels, "labels": labels}, path)
    return str(path)


@pytest.mark.parametrize(
    ("pixels", "shape"),
    [
        (torch.randint(256, (40, 8, 8), dtype=torch.uint8), (1, 8, 8)),
        (torch.randn(40, 3, 8, 16), (3, 8, 16)),
    ],
)
def test_a_file_of_images_is_trained_on(tmp_path: Path, pixels: torch.Tensor, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "some.safetensors", pixels, torch.arange(40, dtype=torch.uint8) % 3)
    found = images.read_images(path, 1)
    assert (found.shape, found.classes, found.labels.dtype) == (shape, 3, torch.int64)
    for name in TINY:
        train, config = recipe(name, batch=8)
        assert next(iter(train(Run(local_welcome(1, path)), config))) == pytest.approx(np.log(3), abs=0.7)


def test_nothing_held_out_is_trained_on() -> None:
    """Each image is of its own number: what batches and validation see shows in the inputs' order."""
    count, config = 50, recipe("mlp", batch=16)[1]
    pixels = torch.arange(count, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2).contiguous()
    seen: list[float] = []

    class Spy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(x[:, 0, 0, 0].tolist())
            return super().forward(x.flatten(1))

    task = images.image_task(Spy(4, 2), images.Images(pixels, torch.zeros(count).long(), 2), config, 5)
    trained = {value for number in range(40) for value in task.batch(number)[0][:, 0, 0, 0].tolist()}
    assert task.validate is not None
    task.validate()
    assert len(set(seen)) == 5 and len(trained) == 45
    assert not trained & set(seen)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"images": torch.zeros(4, 2, 2)}, "expected were `images` and `labels`"),
        ({"images": torch.zeros(4, 2), "labels": torch.zeros(4).long()}, r"shape \(4, 2\), expected was uint8 or"),
        ({"images": torch.zeros(4, 2, 2).double(), "labels": torch.zeros(4).long()}, "is torch.float64"),
        ({"images": torch.zeros(4, 0, 2), "labels": torch.zeros(4).long()}, r"shape \(4, 1, 0, 2\)"),
        ({"images": torch.zeros(4, 2, 2), "labels": torch.zeros(3).long()}, "expected were 4 whole numbers"),
        ({"images": torch.zeros(4, 2, 2), "labels": torch.zeros(4)}, "`labels` is torch.float32"),
        ({"images": torch.zeros(4, 2, 2), "labels": torch.tensor([0, 1, -1, 0])}, "go from -1 to 1"),
        ({"images": torch.zeros(4, 2, 2), "labels": torch.tensor([0, 1, 10**9, 0])}, "expected were 0 to 9999"),
        ({"images": torch.full((4, 2, 2), torch.nan), "labels": torch.zeros(4).long()}, "not finite"),
    ],
)
def test_a_file_of_something_else_is_refused_in_words(tmp_path: Path, tensors: Any, words: str) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=words):
        images.read_images(str(tmp_path / "x.safetensors"), 1)


def test_what_is_no_safetensors_file_and_patches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"not one")
    for path in (tmp_path / "x.safetensors", tmp_path):
        with pytest.raises(ValueError, match="cannot be read as one safetensors file"):
            images.read_images(str(path), 1)
    path = write(tmp_path / "y.safetensors", torch.zeros(4, 12, 12), torch.zeros(4).long())
    train, config = recipe("vit")
    with pytest.raises(ValueError, match="images of 12 x 12 cannot be cut into patches of 8 x 8"):
        train(Run(local_welcome(1, path)), config)
