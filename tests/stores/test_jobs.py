"""A job's life: states, epochs, metrics, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import get_args

import pytest

from backend.stores.database import Database
from backend.stores.jobs import (
    ENDED,
    REASON_LENGTH_MAX,
    SAMPLE_LENGTH_MAX,
    STATES,
    CheckpointRow,
    JobSpec,
    JobStore,
    State,
    StepRow,
)

TRAIN = JobSpec(kind="train", name="a small GPT", recipe="gpt-bytes", config={"layers": 2, "lr": 1e-3}, steps=100)
PATHS: dict[State, tuple[State, ...]] = {
    "queued": (),
    "running": ("running",),
    "succeeded": ("running", "succeeded"),
    "failed": ("failed",),
    "cancelled": ("cancelled",),
}


def row(step: int, loss: float | None = 1.0, tiles: int = 3) -> StepRow:
    return StepRow(
        step=step, loss=loss, seconds=0.5, samples=1024, unit="tokens", tiles=tiles, flop_offloaded=2**62, flop_local=7,
        bytes_down=10**12, bytes_up=5, devices=2, time_s=100.0 + step,
    )  # fmt: skip


def test_a_job_is_stored_as_asked_for(jobs: JobStore, tmp_path: Path) -> None:
    gemm = JobSpec(
        kind="gemm", name="a @ b", inputs={"a": "/x/a.npy", "b": "/x/b.npy"}, data="d1", weight=2.5, accuracy="normwise"
    )
    for spec in (TRAIN, gemm):
        job = jobs.create(spec, 10.0)
        assert job.state == "queued" and job.created_s == 10.0 and job.epoch == 0
        assert (
            job.step is job.loss is job.first_loss is job.started_s is job.ended_s is job.result is job.sample is None
        )
        assert {f.name: getattr(job, f.name) for f in dataclasses.fields(spec)} == dataclasses.asdict(spec)
        assert jobs.get(job.id) == job
        again = Database(tmp_path / "tileweave.sqlite")  # as another process sees it
        assert JobStore(again).get(job.id) == job
        again.close()
    assert jobs.get("nothing") is None


def test_jobs_are_listed_newest_first_by_state_and_by_page(jobs: JobStore) -> None:
    made = [jobs.create(dataclasses.replace(TRAIN, name=str(i)), float(i)) for i in range(5)]
    jobs.begin_epoch(made[1].id, 9.0)
    assert [job.name for job in jobs.list()] == ["4", "3", "2", "1", "0"]
    assert [job.name for job in jobs.list(limit=2, offset=1)] == ["3", "2"]
    assert [job.name for job in jobs.list(states=["running"])] == ["1"]
    assert [job.name for job in jobs.list(states=["queued", "running"], limit=2)] == ["4", "3"]
    assert jobs.list(states=[]) == []
    assert (jobs.count(), jobs.count(["queued"]), jobs.count(["failed"])) == (5, 4, 0)


@pytest.mark.parametrize("after", get_args(State))
@pytest.mark.parametrize("before", get_args(State))
def test_every_move_is_made_or_refused_as_the_table_says(jobs: JobStore, before: State, after: State) -> None:
    job = jobs.create(TRAIN, 1.0)
    for state in PATHS[before]:
        assert jobs.set_state(job.id, state, "", 2.0)
    if after == "queued":  # where a job begins, and nothing leads back
        with pytest.raises(ValueError, match="no job goes to 'queued'"):
            jobs.set_state(job.id, after, "why", 3.0)
        return
    moved = jobs.set_state(job.id, after, "why", 3.0)
    assert moved == (after in STATES[before])
    now = jobs.get(job.id)
    assert now is not None
    assert (now.state, now.reason) == ((after, "why") if moved else (before, ""))
    assert now.ended_s == ((3.0 if moved else 2.0) if now.state in ENDED else None)


def test_only_from_narrows_a_move_and_an_impossible_one_is_our_bug(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    assert not jobs.set_state(job.id, "failed", "", 2.0, only_from=["running"])
    assert jobs.set_state(job.id, "failed", "", 2.0, only_from=["running", "queued"])
    with pytest.raises(ValueError, match="no job goes to 'running' from"):
        jobs.set_state(job.id, "running", "", 2.0, only_from=["failed"])
    with pytest.raises(LookupError, match="no job 'jx'"):
        jobs.set_state("jx", "failed", "", 2.0)


def test_a_reason_is_cut(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    jobs.set_state(job.id, "failed", "x" * 10**6, 2.0)
    failed = jobs.get(job.id)
    assert failed is not None and len(failed.reason) == REASON_LENGTH_MAX


def test_an_epoch_begins_from_queued_or_running_and_the_first_start_is_remembered(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    assert [jobs.begin_epoch(job.id, now) for now in (5.0, 6.0)] == [1, 2]
    now = jobs.get(job.id)
    assert now is not None and (now.state, now.reason, now.started_s, now.ended_s) == ("running", "", 5.0, None)
    jobs.set_state(job.id, "succeeded", "", 9.0)
    with pytest.raises(ValueError, match="is succeeded; only a queued or running job"):
        jobs.begin_epoch(job.id, 10.0)
    with pytest.raises(LookupError):
        jobs.begin_epoch("jx", 10.0)


def test_cancelling_ends_a_job_once_and_for_all(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    jobs.begin_epoch(job.id, 2.0)
    cancelled = jobs.request_cancel(job.id, 3.0)
    assert (cancelled.state, cancelled.reason, cancelled.ended_s) == ("cancelled", "cancelled by the admin", 3.0)
    assert not jobs.set_state(job.id, "succeeded", "", 4.0)
    assert jobs.request_cancel(job.id, 5.0) == cancelled
    with pytest.raises(LookupError):
        jobs.request_cancel("jx", 5.0)


def test_metrics_come_back_in_order_and_a_replayed_step_overwrites(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    first = jobs.begin_epoch(job.id, 2.0)
    for step in range(6):
        assert jobs.record_step(job.id, first, row(step, loss=5.0 - step))
    second = jobs.begin_epoch(job.id, 3.0)
    assert not jobs.record_step(job.id, first, row(9))  # thought dead, and late
    for step in (3, 4):
        assert jobs.record_step(job.id, second, row(step, loss=4.5 - step, tiles=99))
    rows = jobs.metrics(job.id)
    assert [r.step for r in rows] == [0, 1, 2, 3, 4, 5]
    assert [r.tiles for r in rows] == [3, 3, 3, 99, 99, 3]
    assert rows[1] == row(1, loss=4.0)
    assert [r.step for r in jobs.metrics(job.id, after_step=2, limit=2)] == [3, 4]
    now = jobs.get(job.id)
    assert now is not None and (now.step, now.loss, now.first_loss) == (4, 0.5, 5.0)
    assert jobs.metrics("jx") == []


def test_a_validation_is_of_its_step_and_the_newest_is_the_jobs(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    assert job.validation is job.validation_step is None
    first = jobs.begin_epoch(job.id, 2.0)
    for step in range(3):
        jobs.record_step(job.id, first, row(step))
    assert jobs.record_validation(job.id, first, 1, 2.5)
    assert jobs.record_validation(job.id, first, 2, 2.25)
    assert not jobs.record_validation(job.id, first, 2, math.nan)  # JSON has none
    second = jobs.begin_epoch(job.id, 3.0)
    assert not jobs.record_validation(job.id, first, 2, 9.0)  # thought dead, and late
    assert [r.validation for r in jobs.metrics(job.id)] == [None, 2.5, 2.25]
    now = jobs.get(job.id)
    assert now is not None and (now.validation, now.validation_step) == (2.25, 2)
    jobs.record_step(job.id, second, row(2))  # replayed, and not validated yet
    assert [r.validation for r in jobs.metrics(job.id)] == [None, 2.5, None]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_json_cannot_hold_is_stored_as_unknown(jobs: JobStore, loss: float | None) -> None:
    job = jobs.create(TRAIN, 1.0)
    epoch = jobs.begin_epoch(job.id, 2.0)
    jobs.record_step(job.id, epoch, row(0, loss=loss))
    now = jobs.get(job.id)
    assert now is not None and now.loss is now.first_loss is None
    json.dumps(dataclasses.asdict(jobs.metrics(job.id)[0]), allow_nan=False)
    jobs.record_step(job.id, epoch, row(1, loss=2.0))
    now = jobs.get(job.id)
    assert now is not None and now.first_loss == 2.0


def test_the_newest_checkpoint_counts_and_a_dead_epochs_does_not(jobs: JobStore) -> None:
    job, other = jobs.create(TRAIN, 1.0), jobs.create(TRAIN, 1.0)
    assert jobs.latest_checkpoint(job.id) is None
    first = jobs.begin_epoch(job.id, 2.0)
    for step in (10, 20):
        assert jobs.record_checkpoint(job.id, first, step, f"/c/{step}", "ab" * 32, 2**40, 3.0)
    second = jobs.begin_epoch(job.id, 4.0)
    assert not jobs.record_checkpoint(job.id, first, 30, "/c/30", "cd" * 32, 1, 5.0)
    expected = CheckpointRow(epoch=first, step=20, path="/c/20", sha256="ab" * 32, size=2**40, time_s=3.0)
    assert jobs.latest_checkpoint(job.id) == expected
    assert jobs.record_checkpoint(job.id, second, 25, "/c/25", "ef" * 32, 1, 6.0)
    newest = jobs.latest_checkpoint(job.id)
    assert newest is not None and (newest.epoch, newest.step) == (second, 25)
    assert jobs.latest_checkpoint(other.id) is None


def test_the_result_and_the_latest_sample_are_kept(jobs: JobStore) -> None:
    job = jobs.create(TRAIN, 1.0)
    jobs.set_result(job.id, "/r/result.npy")
    jobs.set_sample(job.id, 5, "To be")
    jobs.set_sample(job.id, 10, "é" * (SAMPLE_LENGTH_MAX + 1))
    now = jobs.get(job.id)
    assert now is not None and (now.result, now.sample_step) == ("/r/result.npy", 10)
    assert now.sample == "é" * SAMPLE_LENGTH_MAX
    with pytest.raises(LookupError):
        jobs.set_sample("jx", 1, "")
    with pytest.raises(LookupError):
        jobs.set_result("jx", "")
