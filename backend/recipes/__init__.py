"""Bundled training scripts: what `{"recipe": "gpt-bytes", "config": {…}}` may name.

The idea: a recipe is an ordinary script that runs in the job's script process, and a pydantic model of its config
(configs.py). No torch is imported: the gateway reads this module. Left out: recipes that others add.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from backend.recipes.configs import CnnConfig, GemmConfig, GptBytesConfig, LlamaConfig, LoraConfig, MlpConfig, VitConfig

__all__ = [
    "RECIPES",
    "CnnConfig",
    "GemmConfig",
    "GptBytesConfig",
    "LlamaConfig",
    "LoraConfig",
    "MlpConfig",
    "Recipe",
    "VitConfig",
]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A bundled script: `config` checks and fills its settings, `script` is the file to run."""

    name: str
    title: str
    summary: str
    config: type[BaseModel]
    script: Path
    default_steps: int


_HERE = Path(__file__).parent
_IMAGES = "data is a safetensors file of images and labels; without one, patterns drawn from the seed, under noise."

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "gpt-bytes",
            "Byte-level GPT",
            "A small GPT learns to write what it reads, byte by byte; without a data set, Python's own library.",
            GptBytesConfig,
            _HERE / "gpt_bytes.py",
            200,
        ),
        Recipe(
            "llama",
            "Byte-level llama",
            "As gpt-bytes, of llama's blocks: RMSNorm, rotary places, a gated MLP, grouped heads.",
            LlamaConfig,
            _HERE / "llama.py",
            200,
        ),
        Recipe(
            "lora",
            "Fine-tuning by adapters",
            "Adapters for a checkpoint of gpt-bytes or llama: data is that file, or a folder with it and text.",
            LoraConfig,
            _HERE / "lora.py",
            100,
        ),
        Recipe(
            "mlp",
            "Image classifier: perceptron",
            f"A multilayer perceptron names images: {_IMAGES}",
            MlpConfig,
            _HERE / "mlp.py",
            100,
        ),
        Recipe(
            "cnn",
            "Image classifier: convolutions",
            f"A small residual network names images: {_IMAGES}",
            CnnConfig,
            _HERE / "cnn.py",
            100,
        ),
        Recipe(
            "vit",
            "Image classifier: vision transformer",
            f"A vision transformer names images: {_IMAGES}",
            VitConfig,
            _HERE / "vit.py",
            100,
        ),
        Recipe(
            "gemm",
            "Matrix product",
            "The product of two uploaded matrices, computed in tiles.",
            GemmConfig,
            _HERE / "gemm.py",
            1,
        ),
    )
}
