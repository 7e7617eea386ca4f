"""Devices: who they are, and what the boards show of them.

A device is made once, with a random secret that it keeps and of which only the hash is stored; with it the device comes
back after a reconnect. The columns of work and standing are written by the ledger, in the transaction that grants them;
here they are read. Each board is one index, read in its own order: what ranks a device never changes with time alone
(see `score` in backend/credit/rules.py), so 100,000 devices cost no more to page through than ten.

Left out: whether a device is online, and its live figures; those are the gateway's, in Redis.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import secrets
import sqlite3
from dataclasses import dataclass
from typing import Literal

from backend.credit.rules import DAY_S, Average, cobblestones, decayed
from backend.stores.database import Database
from backend.stores.flop import joined

Order = Literal["rac", "total", "day"]
LIST_LIMIT_MAX = 1_000
BY_LAST_SEEN = "SELECT * FROM devices ORDER BY last_seen_s DESC, key LIMIT ? OFFSET ?"

# A board shows the devices that have something to show on it: its lines, and how many there are.
BOARDS: dict[Order, tuple[str, str]] = {
    "rac": (
        "SELECT * FROM devices WHERE average_score IS NOT NULL ORDER BY average_score DESC, key"
        " LIMIT :limit OFFSET :offset",
        "SELECT COUNT(*) FROM devices WHERE average_score IS NOT NULL",
    ),
    "total": (
        "SELECT * FROM devices WHERE accepted > 0 ORDER BY gflop DESC, flop DESC, key LIMIT :limit OFFSET :offset",
        "SELECT COUNT(*) FROM devices WHERE accepted > 0",
    ),
    "day": (
        "SELECT * FROM devices WHERE day = :day ORDER BY day_gflop DESC, day_flop DESC, key"
        " LIMIT :limit OFFSET :offset",
        "SELECT COUNT(*) FROM devices WHERE day = :day",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """A device as stored. `flop` is verified work of all time, `credit` the same in cobblestones, `rac` its recent
    average per day as of the moment asked for, `day_credit` that of the current UTC day; `accepted` counts tiles of all
    time, `streak` those since the last reject. `quarantined_until_s` is 0 where there is no quarantine.
    """

    id: str
    name: str
    agent: str
    kernel: str
    first_seen_s: float
    last_seen_s: float
    flop: int
    credit: float
    rac: float
    day_credit: float
    accepted: int
    streak: int
    rejects: int
    quarantined_until_s: float
    last_reject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRow:
    """A line of a board; ranks count from 1, devices with the same score in order of registration."""

    rank: int
    id: str
    name: str
    flop: int
    credit: float
    rac: float
    day_credit: float


class DeviceStore:
    """Registers, authenticates and lists devices."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def register(self, name: str, agent: str, now_s: float) -> tuple[str, str]:
        """Make a device; returns its id and its secret, which is not stored and cannot be asked for again."""
        device, secret = "d" + secrets.token_hex(8), secrets.token_urlsafe(32)
        with self._db.write() as connection:
            connection.execute(
                "INSERT INTO devices (id, secret_sha256, name, agent, first_seen_s, last_seen_s)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (device, _digest(secret), name, agent, now_s, now_s),
            )
        return device, secret

    def authenticate(self, device: str, secret: str) -> DeviceRow | None:
        """The device if `secret` is its secret, else None, in the same time for a wrong secret and an unknown device.
        `rac` and `day_credit` are as of the device's last visit.
        """
        row = self._select(device)
        known = row["secret_sha256"] if row else bytes(hashlib.sha256().digest_size)
        if not hmac.compare_digest(known, _digest(secret)) or row is None:
            return None
        return _device(row, row["last_seen_s"])

    def update(self, device: str, name: str, agent: str, kernel: str, now_s: float) -> None:
        """The device said HELLO (again) with these. Raises LookupError for no such device."""
        with self._db.write() as connection:
            changed = connection.execute(
                "UPDATE devices SET name = ?, agent = ?, kernel = ?, last_seen_s = MAX(last_seen_s, ?) WHERE id = ?",
                (name, agent, kernel, now_s, device),
            )
            if changed.rowcount != 1:
                raise LookupError(f"no device {device!r}; register it first")

    def get(self, device: str, now_s: float) -> DeviceRow | None:
        """The device, or None."""
        row = self._select(device)
        return _device(row, now_s) if row else None

    def list(self, limit: int, offset: int, now_s: float) -> list[DeviceRow]:
        """Last seen first."""
        rows = self._db.connection.execute(BY_LAST_SEEN, (min(limit, LIST_LIMIT_MAX), offset))
        return [_device(row, now_s) for row in rows]

    def count(self) -> int:
        """How many devices `list` pages through."""
        return int(self._db.connection.execute("SELECT COUNT(*) FROM devices").fetchone()[0])

    def leaderboard(self, order: Order, limit: int, offset: int, now_s: float) -> tuple[builtins.list[LeaderRow], int]:
        """Lines offset .. offset + limit of a board, and how many lines it has."""
        lines, count = BOARDS[order]
        parameters = {"day": int(now_s // DAY_S), "limit": min(limit, LIST_LIMIT_MAX), "offset": offset}
        total = self._db.connection.execute(count, parameters).fetchone()[0]
        rows = self._db.connection.execute(lines, parameters)
        return [_leader(rank, _device(row, now_s)) for rank, row in enumerate(rows, offset + 1)], int(total)

    def _select(self, device: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.connection.execute(
            "SELECT * FROM devices WHERE id = ?", (device,)
        ).fetchone()
        return row


def _digest(secret: str) -> bytes:
    # The secret is 256 random bits, so a plain hash is enough: there is no dictionary to try.
    return hashlib.sha256(secret.encode()).digest()


def _device(row: sqlite3.Row, now_s: float) -> DeviceRow:
    flop = joined(row["gflop"], row["flop"])
    today = row["day"] == int(now_s // DAY_S)
    average = Average(row["average"], row["average_s"]) if row["average"] is not None else None
    stored = {name: row[name] for name in _AS_STORED}
    return DeviceRow(
        **stored,
        flop=flop,
        credit=cobblestones(flop),
        rac=decayed(average, now_s),
        day_credit=cobblestones(joined(row["day_gflop"], row["day_flop"])) if today else 0.0,
        quarantined_until_s=row["quarantined_until_s"] if row["quarantined_until_s"] > now_s else 0.0,
    )


_AS_STORED = (
    "id", "name", "agent", "kernel", "first_seen_s", "last_seen_s", "accepted", "streak", "rejects", "last_reject",
)  # fmt: skip


def _leader(rank: int, row: DeviceRow) -> LeaderRow:
    return LeaderRow(
        rank=rank, id=row.id, name=row.name, flop=row.flop, credit=row.credit, rac=row.rac, day_credit=row.day_credit
    )
