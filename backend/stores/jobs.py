"""Jobs: what was asked for, where it stands, its metrics, its newest checkpoint.

`STATES` is the whole life of a job. A run of its script is an *epoch*: after a crash the job begins the next epoch from
its newest checkpoint and replays the steps after it. Writes that carry an epoch are fenced by it, so that a coordinator
that was thought dead cannot write over its successor's rows.

A cancelled job is cancelled from the moment `request_cancel` returns; stopping its processes is the supervisor's part.
Everything here but metrics and samples is written durably (see database.py).
"""

from __future__ import annotations

import builtins
import json
import math
import secrets
import sqlite3
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from backend.stores.database import Database
from tileweave.protocol.elements import Wire
from tileweave.protocol.messages import Accuracy

Kind = Literal["train", "gemm", "run"]
"""train: a recipe's script; gemm: one product; run: a script that somebody starts beside the server."""

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]

# From a state to those that may follow. A job whose processes died stays `running`: its next epoch begins.
STATES: dict[State, frozenset[State]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ENDED = frozenset(state for state, after in STATES.items() if not after)
REASON_LENGTH_MAX = 4_000
SAMPLE_LENGTH_MAX = 4_000
LIST_LIMIT_MAX = 1_000
METRICS_LIMIT_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the admin asked for. `steps` 0: only the script knows. `data` names a dataset, `inputs` the uploaded files
    of a gemm job by role."""

    kind: Kind
    name: str
    recipe: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    mode: str = "tiles"
    accuracy: Accuracy = "rowwise"
    wire: Wire = "f32"
    weight: float = 1.0
    data: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSpec):
    """A job as stored. `step` and `loss` are of the latest step reported, `first_loss` of the first (None before);
    `validation` is the latest figure on data held out."""

    id: str
    state: State
    reason: str
    epoch: int
    step: int | None
    loss: float | None
    first_loss: float | None
    created_s: float
    started_s: float | None
    ended_s: float | None
    result: str | None
    sample: str | None
    sample_step: int | None
    validation: float | None
    validation_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step; FLOP are of its GEMMs, bytes and tiles of what went out, `time_s` when it was reported.
    `validation` comes after the row, where the script validated after this step."""

    step: int
    loss: float | None
    seconds: float
    samples: int
    unit: str
    tiles: int
    flop_offloaded: int
    flop_local: int
    bytes_down: int
    bytes_up: int
    devices: int
    time_s: float
    validation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A complete checkpoint file."""

    epoch: int
    step: int
    path: str
    sha256: str
    size: int
    time_s: float


class JobStore:
    """Every method is one transaction; a job id that does not exist raises LookupError where a value is expected."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def create(self, spec: JobSpec, now_s: float) -> Job:
        """Accept a job: it survives anything from here on."""
        job_id = "j" + secrets.token_hex(6)
        with self._db.write(durable=True) as connection:
            connection.execute(
                "INSERT INTO jobs (id, kind, name, recipe, config, steps, mode, accuracy, wire, weight, data, inputs,"
                " created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    job_id, spec.kind, spec.name, spec.recipe, json.dumps(spec.config), spec.steps, spec.mode,
                    spec.accuracy, spec.wire, spec.weight, spec.data, json.dumps(spec.inputs), now_s,
                ),
            )  # fmt: skip
            return _job(_select(connection, job_id))

    def get(self, job_id: str) -> Job | None:
        """The job, or None."""
        row = self._db.connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return _job(row) if row else None

    def list(self, states: Collection[State] | None = None, limit: int = 100, offset: int = 0) -> list[Job]:
        """Newest first; `states` None means all."""
        rows = self._db.connection.execute(
            "SELECT * FROM jobs WHERE state IN (SELECT value FROM json_each(?)) ORDER BY key DESC LIMIT ? OFFSET ?",
            (_array(states), min(limit, LIST_LIMIT_MAX), offset),
        )
        return [_job(row) for row in rows]

    def count(self, states: Collection[State] | None = None) -> int:
        """How many jobs `list` pages through."""
        query = "SELECT COUNT(*) FROM jobs WHERE state IN (SELECT value FROM json_each(?))"
        return int(self._db.connection.execute(query, (_array(states),)).fetchone()[0])

    def begin_epoch(self, job_id: str, now_s: float) -> int:
        """A run begins: queued or running -> running, with the next epoch (the first is 1), which is returned.

        Raises LookupError for no such job and ValueError for one that has ended.
        """
        with self._db.write(durable=True) as connection:
            state = _select(connection, job_id)["state"]
            if state in ENDED:
                raise ValueError(f"job {job_id} is {state}; only a queued or running job can begin an epoch")
            row = connection.execute(
                "UPDATE jobs SET state = 'running', reason = '', epoch = epoch + 1, started_s = COALESCE(started_s, ?)"
                " WHERE id = ? RETURNING epoch",
                (now_s, job_id),
            ).fetchone()
            return int(row["epoch"])

    def set_state(
        self, job_id: str, state: State, reason: str, now_s: float, only_from: Collection[State] | None = None
    ) -> bool:
        """Move the job to `state` if it is now in `only_from` (None: any) and STATES allows it. False if it stayed.

        Raises ValueError where no state of `only_from` may precede `state`.
        """
        before = [s for s, after in STATES.items() if state in after and (only_from is None or s in only_from)]
        if not before:
            raise ValueError(f"no job goes to {state!r} from {sorted(only_from or STATES)}; the moves are {STATES}")
        with self._db.write(durable=True) as connection:
            return _move(connection, job_id, state, reason, now_s, before)

    def request_cancel(self, job_id: str, now_s: float) -> Job:
        """Cancel a queued or running job; one that has ended stays as it is. Returns the job as it then stands."""
        with self._db.write(durable=True) as connection:
            _move(connection, job_id, "cancelled", "cancelled by the admin", now_s, ["queued", "running"])
            return _job(_select(connection, job_id))

    def record_step(self, job_id: str, epoch: int, row: StepRow) -> bool:
        """Store a step's metrics, over those of an earlier epoch. False (nothing stored) where `epoch` is over."""
        loss = row.loss if row.loss is not None and math.isfinite(row.loss) else None  # JSON has no NaN
        with self._db.write() as connection:
            key = _key_at(connection, job_id, epoch)
            if key is None:
                return False
            connection.execute(
                "INSERT OR REPLACE INTO metrics (job, step, loss, seconds, samples, unit, tiles, flop_offloaded,"
                " flop_local, bytes_down, bytes_up, devices, time_s, validation) VALUES (:job, :step, :loss, :seconds,"
                " :samples, :unit, :tiles, :flop_offloaded, :flop_local, :bytes_down, :bytes_up, :devices, :time_s,"
                " :validation)",
                asdict(row) | {"job": key, "loss": loss},
            )
            connection.execute(
                "UPDATE jobs SET step = ?, loss = ?, first_loss = (SELECT loss FROM metrics"
                " WHERE job = key AND loss IS NOT NULL ORDER BY step LIMIT 1) WHERE key = ?",
                (row.step, loss, key),
            )
            return True

    def record_validation(self, job_id: str, epoch: int, step: int, value: float) -> bool:
        """Store the figure on data held out, of the job and of the step's row. False (nothing stored) where `epoch` is
        over, or the value is not finite."""
        if not math.isfinite(value):
            return False
        with self._db.write() as connection:
            key = _key_at(connection, job_id, epoch)
            if key is None:
                return False
            connection.execute("UPDATE metrics SET validation = ? WHERE job = ? AND step = ?", (value, key, step))
            connection.execute("UPDATE jobs SET validation = ?, validation_step = ? WHERE key = ?", (value, step, key))
            return True

    def metrics(self, job_id: str, after_step: int = -1, limit: int = 10_000) -> builtins.list[StepRow]:
        """The first `limit` steps after `after_step`, in order."""
        rows = self._db.connection.execute(
            "SELECT * FROM metrics WHERE job = (SELECT key FROM jobs WHERE id = ?) AND step > ? ORDER BY step LIMIT ?",
            (job_id, after_step, min(limit, METRICS_LIMIT_MAX)),
        )
        return [StepRow(**{f.name: row[f.name] for f in fields(StepRow)}) for row in rows]

    def record_checkpoint(
        self, job_id: str, epoch: int, step: int, path: str, sha256: str, size: int, now_s: float
    ) -> bool:
        """The file is complete: the next epoch goes on from it. False (nothing stored) where `epoch` is over."""
        with self._db.write(durable=True) as connection:
            key = _key_at(connection, job_id, epoch)
            if key is None:
                return False
            connection.execute(
                "INSERT OR REPLACE INTO checkpoints (job, epoch, step, path, sha256, size, time_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (key, epoch, step, path, sha256, size, now_s),
            )
            return True

    def latest_checkpoint(self, job_id: str) -> CheckpointRow | None:
        """The newest complete checkpoint, or None."""
        row = self._db.connection.execute(
            "SELECT * FROM checkpoints WHERE job = (SELECT key FROM jobs WHERE id = ?)", (job_id,)
        ).fetchone()
        return CheckpointRow(**{f.name: row[f.name] for f in fields(CheckpointRow)}) if row else None

    def set_result(self, job_id: str, path: str) -> None:
        """Name the file that GET result serves."""
        with self._db.write(durable=True) as connection:
            _select(connection, job_id)
            connection.execute("UPDATE jobs SET result = ? WHERE id = ?", (path, job_id))

    def set_sample(self, job_id: str, step: int, text: str) -> None:
        """Keep the latest text that the model generated, cut to SAMPLE_LENGTH_MAX characters."""
        with self._db.write() as connection:
            _select(connection, job_id)
            connection.execute(
                "UPDATE jobs SET sample = ?, sample_step = ? WHERE id = ?", (text[:SAMPLE_LENGTH_MAX], step, job_id)
            )


def _move(
    connection: sqlite3.Connection, job_id: str, state: State, reason: str, now_s: float, before: list[State]
) -> bool:
    _select(connection, job_id)
    ended_s = now_s if state in ENDED else None
    moved = connection.execute(
        "UPDATE jobs SET state = ?, reason = ?, ended_s = ? WHERE id = ? AND state IN (SELECT value FROM json_each(?))",
        (state, reason[:REASON_LENGTH_MAX], ended_s, job_id, _array(before)),
    )
    return moved.rowcount == 1


def _select(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise LookupError(f"no job {job_id!r}; GET /api/v1/jobs lists those there are")
    return row


def _key_at(connection: sqlite3.Connection, job_id: str, epoch: int) -> int | None:
    """The job's row key if `epoch` is its current one, else None."""
    row = _select(connection, job_id)
    return int(row["key"]) if row["epoch"] == epoch else None


def _array(states: Collection[State] | None) -> str:
    return json.dumps(list(STATES if states is None else states))


def _job(row: sqlite3.Row) -> Job:
    stored = {f.name: row[f.name] for f in fields(Job)}
    return Job(**{**stored, "config": json.loads(row["config"]), "inputs": json.loads(row["inputs"])})
