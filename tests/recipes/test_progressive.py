"""Progressive depth: which blocks run when, what it saves to the FLOP, and that a resume finds its depth again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from backend.recipes import GptBytesConfig, LlamaConfig, gpt_bytes, llama
from backend.recipes.byte_text import batch, byte_task, loss_of
from backend.recipes.progressive import block_flop, depth_at, grow_in_stages, weights_flop
from tileweave.script.multiply import PlainMultiplier
from tileweave.script.offload import Offloader, OffloadMode, math_attention
from tileweave.script.run import Run, local_welcome

SHAPE: dict[str, Any] = {
    "layers": 4, "width": 32, "heads": 2, "context": 16, "batch": 8, "sample_tokens": 0, "stages": 2,
}  # fmt: skip
MODELS = {
    "gpt-bytes": (gpt_bytes, gpt_bytes.Gpt, GptBytesConfig(**SHAPE)),
    "llama": (llama, llama.Llama, LlamaConfig(**SHAPE)),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    return str(tmp_path / "text")


@pytest.mark.parametrize(
    ("steps", "stages", "layers", "depths"),
    [
        (8, 4, 4, [1, 1, 2, 2, 3, 3, 4, 4]),
        (6, 2, 4, [2, 2, 2, 4, 4, 4]),
        (6, 3, 5, [1, 1, 3, 3, 5, 5]),
        (2, 4, 4, [2, 4]),
        (3, 1, 4, [4, 4, 4]),
    ],
)
def test_depth_grows_in_equal_parts_to_the_whole(steps: int, stages: int, layers: int, depths: list[int]) -> None:
    assert [depth_at(step, steps, stages, layers) for step in range(1, steps + 1)] == depths


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValidationError, match="stages 5 are more than layers 4"):
        GptBytesConfig(**{**SHAPE, "stages": 5})


@every_model
def test_the_flop_said_to_be_saved_are_those_not_computed(name: str) -> None:
    _, make, config = MODELS[name]
    model = make(config)
    inputs, targets = batch(torch.randint(256, (500,), dtype=torch.uint8), config, 1)

    def flop() -> int:
        counted = Offloader(PlainMultiplier(), 1)
        with math_attention(), OffloadMode(counted):
            loss_of(model, inputs, targets).backward()
        return counted.flop_offloaded + counted.flop_local

    whole = flop()
    assert whole == 4 * block_flop(model.blocks[0], config) + weights_flop(model.head, config)
    task = byte_task(model, torch.zeros(1000, dtype=torch.uint8), config, 10)
    grow_in_stages(task, model, config, 10)
    assert task.grow is not None
    task.grow(1)
    assert task.variant() == 2
    assert whole - flop() == 2 * block_flop(model.blocks[0], config)
    trained = [all(weight.requires_grad for weight in block.parameters()) for block in model.blocks]
    assert trained == [True, True, False, False]  # so that a capture leaves the others out
    task.grow(6)
    assert task.variant() == 4
    assert flop() == whole


@every_model
def test_blocks_stay_as_they_are_until_their_stage(
    name: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, make, config = MODELS[name]
    made: list[Any] = []

    def remember(c: Any) -> Any:
        made.append(make(c))
        return made[-1]

    monkeypatch.setattr(module, make.__name__, remember)
    losses = module.train(Run(local_welcome(4, text)), config)
    blocks = [{n: w.clone() for n, w in block.state_dict().items()} for block in made[0].blocks]

    def changed() -> list[bool]:
        return [
            any(not torch.equal(w, old[n]) for n, w in block.state_dict().items())
            for block, old in zip(made[0].blocks, blocks, strict=True)
        ]

    seen = [changed() for _ in losses]
    assert seen == [[True, True, False, False]] * 2 + [[True] * 4] * 2
    out = capsys.readouterr().out
    saved, whole = 4 * block_flop(made[0].blocks[0], config), weights_flop(made[0].head, config)
    share = saved / (4 * (saved + whole))
    assert f"step 4: 4 of 4 blocks; {saved:.4g} GEMM FLOP saved so far, {share:.1%} of what" in out
    assert "step 1: 2 of 4 blocks; " in out and "step 3: 4 of 4 blocks; " in out and "step 2: 2 of" not in out


@every_model
def test_a_run_resumed_across_a_stage_goes_on_to_the_last_bit(
    name: str, text: str, tmp_path: Path, check_resume: Any
) -> None:
    module, _, config = MODELS[name]
    check_resume(module.train, config, text, tmp_path / "checkpoints")
    check_resume(module.train, config.model_copy(update={"stages": 4}), text, tmp_path / "more")
