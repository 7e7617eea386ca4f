"""The lora recipe: it starts as the base, trains adapters only, and what it writes can be added to the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.recipes import GptBytesConfig, LlamaConfig, LoraConfig, gpt_bytes, llama, lora
from tileweave.script.run import Run, local_welcome

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 8, "sample_tokens": 0}
BASES: dict[str, tuple[Any, Any]] = {
    "gpt-bytes": (gpt_bytes.train, GptBytesConfig(**SHAPE)),
    "llama": (llama.train, LlamaConfig(**SHAPE, kv_heads=1)),
}
TUNE = LoraConfig(heads=2, context=16, batch=8, rank=4, lr=1e-2, warmup=3, sample_tokens=0)


@pytest.fixture(params=BASES)
def folder(request: Any, tmp_path: Path) -> Path:
    """The checkpoint of a few steps of a base, and beside it another text."""
    train, config = BASES[request.param]
    (tmp_path / "first").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    run = Run(local_welcome(3, str(tmp_path / "first"), str(tmp_path / "checkpoints")))
    list(train(run, config))
    run.finish()
    data = tmp_path / "data"
    data.mkdir()
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    checkpoint.rename(data / "base.safetensors")
    (data / "second.txt").write_bytes(b"abcdefgh" * 1000)
    return data


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a run by hand puts its result


def test_the_adapters_learn_and_added_to_the_base_say_the_same(folder: Path, tmp_path: Path) -> None:
    run = Run(local_welcome(40, str(folder)))
    task = lora.lora_task(run, TUNE)
    base = lora.load_base(folder / "base.safetensors", TUNE)
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(task.model(tokens), base(tokens))  # nothing is added at first

    losses = list(lora.loop.train(run, task))
    assert losses[-1] < losses[0] - 1
    lora.save_adapters(task.model, tmp_path / "result.safetensors", TUNE)
    adapters = load_file(tmp_path / "result.safetensors")
    with safe_open(tmp_path / "result.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"rank": "4", "alpha": "16.0"}
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.rpartition(".")[0] for name in adapters} == linear
    assert (tmp_path / "result.safetensors").stat().st_size < (folder / "base.safetensors").stat().st_size / 5

    weights = base.state_dict()
    for name in linear:
        weights[f"{name}.weight"] += 16 / 4 * adapters[f"{name}.b"] @ adapters[f"{name}.a"]
    base.load_state_dict(weights)
    torch.testing.assert_close(base(tokens), task.model(tokens), rtol=1e-4, atol=1e-4)


def test_nothing_of_the_base_is_changed(folder: Path) -> None:
    task = lora.lora_task(Run(local_welcome(1, str(folder))), TUNE)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    list(lora.loop.train(Run(local_welcome(3, str(folder))), task))
    changed = {name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith((".a", ".b"))}


def test_a_resumed_run_goes_on_to_the_last_bit(folder: Path, tmp_path: Path, check_resume: Any) -> None:
    check_resume(lora.train, TUNE, str(folder), tmp_path / "tuned")


def test_a_checkpoint_alone_is_tuned_on_pythons_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "read_data", lambda path, without: torch.zeros(1000, dtype=torch.uint8) + (path is None))
    task = lora.lora_task(Run(local_welcome(1, str(folder / "base.safetensors"))), TUNE)
    assert task.batch(0)[0].unique().tolist() == [1]


def test_the_checkpoint_is_not_read_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora.lora_task(Run(local_welcome(1, str(folder))), TUNE)
    assert "data: 8,000 bytes from" in capsys.readouterr().out


def test_without_a_base_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give as data the \.safetensors checkpoint of a gpt-bytes or llama job"):
        lora.lora_task(Run(local_welcome(1, None)), TUNE)
    (tmp_path / "text.txt").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"holds 0 \.safetensors files, expected was one; lora fine-tunes a model"):
        lora.lora_task(Run(local_welcome(1, str(tmp_path))), TUNE)


@pytest.mark.parametrize("over", [{"heads": 3}, {"context": 32}])
def test_a_base_that_does_not_fit_is_refused(tmp_path: Path, over: dict[str, Any]) -> None:
    model = gpt_bytes.Gpt(GptBytesConfig(**SHAPE))
    save_file({f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=r"base.safetensors is no checkpoint of gpt-bytes or llama"):
        lora.load_base(tmp_path / "base.safetensors", TUNE.model_copy(update=over))


@pytest.mark.parametrize("tensors", [{"w": torch.zeros(2)}, {"model.tokens.weight": torch.zeros(256, 32)}])
def test_what_is_no_such_checkpoint_is_refused(tmp_path: Path, tensors: Any) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x.safetensors is no checkpoint of gpt-bytes or llama"):
        lora.load_base(tmp_path / "x.safetensors", TUNE)
    (tmp_path / "y.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"y.safetensors is no checkpoint"):
        lora.load_base(tmp_path / "y.safetensors", TUNE)
