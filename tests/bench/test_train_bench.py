"""The training bench at a small size: every recipe is in it, its rows say what they should, wrong names are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from backend.bench import train, train_bytes
from backend.cli import app
from backend.recipes import RECIPES
from backend.swarm import Swarm


def test_every_training_recipe_is_measured_with_settings_that_it_takes() -> None:
    assert set(train.CONFIGS) == set(RECIPES) - {"gemm"}
    for name, config in train.CONFIGS.items():
        RECIPES[name].config(**config)


def test_a_recipe_has_a_row_for_each_wire_and_executor() -> None:
    with Swarm() as swarm:
        swarm.add_native("one")
        swarm.wait_devices(1)
        rows = train._recipe(swarm, "mlp", 3)
    assert [(row["wire"], row["executor"]) for row in rows] == train.RUNS
    assert {row["recipe"] for row in rows} == {"mlp"}
    sizes = {row["wire"]: row["bytes_per_step"] for row in rows}
    assert sizes["bf16"] == sizes["f16"] == sizes["f32"] / 2 > sizes["int8"]
    for row in rows:
        assert row["holds"] and 0 <= row["max_relative_loss_difference"] <= train.LIMITS[row["wire"]]
        assert row["offloaded_flop_share"] >= 0.95
        assert row["bytes_per_step"] > 0 < row["step_seconds"]


def test_the_bytes_of_a_step_are_fewer_with_each_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **train_bytes.GPT_MINI,
        "layers": 1,
        "width": 64,
        "heads": 2,
        "context": 64,
        "batch": 16,
        "micro_batches": 4,
    }
    monkeypatch.setattr(train_bytes, "GPT_MINI", small)
    monkeypatch.setattr(train_bytes, "GFLOPS", 2.0)
    found = train_bytes.bytes_of_steps(train._job)
    first, second, third = (row["bytes_per_step"] for row in found["rows"])
    assert first > second > 1.8 * third
    assert found["reduction"] == first / third


def test_an_unknown_recipe_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "train", "--recipe", "gemm"])
    assert result.exit_code == 2
    assert "expected of gpt-bytes, llama" in result.stderr
