"""The training bench at a small size: every recipe is in it, its rows say what they should, wrong names are refused."""

from __future__ import annotations

from typer.testing import CliRunner

from backend.bench import train
from backend.cli import app
from backend.recipes import RECIPES
from backend.swarm import Swarm


def test_every_training_recipe_is_measured_with_settings_that_it_takes() -> None:
    assert set(train.CONFIGS) == set(RECIPES) - {"gemm"}
    for name, config in train.CONFIGS.items():
        RECIPES[name].config(**config)


def test_a_recipe_has_a_row_for_each_executor() -> None:
    with Swarm() as swarm:
        swarm.add_native("one")
        swarm.wait_devices(1)
        rows = train._recipe(swarm, "mlp", 3)
    assert [(row["recipe"], row["wire"], row["executor"]) for row in rows] == [
        ("mlp", "f32", "eager"),
        ("mlp", "f32", "graph"),
    ]
    for row in rows:
        assert row["holds"] and 0 <= row["max_relative_loss_difference"] <= 1e-5
        assert row["offloaded_flop_share"] >= 0.95
        assert row["bytes_per_step"] > 0 < row["step_seconds"]


def test_an_unknown_recipe_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "train", "--recipe", "gemm"])
    assert result.exit_code == 2
    assert "expected of gpt-bytes, llama" in result.stderr
