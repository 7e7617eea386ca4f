"""The bundled scripts as processes of their own under a job, their products made by the other end of the socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from backend.recipes import RECIPES, GptBytesConfig
from backend.recipes.gpt_bytes import Gpt
from tileweave.script import wire

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4, "sample_tokens": 5, "sample_every": 2}

OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "context": 32, "batch": 4, "sample_tokens": 0},
    "mlp": {"layers": 1, "width": 16, "batch": 8},
    "cnn": {"layers": 2, "width": 4, "batch": 4},
    "vit": {"layers": 1, "width": 16, "heads": 2, "patch": 16, "batch": 4},
}


def run_recipe(peer: Any, name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TILEWEAVE_JOB_SOCKET": peer.path, "TILEWEAVE_JOB_TOKEN": peer.token}
    done = subprocess.run(
        [sys.executable, str(RECIPES[name].script)], env=environment, capture_output=True, text=True, check=False
    )
    peer.join()
    return done


def test_gpt_bytes_trains_under_a_job_as_alone(start_peer: Any, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(256)) * 40)
    curves = []
    for minimum in (1, 1 << 60):  # everything goes out, nothing does
        peer = start_peer(steps=4, config=TINY, data=str(tmp_path / "data"), min_gemm_flop=minimum)
        done = run_recipe(peer, "gpt-bytes")
        assert done.returncode == 0, done.stderr
        assert peer.of(wire.ScriptDone)
        assert [s.step for s in peer.of(wire.SampleText)] == [2, 4]
        assert [c.step for c in peer.of(wire.CheckpointWritten)] == [1, 2, 3, 4]
        reports = peer.of(wire.StepReport)
        away = sum(r.flop_offloaded for r in reports)
        assert away == sum(2 * g.batch * g.m * g.n * g.k for g in peer.of(wire.GemmRequest))
        assert (away == 0) == (minimum > 1)
        curves.append([r.loss for r in reports])
        assert all(r.samples == 128 for r in reports)
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_recipes_train_and_validate_under_a_job_as_alone(start_peer: Any, name: str) -> None:
    curves = []
    for minimum in (1, 1 << 60):
        config = {**OTHERS[name], "validate_every": 2, "micro_batches": 2}
        peer = start_peer(steps=3, config=config, min_gemm_flop=minimum)
        done = run_recipe(peer, name)
        assert done.returncode == 0, done.stderr
        reports, validated = peer.of(wire.StepReport), peer.of(wire.Validated)
        assert [v.step for v in validated] == [2, 3]
        assert all((r.flop_local, r.flop_offloaded)[minimum == 1] > 0 for r in reports)
        curves.append([r.loss for r in reports] + [v.value for v in validated])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)


def test_lora_under_a_job_names_its_adapters_as_the_result(start_peer: Any, tmp_path: Path) -> None:
    without = start_peer(steps=1, config={})
    assert run_recipe(without, "lora").returncode == 1
    assert "give as data the .safetensors checkpoint" in without.messages[-1].reason
    model = Gpt(GptBytesConfig(layers=1, width=32, heads=2, context=32))
    data = tmp_path / "data"
    data.mkdir()
    save_file({f"model.{name}": value for name, value in model.state_dict().items()}, data / "base.safetensors")
    (data / "text").write_bytes(bytes(range(256)) * 40)
    config = {"heads": 2, "context": 32, "batch": 4, "rank": 2, "sample_tokens": 0}
    peer = start_peer(steps=2, config=config, data=str(data))
    peer.checkpoints.mkdir()
    done = run_recipe(peer, "lora")
    assert done.returncode == 0, done.stderr
    path = peer.checkpoints.parent / "result.safetensors"
    assert peer.messages[-1] == wire.ScriptDone(result=str(path))
    assert load_file(path)["blocks.0.qkv.a"].shape == (2, 32)


def test_gemm_saves_the_product_beside_the_checkpoints(start_peer: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(shape, dtype=np.float32) for shape in ((70, 30), (30, 50)))
    np.save(tmp_path / "a.npy", a), np.save(tmp_path / "b.npy", b)
    peer = start_peer(steps=1, config={"a": str(tmp_path / "a.npy"), "b": str(tmp_path / "b.npy")})
    peer.checkpoints.mkdir()
    done = run_recipe(peer, "gemm")
    assert done.returncode == 0, done.stderr
    assert [(g.m, g.n, g.k) for g in peer.of(wire.GemmRequest)] == [(70, 50, 30)]
    path = peer.checkpoints.parent / "result.npy"
    assert peer.messages[-1] == wire.ScriptDone(result=str(path))
    np.testing.assert_allclose(np.load(path), a @ b, rtol=1e-5, atol=1e-5)


def test_gemm_of_numbers_that_are_not_finite_fails_with_the_coordinators_reason(
    start_peer: Any, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.full((4, 4), np.nan, np.float32))
    peer = start_peer(steps=1, config={"a": str(tmp_path / "a.npy"), "b": str(tmp_path / "a.npy")})
    peer.checkpoints.mkdir()
    peer.answer = lambda m: (
        [wire.GemmFailed(id=m.id, reason="operand a is not finite")]
        if isinstance(m, wire.GemmRequest)
        else peer.default_answer(m)
    )
    assert run_recipe(peer, "gemm").returncode == 1
    assert peer.messages[-1].reason.startswith("tileweave.script.channel.GemmError: operand a is not finite (gemm.py")


def test_a_run_by_hand_needs_no_job(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    script = str(RECIPES["gpt-bytes"].script)
    done = subprocess.run([sys.executable, script, str(tmp_path / "data")], capture_output=True, text=True, check=False)
    assert "1 bytes of data are too few" in done.stderr
