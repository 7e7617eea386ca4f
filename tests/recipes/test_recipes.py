"""The bundled recipes: their settings are checked, their data is deterministic, and they do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import save_file

from backend.recipes import RECIPES, GptBytesConfig, byte_text, gemm, gpt_bytes
from tileweave.script.run import Run, local_welcome

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 8,
    "sample_tokens": 5,
    "warmup": 5,
}


def test_the_registry_needs_no_torch_and_names_real_scripts() -> None:
    code = "import sys, backend.recipes; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe.script.is_file()
        assert recipe.default_steps >= 1


@pytest.mark.parametrize(
    "bad",
    [
        {"width": 30, "heads": 4},
        {"layers": 0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"colour": 1},
        {"batch": 8, "micro_batches": 3},
        {"patience": 0},
        {"executor": "other"},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GptBytesConfig(**bad)


def test_a_batch_is_a_function_of_the_seed_and_its_number() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(4)
    config = GptBytesConfig(**TINY)
    inputs, targets = byte_text.batch(data, config, 3)
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(byte_text.batch(data, config, 3)[0], inputs)
    assert not torch.equal(byte_text.batch(data, config, 4)[0], inputs)
    assert not torch.equal(byte_text.batch(data, GptBytesConfig(**TINY, seed=2), 3)[0], inputs)


def test_data_is_a_file_a_folder_in_order_or_pythons_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"first ")
    assert bytes(byte_text.read_data(str(tmp_path)).tolist()) == b"first second"
    assert bytes(byte_text.read_data(str(tmp_path / "b.txt")).tolist()) == b"second"
    monkeypatch.setattr(byte_text, "DATA_BYTES_MAX", 100_000)
    library = byte_text.read_data(None)
    assert len(library) == 100_000
    assert torch.equal(library, byte_text.read_data(None))


def test_training_learns_and_ends_with_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_bytes(b"abcdefgh" * 1000)
    run = Run(local_welcome(40, str(tmp_path / "data")))
    losses = list(gpt_bytes.train(run, GptBytesConfig(**TINY, lr=1e-2)))
    assert losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert losses[-1] < 2.0
    out = capsys.readouterr().out
    assert "step 40/40: loss" in out
    assert "sample after step 40:\n\ndef" in out
    assert "validation after step 40: " in out


def test_too_little_data_is_an_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"3 bytes of data are too few for a context of 16: at least 360 are needed"):
        list(gpt_bytes.train(Run(local_welcome(1, str(tmp_path / "data"))), GptBytesConfig(**TINY, lr=1e-2)))


def test_gemm_multiplies_what_was_uploaded_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(shape, dtype=np.float32) for shape in ((70, 30), (30, 50)))
    np.save(tmp_path / "a.npy", a)
    save_file({"b": b}, tmp_path / "b.safetensors")
    monkeypatch.setattr(gemm, "BLOCK_BYTES_MAX", 4 * 80 * 32)  # 32 rows
    matrices = gemm.read_matrix(tmp_path / "a.npy"), gemm.read_matrix(tmp_path / "b.safetensors")
    gemm.multiply(Run(local_welcome(1, None)), *matrices, tmp_path / "c.npy")
    np.testing.assert_allclose(np.load(tmp_path / "c.npy"), a @ b, rtol=1e-5, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "b.safetensors", "c.npy"]


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 3)])
def test_gemm_refuses_what_is_not_a_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=r"a.npy is float32 of shape .* expected was a float32 matrix"):
        gemm.read_matrix(tmp_path / "a.npy")


def test_gemm_refuses_other_types_pickles_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match="is float64"):
        gemm.read_matrix(tmp_path / "a.npy")
    np.save(tmp_path / "p.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects in dtype"):
        gemm.read_matrix(tmp_path / "p.npy")
    one = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="A needs as many columns as B has rows"):
        gemm.multiply(Run(local_welcome(1, None)), one, one, tmp_path / "c.npy")
    assert not (tmp_path / "c.npy").exists()


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "gemm"])
def test_the_admins_form_can_say_every_setting(name: str) -> None:
    """The form sends what is not plainly a number as text (admin.js)."""
    recipe = RECIPES[name]
    properties = recipe.config.model_json_schema()["properties"]
    assert all("default" in field for field in properties.values())
    sent = {
        key: field["default"] if field.get("type") in ("integer", "number") else str(field["default"] or 3)
        for key, field in properties.items()
    }
    assert recipe.config.model_validate(sent) == recipe.config(patience=3)
