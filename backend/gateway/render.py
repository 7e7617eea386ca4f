"""Rows of the stores and live fields, as the JSON of the public interface. Pure; null stands for unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.stores.devices import DeviceRow, LeaderRow
from backend.stores.jobs import Job, StepRow

RECENT_STEPS = 10  # that speed and ETA are taken from


def job_json(
    job: Job, rows: Sequence[StepRow], has_checkpoint: bool, live: Mapping[str, Any], now_s: float
) -> dict[str, Any]:
    """`rows`: the last RECENT_STEPS steps. `live`: fields the job's coordinator keeps in Redis."""
    running = job.state == "running"
    seconds = sum(row.seconds for row in rows)
    flop = sum(row.flop_offloaded + row.flop_local for row in rows)
    left = job.steps - (job.step or 0)
    return {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "recipe": job.recipe,
        "config": {} if job.kind == "gemm" else job.config,
        "mode": job.mode,
        "accuracy": job.accuracy,
        "wire": job.wire,
        "state": job.state,
        "reason": job.reason,
        "step": job.step,
        "steps": job.steps or None,
        "loss": job.loss,
        "first_loss": job.first_loss,
        "epoch": job.epoch,
        "created_s": job.created_s,
        "started_s": job.started_s,
        "ended_s": job.ended_s,
        "elapsed_s": None if job.started_s is None else (job.ended_s or now_s) - job.started_s,
        "samples_per_s": sum(row.samples for row in rows) / seconds if seconds > 0 else None,
        "unit": rows[-1].unit if rows else None,
        "tiles": live.get("tiles"),
        "flop": live.get("flop"),
        "gflops": live.get("gflops") if running else None,
        "tiles_per_s": live.get("tiles_per_s") if running else None,
        "devices": live.get("devices", 0) if running else 0,
        "eta_s": left * seconds / len(rows) if running and rows and job.steps else None,
        "bytes_per_step": sum(row.bytes_down + row.bytes_up for row in rows) / len(rows) if rows else None,
        "offloaded_flop_share": sum(row.flop_offloaded for row in rows) / flop if flop else None,
        "waiting": _waiting(job, live),
        "sample": None if job.sample is None else {"step": job.sample_step, "text": job.sample},
        "validation": None if job.validation is None else {"step": job.validation_step, "value": job.validation},
        "has_checkpoint": has_checkpoint,
        "has_result": job.result is not None,
    }


def _waiting(job: Job, live: Mapping[str, Any]) -> str | None:
    if job.state == "queued":
        return "waiting for its turn"
    if job.state != "running":
        return None
    return live.get("waiting") if live else "starting"


def device_json(device: DeviceRow, live: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """`live`: fields that the device's gateway keeps in Redis while it is connected.

    `claimed_flops` is what the device said at joining, of all its workers; `measured_flops` what the server made of its
    results, of one worker, null before the first; `flops` what all workers give, by the latter where it is known."""
    online = bool(live)
    claimed, measured = live.get("claimed_flops"), live.get("measured_flops")
    return {
        "id": device.id,
        "name": device.name,
        "online": online,
        "state": live.get("state") if online else "offline",
        "reason": live.get("reason", ""),
        "job": live.get("job"),
        "kernel": live.get("kernel", device.kernel),
        "workers": live.get("workers"),
        "flops": claimed if measured is None else measured * live.get("workers", 1),
        "claimed_flops": claimed,
        "measured_flops": measured,
        "down_bps": live.get("down_bps"),
        "up_bps": live.get("up_bps"),
        "rtt_s": live.get("rtt_s"),
        "accepted": device.accepted,
        "rejects": device.rejects,
        "flop": device.flop,
        "credit": device.credit,
        "rac": device.rac,
        "first_seen_s": device.first_seen_s,
        "last_seen_s": now_s if online else device.last_seen_s,
        "quarantined_until_s": device.quarantined_until_s,
    }


def leader_json(row: LeaderRow, online: bool) -> dict[str, Any]:
    """One line of a board."""
    return {
        "rank": row.rank,
        "id": row.id,
        "name": row.name,
        "flop": row.flop,
        "credit": row.credit,
        "rac": row.rac,
        "day_credit": row.day_credit,
        "online": online,
    }
