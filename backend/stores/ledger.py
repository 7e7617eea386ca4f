"""The ledger: which device computed which tile, once.

`commit` is the moment at which a verified tile becomes accepted work. One transaction inserts the rows, which are
unique on (job, epoch, step, gemm, rectangle), and adds what was new to the devices' totals, recent average, day and
streak; so credit can be granted neither twice nor without its row, whoever dies when. A replayed step is a new epoch
with rows of its own. When a step closes, its rows are folded into one sum per (job, epoch, device) and the watermark
refuses whatever comes later for it.

Two rectangles that overlap are two rows: that a tile which was cut anew earns nothing is the coordinator's rule.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from backend.credit.rules import DAY_S, Average, cobblestones, granted, score
from backend.stores.database import INTEGER_MAX, Database
from backend.stores.flop import GIGA, joined, split
from planner.shapes import Rect

QUARANTINE_S = 60.0
QUARANTINE_S_MAX = 86400.0
REASON_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class Grant:
    """A verified tile of GEMM `gemm` of `step`: exact FLOP, and the device's own seconds (a hint)."""

    device: str
    step: int
    gemm: int
    rect: Rect
    flop: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """`accepted` tiles since the last reject, rejects of all time, and the end of the quarantine (0: none)."""

    accepted: int
    rejects: int
    quarantined_until_s: float


@dataclass(slots=True)
class _Work:
    """What one commit adds to one device."""

    flop: int = 0
    tiles: int = 0
    seconds: float = 0.0


class Ledger:
    """Grants, blame and standing. Methods raise LookupError for a job or a device that does not exist."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def commit(self, job: str, epoch: int, grants: Sequence[Grant], now_s: float) -> list[bool]:
        """Grant what is new; one answer for each grant, False where its rectangle was granted before, its step is
        closed or its epoch is over. All or nothing is stored.
        """
        for grant in grants:
            if not 0 < grant.flop <= INTEGER_MAX:
                raise ValueError(f"a grant of {grant.flop} FLOP for {grant.rect}; expected 1 to {INTEGER_MAX}")
        with self._db.write() as connection:
            row = _job(connection, job)
            closed = (row["closed_epoch"], row["closed_step"])
            keys = {device: _device(connection, device)["key"] for device in {g.device for g in grants}}
            work: defaultdict[str, _Work] = defaultdict(_Work)
            answers = []
            for grant in grants:
                is_open = epoch >= row["epoch"] and (epoch, grant.step) > closed
                new = is_open and _insert(connection, row["key"], epoch, grant, keys[grant.device])
                answers.append(new)
                if new:
                    work[grant.device].flop += grant.flop
                    work[grant.device].tiles += 1
                    work[grant.device].seconds += grant.seconds
            for device, done in work.items():
                _credit(connection, _device(connection, device), done, now_s)
        return answers

    def blame(self, device: str, job: str, reason: str, now_s: float) -> Standing:
        """A wrong result: the streak starts anew, and the device sits out 60 s, twice as long at each further reject,
        at most a day.
        """
        with self._db.write() as connection:
            rejects = _device(connection, device)["rejects"] + 1
            until_s = now_s + min(QUARANTINE_S * 2.0 ** min(rejects - 1, 64), QUARANTINE_S_MAX)
            connection.execute(
                "UPDATE devices SET rejects = ?, streak = 0, quarantined_until_s = MAX(quarantined_until_s, ?),"
                " last_reject = ? WHERE id = ?",
                (rejects, until_s, f"job {job}: {reason}"[:REASON_LENGTH_MAX], device),
            )
            return _standing(_device(connection, device), now_s)

    def standing(self, device: str, now_s: float) -> Standing:
        """How far the device is trusted now."""
        return _standing(_device(self._db.connection, device), now_s)

    def close_step(self, job: str, epoch: int, step: int) -> None:
        """No more grants for steps up to `step` of `epoch` nor for earlier epochs; their rows are folded per device."""
        with self._db.write() as connection:
            row = _job(connection, job)
            epoch, step = max((epoch, step), (row["closed_epoch"], row["closed_step"]))
            bounds = {"job": row["key"], "epoch": epoch, "step": step}
            # SUM is exact below 2**63 and raises beyond; a step is far from that.
            connection.execute(
                """
                INSERT INTO ledger_folded (job, epoch, device, tiles, gflop, flop, seconds)
                SELECT job, epoch, device, COUNT(*), SUM(flop / :giga) + SUM(flop % :giga) / :giga,
                       SUM(flop % :giga) % :giga, SUM(seconds)
                FROM ledger WHERE job = :job AND (epoch, step) <= (:epoch, :step) GROUP BY epoch, device
                ON CONFLICT (job, epoch, device) DO UPDATE SET
                    tiles = tiles + excluded.tiles,
                    gflop = gflop + excluded.gflop + (flop + excluded.flop) / :giga,
                    flop = (flop + excluded.flop) % :giga,
                    seconds = seconds + excluded.seconds
                """,
                bounds | {"giga": GIGA},
            )
            connection.execute("DELETE FROM ledger WHERE job = :job AND (epoch, step) <= (:epoch, :step)", bounds)
            connection.execute("UPDATE jobs SET closed_epoch = :epoch, closed_step = :step WHERE key = :job", bounds)


def _insert(connection: sqlite3.Connection, job_key: int, epoch: int, grant: Grant, device_key: int) -> bool:
    r = grant.rect
    inserted = connection.execute(
        "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (
            job_key,
            epoch,
            grant.step,
            grant.gemm,
            r.b0,
            r.b1,
            r.m0,
            r.m1,
            r.n0,
            r.n1,
            r.k0,
            r.k1,
            device_key,
            grant.flop,
            grant.seconds,
        ),
    )
    return inserted.rowcount == 1


def _credit(connection: sqlite3.Connection, device: sqlite3.Row, done: _Work, now_s: float) -> None:
    before = Average(device["average"], device["average_s"]) if device["average"] is not None else None
    average = granted(before, cobblestones(done.flop), now_s - done.seconds, now_s)
    day = max(int(now_s // DAY_S), device["day"] or 0)
    today = joined(device["day_gflop"], device["day_flop"]) if day == device["day"] else 0
    connection.execute(
        "UPDATE devices SET gflop = ?, flop = ?, average = ?, average_s = ?, average_score = ?, day = ?, day_gflop = ?,"
        " day_flop = ?, accepted = accepted + ?, streak = streak + ?, last_seen_s = MAX(last_seen_s, ?) WHERE key = ?",
        (
            *split(joined(device["gflop"], device["flop"]) + done.flop),
            average.per_day, average.time_s, score(average),
            day, *split(today + done.flop), done.tiles, done.tiles, now_s, device["key"],
        ),
    )  # fmt: skip


def _standing(row: sqlite3.Row, now_s: float) -> Standing:
    until_s: float = row["quarantined_until_s"]
    return Standing(row["streak"], row["rejects"], until_s if until_s > now_s else 0.0)


def _job(connection: sqlite3.Connection, job: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        "SELECT key, epoch, closed_epoch, closed_step FROM jobs WHERE id = ?", (job,)
    ).fetchone()
    if row is None:
        raise LookupError(f"no job {job!r} to grant work for; JobStore.create makes one")
    return row


def _device(connection: sqlite3.Connection, device: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM devices WHERE id = ?", (device,)).fetchone()
    if row is None:
        raise LookupError(f"no device {device!r}; DeviceStore.register makes one")
    return row
