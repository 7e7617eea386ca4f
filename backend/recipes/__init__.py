"""Bundled training scripts and their settings: what `{"recipe": "gpt-bytes", "config": {…}}` may name.

The idea: a recipe is an ordinary script that runs in the job's script process, and a pydantic model of its config that
the server checks a submission against, and that the script fills its config from. Each default stands once, here.
No torch is imported: the gateway reads this module. Left out: recipes that others add.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GptBytesConfig(BaseModel):
    """A GPT over bytes. The defaults are a demo: from a loss of about 5.6 to below 2.5 in 200 steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    layers: int = Field(4, ge=1, le=48)
    width: int = Field(128, ge=8, le=4096)
    heads: int = Field(4, ge=1, le=64)
    context: int = Field(128, ge=8, le=4096)
    batch: int = Field(16, ge=1, le=1024)
    lr: float = Field(3e-3, gt=0, le=1)
    warmup: int = Field(20, ge=0, description="steps in which the learning rate rises")
    weight_decay: float = Field(0.1, ge=0, le=1)
    seed: int = Field(1, ge=0, lt=1 << 63)
    sample_tokens: int = Field(200, ge=0, le=10_000)
    sample_every: int = Field(50, ge=1, description="steps between samples")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GptBytesConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class GemmConfig(BaseModel):
    """C = A B of two uploaded float32 matrices, .npy or .safetensors (holding one tensor)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a: str
    b: str


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
