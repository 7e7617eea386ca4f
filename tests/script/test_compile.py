"""torch.compile's backend: found by its name alone, the numbers of plain torch, and products that go to the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tileweave.script import compile as backend
from tileweave.script import wire
from tileweave.script.run import Run, local_welcome

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.GELU(), torch.nn.Linear(20, 3))
compiled = torch.compile(model, backend="tileweave")
x = torch.randn(8, 12)
loss = compiled(x).square().mean()
loss.backward()
print(loss.item(), model[0].weight.grad.norm().item())
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 3)),
        Attention,
        lambda: nn.Sequential(nn.Conv1d(5, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
    ],
)
def test_training_equals_plain_torch(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Run(local_welcome(1, None))
    alone.offloader._min_gemm_flop = 1
    monkeypatch.setattr(backend, "attach", lambda: alone)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = torch.compile(model, backend=backend.tileweave) if compiled else model
        losses = []
        for number in range(3):
            x = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append([*losses, *(p.detach().clone() for p in model.parameters()), *model.buffers()])
    assert alone.offloader.flop_offloaded > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_script_under_a_job_names_the_backend_and_imports_nothing_of_ours(start_peer: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(**environment: str) -> str:
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    peer = start_peer(min_gemm_flop=1)
    under_a_job = run(TILEWEAVE_JOB_SOCKET=peer.path, TILEWEAVE_JOB_TOKEN=peer.token)
    peer.join()
    shapes = sorted((g.m, g.n, g.k) for g in peer.of(wire.GemmRequest))
    assert shapes == sorted([(8, 20, 12), (8, 3, 20), (3, 20, 8), (8, 20, 3), (20, 12, 8)])
    alone = run()
    for one, other in zip(under_a_job.split(), alone.split(), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-5)
