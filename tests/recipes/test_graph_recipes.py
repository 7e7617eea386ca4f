"""Every recipe's loss can be captured: the graph executor gives the losses of the eager one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from backend.recipes import (
    CnnConfig,
    GptBytesConfig,
    LlamaConfig,
    LoraConfig,
    MlpConfig,
    VitConfig,
    cnn,
    gpt_bytes,
    images,
    llama,
    lora,
    mlp,
    vit,
)  # fmt: skip
from tileweave.script.run import Run, local_welcome

BYTES: dict[str, Any] = {"context": 16, "heads": 2, "batch": 4, "sample_tokens": 0}
SHAPE: dict[str, Any] = {**BYTES, "layers": 2, "width": 32}
CASES: dict[str, tuple[Any, Any]] = {
    "gpt-bytes": (gpt_bytes, GptBytesConfig(**SHAPE, lr=1e-3)),
    "gpt-bytes, depth growing": (gpt_bytes, GptBytesConfig(**SHAPE, lr=1e-3, stages=2)),
    "llama": (llama, LlamaConfig(**SHAPE, lr=1e-3, kv_heads=1)),
    "llama, depth growing": (llama, LlamaConfig(**SHAPE, lr=1e-3, stages=2)),
    "lora": (lora, LoraConfig(**BYTES, lr=1e-3)),
    "mlp": (mlp, MlpConfig(layers=2, width=16, batch=8)),
    "cnn": (cnn, CnnConfig(layers=2, width=4, batch=8)),
    "vit": (vit, VitConfig(layers=1, width=16, heads=2, patch=16, batch=8)),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, and beside it a base for lora."""
    monkeypatch.setattr(images, "DRAWN", 300)
    monkeypatch.chdir(tmp_path)  # where a run by hand puts its result
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    model = gpt_bytes.Gpt(GptBytesConfig(**SHAPE))
    save_file({f"model.{name}": value for name, value in model.state_dict().items()}, folder / "base.safetensors")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_is_the_step(name: str, data: Path) -> None:
    module, config = CASES[name]
    where = None if hasattr(module, "image_task") else str(data if module is lora else data / "text")
    curves = []
    for executor in ("eager", "graph"):
        told = config.model_copy(update={"executor": executor, "micro_batches": 2})
        welcome = msgspec.structs.replace(local_welcome(4, where), config=told.model_dump())
        curves.append(list(module.train(Run(welcome), told)))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
