"""The settings of the bundled recipes: what a submission may say, within which limits, and each default, once.

The idea: what every training recipe has is `TrainConfig`; what all that read text have is `ByteConfig`; a recipe adds
its own. The server checks a submission against these, and the script fills its settings from them.
No torch is imported: the gateway reads this module. Left out: a choice of optimizer and of schedule.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainConfig(BaseModel):
    """How to train, whatever the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    batch: int = Field(16, ge=1, le=65_536, description="rows of a step")
    micro_batches: int = Field(1, ge=1, le=1024, description="equal parts in which a batch is computed")
    executor: Literal["eager", "graph"] = Field("eager", description="how a step is run: by operator, or as a graph")
    lr: float = Field(3e-3, gt=0, le=1)
    warmup: int = Field(20, ge=0, description="steps in which the learning rate rises")
    weight_decay: float = Field(0.1, ge=0, le=1)
    clip: float = Field(1.0, gt=0, le=1e6, description="largest norm that the gradient may have")
    seed: int = Field(1, ge=0, lt=1 << 63)
    validate_every: int = Field(50, ge=1, description="steps between validations")
    patience: int | None = Field(
        None, ge=1, description="validations in a row that may be no better before training ends; empty: all steps"
    )

    @model_validator(mode="after")
    def _micro_batches_divide_batch(self) -> Self:
        if self.batch % self.micro_batches:
            raise ValueError(f"batch {self.batch} is not a multiple of micro_batches {self.micro_batches}")
        return self


class ByteConfig(TrainConfig):
    """A model of text, byte by byte."""

    batch: int = Field(16, ge=1, le=1024, description="rows of a step")
    heads: int = Field(4, ge=1, le=64)
    context: int = Field(128, ge=8, le=4096)
    sample_tokens: int = Field(200, ge=0, le=10_000)
    sample_every: int = Field(50, ge=1, description="steps between samples")


class TransformerConfig(ByteConfig):
    """A transformer over bytes, from nothing."""

    layers: int = Field(4, ge=1, le=48)
    width: int = Field(128, ge=8, le=4096)
    stages: int = Field(1, ge=1, le=48, description="in which the depth grows from the first blocks to all; 1: all")

    @model_validator(mode="after")
    def _shape_fits(self) -> Self:
        _check_heads(self.heads, self.width)
        if self.stages > self.layers:
            raise ValueError(f"stages {self.stages} are more than layers {self.layers}: each stage adds a block")
        return self


class GptBytesConfig(TransformerConfig):
    """A GPT over bytes. The defaults are a demo: from a loss of about 5.6 to below 2.5 in 200 steps."""


class LlamaConfig(TransformerConfig):
    """A llama-style model over bytes."""

    kv_heads: int = Field(2, ge=1, le=64, description="heads of keys and values")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.width // self.heads % 2:
            raise ValueError(f"width {self.width} over heads {self.heads} is odd: a head's numbers are turned in pairs")
        return self


class LoraConfig(ByteConfig):
    """Adapters for a checkpoint of gpt-bytes or llama, whose shape is read off it but for `heads`."""

    heads: int = Field(4, ge=1, le=64, description="as the base was trained with")
    rank: int = Field(8, ge=1, le=1024)
    alpha: float = Field(16.0, gt=0, le=1e6, description="the adapters count alpha / rank times")
    weight_decay: float = Field(0.0, ge=0, le=1)


class MlpConfig(TrainConfig):
    """A multilayer perceptron over images. Drawn ones: in 100 steps 89 of 100 right, of 91 that can be."""

    batch: int = Field(256, ge=1, le=65_536, description="images of a step")
    lr: float = Field(1e-3, gt=0, le=1)
    layers: int = Field(3, ge=1, le=48)
    width: int = Field(1024, ge=1, le=16_384)


class CnnConfig(TrainConfig):
    """A residual network over images. Drawn ones: in 100 steps 60 of 100 right."""

    batch: int = Field(32, ge=1, le=65_536, description="images of a step")
    lr: float = Field(2e-3, gt=0, le=1)
    layers: int = Field(3, ge=1, le=6, description="stages, each of half the side and twice the channels")
    blocks: int = Field(1, ge=1, le=16, description="residual blocks of a stage")
    width: int = Field(32, ge=4, le=1024, multiple_of=4, description="channels of the first stage")


class VitConfig(TrainConfig):
    """A vision transformer. Drawn ones: in 100 steps 57 of 100 right."""

    batch: int = Field(64, ge=1, le=65_536, description="images of a step")
    lr: float = Field(1e-3, gt=0, le=1)
    layers: int = Field(4, ge=1, le=48)
    width: int = Field(128, ge=8, le=4096)
    heads: int = Field(4, ge=1, le=64)
    patch: int = Field(4, ge=1, le=64, description="side of a patch, in pixels")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        _check_heads(self.heads, self.width)
        return self


class GemmConfig(BaseModel):
    """C = A B of two uploaded float32 matrices, .npy or .safetensors (holding one tensor)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a: str
    b: str


def _check_heads(heads: int, width: int) -> None:
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
