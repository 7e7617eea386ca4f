"""What every training recipe gets from its task: plain torch's numbers, micro-batches, early stop, exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backend.recipes import GptBytesConfig, LlamaConfig, byte_text, gpt_bytes, llama
from backend.recipes.optimizer import rate
from tileweave.script.run import Run, local_welcome

TINY: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 8, "sample_tokens": 0}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A few thousand bytes that can be learnt."""
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    return str(tmp_path / "text")


def plain_losses(c: GptBytesConfig, path: str, steps: int) -> list[float]:
    """gpt-bytes in a loop of plain torch."""
    data = byte_text.read_data(path)
    data = data[: int(len(data) * 0.95)]
    torch.manual_seed(c.seed)
    model = gpt_bytes.Gpt(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95), weight_decay=c.weight_decay)
    losses = []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate(c, steps)(number + 1)
        loss = byte_text.loss_of(model, *byte_text.batch(data, c, number))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_losses_are_those_of_a_plain_loop_to_the_last_bit(text: str) -> None:
    """With samples and validations on the way, which must not change the training."""
    config = GptBytesConfig(**{**TINY, "sample_tokens": 3, "sample_every": 2, "validate_every": 3})
    assert list(gpt_bytes.train(Run(local_welcome(6, text)), config)) == plain_losses(config, text, 6)


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    at = rate(GptBytesConfig(lr=0.5, warmup=10), 110)
    assert [at(1), at(5), at(10)] == pytest.approx([0.05, 0.25, 0.5])
    assert [at(60), at(110)] == pytest.approx([0.55 * 0.5, 0.05])
    assert rate(GptBytesConfig(lr=0.5, warmup=0), 1)(1) == pytest.approx(0.05)


def test_micro_batches_give_the_loss_of_the_whole_batch(text: str) -> None:
    whole, parts = (
        list(gpt_bytes.train(Run(local_welcome(5, text)), GptBytesConfig(**TINY, lr=1e-3, micro_batches=count)))
        for count in (1, 2)
    )
    assert whole != parts  # the sums are made in another order
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_training_stops_when_validation_no_longer_improves(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = GptBytesConfig(**TINY, lr=1e-12, warmup=0, validate_every=2, patience=2)  # nothing can improve
    losses = list(gpt_bytes.train(Run(local_welcome(50, text)), config))
    out = capsys.readouterr().out
    assert "early stop after step" in out
    assert len(losses) < 50
    assert out.count("validation after step") == len(losses) // 2
    assert len(list(gpt_bytes.train(Run(local_welcome(12, text)), config.model_copy(update={"patience": None})))) == 12


@pytest.mark.parametrize(("train", "config"), [(gpt_bytes.train, GptBytesConfig), (llama.train, LlamaConfig)])
def test_a_resumed_run_goes_on_to_the_last_bit(
    text: str, tmp_path: Path, check_resume: Any, train: Any, config: Any
) -> None:
    check_resume(train, config(**TINY), text, tmp_path / "checkpoints")
