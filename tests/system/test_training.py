"""The whole system: a real server, real volunteers, real training. Each test starts its own server on its own data."""

from __future__ import annotations

import functools
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from backend.bench.parity import largest_difference, offloaded_share, plain_losses, train_on
from backend.recipes import GptBytesConfig
from backend.swarm import Swarm, descendants, wait_for

CONFIG = GptBytesConfig(layers=2, width=64, heads=2, context=64, batch=8, lr=1e-3, sample_tokens=0)
PARITY = 5e-6


@functools.cache
def plain(steps: int) -> list[float]:
    # The schedule of the learning rate depends on the number of steps, so each number has its own curve.
    return plain_losses(steps, CONFIG)


def state_of(swarm: Swarm, job: str) -> dict[str, Any]:
    return swarm.client.job(job)


def wait_end(swarm: Swarm, job: str, seconds: float = 200.0) -> dict[str, Any]:
    return wait_for(
        "the job to end",
        lambda: found if (found := state_of(swarm, job))["state"] not in ("queued", "running") else None,
        seconds,
    )


def wait_step(swarm: Swarm, job: str, step: int) -> None:
    wait_for(f"step {step}", lambda: (state_of(swarm, job)["step"] or 0) >= step, 120)


@pytest.mark.browser
def test_two_browsers_train_to_the_losses_of_plain_torch(tmp_path: Path) -> None:
    steps = 12
    config = CONFIG.model_copy(update={"layers": 4, "width": 128, "heads": 4, "context": 128})
    with Swarm() as swarm:
        swarm.add_browser("Ada")
        swarm.add_browser("Emmy")
        swarm.wait_devices(2)
        rows = train_on(swarm, steps, config)
        assert largest_difference(plain_losses(steps, config), rows) <= PARITY
        assert offloaded_share(rows) >= 0.95
        board = swarm.client.leaderboard()["rows"]
        assert {row["name"] for row in board if row["flop"] > 0} == {"Ada", "Emmy"}
        # Everything that went out was credited, once.
        assert sum(row["flop"] for row in board) == sum(row["flop_offloaded"] for row in rows)
        job = swarm.client.jobs()[0]
        checkpoint = tmp_path / "model.safetensors"
        swarm.client.download_checkpoint(job["id"], checkpoint)
        tensors = safetensors.torch.load_file(str(checkpoint))
        assert any(name.startswith("model.") for name in tensors)


@pytest.mark.browser
@pytest.mark.parametrize(("wire", "limit"), [("f32", PARITY), ("bf16", 1e-3), ("f16", 1e-3), ("int8", 1e-2)])
def test_any_wire_trains_on_browsers_and_programs_together_and_blames_nobody(wire: str, limit: float) -> None:
    steps = 4
    config = CONFIG.model_copy(update={"width": 128, "micro_batches": 2, "executor": "graph"})
    with Swarm() as swarm:
        swarm.add_browser("Ada")
        swarm.add_native("Emmy")
        swarm.wait_devices(2)
        job = swarm.client.submit_train("gpt-bytes", config.model_dump(), steps=steps, wire=wire)["id"]
        assert wait_end(swarm, job)["state"] == "succeeded"
        rows = swarm.client.metrics(job)
        assert largest_difference(plain_losses(steps, config), rows) <= limit
        assert offloaded_share(rows) >= 0.95
        devices = swarm.client.devices()
        assert [device["rejects"] for device in devices] == [0, 0]
        assert all(device["accepted"] for device in devices)
        assert sum(device["flop"] for device in devices) == sum(row["flop_offloaded"] for row in rows)


def test_a_volunteer_that_comes_late_finds_the_job_waiting_for_it() -> None:
    with Swarm() as swarm:
        job = swarm.client.submit_train("gpt-bytes", CONFIG.model_dump(), steps=2)
        wait_for("the reason", lambda: "volunteer" in (state_of(swarm, job["id"])["waiting"] or ""), 60)
        swarm.add_native("late")
        assert wait_end(swarm, job["id"])["state"] == "succeeded"


def test_a_liar_changes_nothing_earns_nothing_for_lies_and_is_quarantined() -> None:
    steps = 20
    with Swarm() as swarm:
        swarm.add_native("honest")
        swarm.add_native("liar", emulate="lie=0.5")
        swarm.wait_devices(2)
        rows = train_on(swarm, steps, CONFIG)
        assert largest_difference(plain(steps), rows) <= PARITY
        devices = {device["name"]: device for device in swarm.client.devices()}
        assert devices["liar"]["rejects"] >= 1
        assert devices["liar"]["quarantined_until_s"]
        assert devices["honest"]["rejects"] == 0
        credited = sum(device["flop"] for device in devices.values())
        assert credited == sum(row["flop_offloaded"] for row in rows)


