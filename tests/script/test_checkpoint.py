"""Checkpoints: complete or absent, checked against their hash, readable by plain torch, and exact."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tileweave.script.checkpoint import CheckpointError, TrainState, read_checkpoint, write_checkpoint

INTERRUPTED = """
import resource, sys
from pathlib import Path
import torch
from tileweave.script.checkpoint import TrainState, write_checkpoint
model = torch.nn.Linear(3, 2)
state = TrainState(model, torch.optim.AdamW(model.parameters()))
path = Path(sys.argv[1])
size = write_checkpoint(path, 1, state).size
good = path.read_bytes()
for limit in [0, 1, 7, 8, 9, 1000, size // 2, size - 2, size - 1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_checkpoint(path, 2, state)
    except Exception as error:
        print(limit, type(error).__name__)
    else:
        raise SystemExit(f"no error at {limit}")
    assert path.read_bytes() == good
    assert list(path.parent.iterdir()) == [path]
"""


def trained(seed: int, steps: int = 3) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.t())  # a view: not contiguous
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return TrainState(model, optimizer, position=steps)


def test_everything_comes_back(tmp_path: Path) -> None:
    state = trained(1)
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    written = write_checkpoint(tmp_path / "c.safetensors", 3, state)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    assert written.sha256 == hashlib.sha256(written.path.read_bytes()).hexdigest()
    assert written.size == written.path.stat().st_size
    assert list(tmp_path.iterdir()) == [written.path]
    other = trained(2, steps=0)
    assert read_checkpoint(written.path, written.sha256, other) == 3
    assert other.position == 3
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    for name, value in state.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])
    assert other.optimizer.state_dict()["param_groups"] == state.optimizer.state_dict()["param_groups"]
    for index, slots in state.optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            assert torch.equal(value, other.optimizer.state_dict()["state"][index][name])


def test_plain_torch_reads_the_model(tmp_path: Path) -> None:
    state = trained(1)
    tensors = load_file(write_checkpoint(tmp_path / "c.safetensors", 3, state).path)
    trained(2).model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    path = write_checkpoint(tmp_path / "c.safetensors", 1, TrainState(model, torch.optim.SGD(model.parameters()))).path
    tensors = load_file(path)
    assert torch.equal(tensors["model.0.weight"], tensors["model.1.weight"])


def test_a_write_that_breaks_off_at_any_byte_leaves_the_previous_file(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "c.safetensors")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 9


def test_a_file_damaged_anywhere_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c.safetensors", 3, trained(1))
    good = written.path.read_bytes()
    state = trained(2)
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    for position in [*range(0, len(good), len(good) // 50), len(good) - 1]:
        for bad in (good[:position], good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]):
            written.path.write_bytes(bad)
            with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is"):
                read_checkpoint(written.path, written.sha256, state)
    written.path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(written.path, hashlib.sha256(written.path.read_bytes()).hexdigest(), state)
    written.path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(FileNotFoundError.*restore the file from a backup"):
        read_checkpoint(written.path, written.sha256, state)
    assert all(torch.equal(v, before[k]) for k, v in state.model.state_dict().items())


def test_a_checkpoint_of_another_model_or_program_is_an_error(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c.safetensors", 3, trained(1))
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="does not fit this script's model"):
        read_checkpoint(written.path, written.sha256, TrainState(model, torch.optim.AdamW(model.parameters())))
    from safetensors.torch import save_file

    save_file({"model.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "other.safetensors", None, trained(1))
