"""Bundled training scripts: what `{"recipe": "gpt-bytes", "config": {…}}` may name.

The idea: a recipe is an ordinary script that runs in the job's script process, and a pydantic model of its config
(configs.py). No torch is imported: the gateway reads this module. Left out: recipes that others add.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from backend.recipes.configs import GemmConfig, GptBytesConfig

__all__ = ["RECIPES", "GemmConfig", "GptBytesConfig", "Recipe"]


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
            "gemm",
            "Matrix product",
            "The product of two uploaded matrices, computed in tiles.",
            GemmConfig,
            _HERE / "gemm.py",
            1,
        ),
    )
}