def test_volunteers_of_two_gateways_train_on_a_data_set_together(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "text.txt").write_text("the cat sat on the mat. " * 400)
    with Swarm(tmp_path, environment={"TILEWEAVE_GATEWAYS": "2"}) as swarm:
        assert len(swarm.pids("backend.gateway")) == 2
        # Which gateway accepts a connection is the kernel's choice: add volunteers until both have one.
        wait_for("a volunteer on each gateway", lambda: spread_over_gateways(swarm), 120)
        config = CONFIG.model_copy(update={"lr": 3e-3, "warmup": 2})
        job = swarm.client.submit_train("gpt-bytes", config.model_dump(), steps=12, data="text.txt")
        ended = wait_end(swarm, job["id"])
        assert ended["state"] == "succeeded"
        assert ended["loss"] < 0.8 * ended["first_loss"]
        helped = {device["name"] for device in swarm.client.devices() if device["accepted"]}
        assert len(helped) >= 2


def spread_over_gateways(swarm: Swarm) -> bool:
    log = (swarm.settings.data_dir / "serve.log").read_text()
    online = [line for line in log.splitlines() if "device online" in line]
    if {gateway for gateway in ("gateway-0", "gateway-1") for line in online if gateway in line} == {
        "gateway-0",
        "gateway-1",
    }:
        return True
    swarm.add_native(f"volunteer {len(online)}")
    swarm.wait_devices(len(online) + 1)
    return False


def test_a_gemm_job_gives_the_product(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((700, 300), dtype=np.float32)
    b = rng.standard_normal((300, 901), dtype=np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    with Swarm() as swarm:
        swarm.add_native("one")
        job = swarm.client.submit_gemm(tmp_path / "a.npy", tmp_path / "b.npy")
        assert wait_end(swarm, job["id"])["state"] == "succeeded"
        swarm.client.download_result(job["id"], tmp_path / "c.npy")
        expected = a.astype(np.float64) @ b.astype(np.float64)
        product = np.load(tmp_path / "c.npy")
        assert product.dtype == np.float32
        assert np.abs(product - expected).max() <= 2e-6 * np.abs(expected).max()


def test_operands_that_are_not_finite_fail_the_job_and_blame_nobody(tmp_path: Path) -> None:
    a = np.ones((256, 256), dtype=np.float32)
    a[3, 5] = np.nan
    np.save(tmp_path / "a.npy", a)
    with Swarm() as swarm:
        swarm.add_native("one")
        job = swarm.client.submit_gemm(tmp_path / "a.npy", tmp_path / "a.npy")
        ended = wait_end(swarm, job["id"])
        assert ended["state"] == "failed"
        assert "finite" in ended["reason"]
        assert swarm.client.devices()[0]["rejects"] == 0


@pytest.mark.browser
def test_the_job_survives_kill_9_of_each_part_and_no_tab_is_reloaded(tmp_path: Path) -> None:
    steps = 60
    with Swarm(tmp_path, environment={"TILEWEAVE_CHECKPOINT_EVERY_S": "0.5"}) as swarm:
        swarm.add_browser("tab")
        swarm.wait_devices(1)
        (device,) = swarm.client.devices()
        job = swarm.client.submit_train("gpt-bytes", CONFIG.model_dump(), steps=steps)["id"]
        for kills, role in enumerate(("backend.gateway", "backend.jobs.coordinator", "gpt_bytes.py"), start=1):
            wait_step(swarm, job, kills * 12)
            (victim, *_) = swarm.pids(role)
            os.kill(victim, signal.SIGKILL)
            wait_for(f"{role} to run again", lambda: victim not in (now := swarm.pids(role)) and now, 60)  # noqa: B023
        assert wait_end(swarm, job)["state"] == "succeeded"
        assert largest_difference(plain(steps), swarm.client.metrics(job)) <= PARITY
        # The same tab, the same identity: it reconnected by itself.
        assert [row["id"] for row in swarm.client.devices()] == [device["id"]]
        board = swarm.client.leaderboard()["rows"]
        assert board[0]["flop"] >= sum(row["flop_offloaded"] for row in swarm.client.metrics(job))
        assert state_of(swarm, job)["epoch"] == 3
    with sqlite3.connect(tmp_path / "tileweave.sqlite") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_kill_9_of_the_server_leaves_no_process_and_the_job_goes_on_after_a_restart(tmp_path: Path) -> None:
    steps = 30
    with Swarm(tmp_path, environment={"TILEWEAVE_CHECKPOINT_EVERY_S": "0.5"}) as swarm:
        swarm.add_native("one")
        job = swarm.client.submit_train("gpt-bytes", CONFIG.model_dump(), steps=steps)["id"]
        wait_step(swarm, job, 10)
        children = [process.pid for process in descendants(swarm.process.pid)]
        os.kill(swarm.process.pid, signal.SIGKILL)
        wait_for("the children to end", lambda: not any(alive(pid) for pid in children), 30)
        swarm.restart_server()
        assert wait_end(swarm, job)["state"] == "succeeded"
        assert largest_difference(plain(steps), swarm.client.metrics(job)) <= PARITY


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie waiting for its reaper does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
