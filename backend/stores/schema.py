"""The database's schema, as a list of migrations: entry i takes a database from version i to i + 1.

A released entry is never edited; a change is a new entry at the end. `user_version` of the file counts those applied.

FLOP totals are exact integers that outgrow SQLite's 63 bits (1 TFLOP/s for 107 days), so every total is two columns:
`gflop` whole thousand-millions and `flop` the rest, 0 <= flop < 10**9. Times are unix seconds.
"""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    -- A job and where it stands. Grants are refused for epochs before `epoch`, and up to (closed_epoch, closed_step).
    CREATE TABLE jobs (
        key INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        recipe TEXT NOT NULL,
        config TEXT NOT NULL,              -- JSON object
        steps INTEGER NOT NULL,
        mode TEXT NOT NULL,
        weight REAL NOT NULL,
        data TEXT,
        inputs TEXT NOT NULL,              -- JSON object
        state TEXT NOT NULL DEFAULT 'queued',
        reason TEXT NOT NULL DEFAULT '',
        epoch INTEGER NOT NULL DEFAULT 0,  -- counts runs: a script that starts again replays steps in a new epoch
        step INTEGER,                      -- of the latest metrics row
        loss REAL,
        first_loss REAL,
        created_s REAL NOT NULL,
        started_s REAL,
        ended_s REAL,
        result TEXT,
        sample TEXT,
        sample_step INTEGER,
        closed_epoch INTEGER NOT NULL DEFAULT -1,
        closed_step INTEGER NOT NULL DEFAULT -1
    );
    CREATE INDEX jobs_by_state ON jobs (state);

    -- One row a step; a replayed step overwrites.
    CREATE TABLE metrics (
        job INTEGER NOT NULL REFERENCES jobs (key),
        step INTEGER NOT NULL,
        loss REAL,
        seconds REAL NOT NULL,
        samples INTEGER NOT NULL,
        unit TEXT NOT NULL,
        tiles INTEGER NOT NULL,
        flop_offloaded INTEGER NOT NULL,
        flop_local INTEGER NOT NULL,
        bytes_down INTEGER NOT NULL,
        bytes_up INTEGER NOT NULL,
        devices INTEGER NOT NULL,
        time_s REAL NOT NULL,
        PRIMARY KEY (job, step)
    ) WITHOUT ROWID;

    -- The newest complete checkpoint of each job: the only one that a run goes on from.
    CREATE TABLE checkpoints (
        job INTEGER PRIMARY KEY REFERENCES jobs (key),
        epoch INTEGER NOT NULL,
        step INTEGER NOT NULL,
        path TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        size INTEGER NOT NULL,
        time_s REAL NOT NULL
    );

    CREATE TABLE devices (
        key INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        secret_sha256 BLOB NOT NULL,
        name TEXT NOT NULL,
        agent TEXT NOT NULL,
        kernel TEXT NOT NULL DEFAULT '',
        first_seen_s REAL NOT NULL,
        last_seen_s REAL NOT NULL,
        gflop INTEGER NOT NULL DEFAULT 0,      -- verified FLOP of all time
        flop INTEGER NOT NULL DEFAULT 0,
        average REAL,                          -- cobblestones a day as of average_s
        average_s REAL,
        average_score REAL,                    -- orders averages whatever their average_s
        day INTEGER,                           -- UTC day that day_gflop and day_flop belong to
        day_gflop INTEGER NOT NULL DEFAULT 0,
        day_flop INTEGER NOT NULL DEFAULT 0,
        accepted INTEGER NOT NULL DEFAULT 0,   -- tiles of all time
        streak INTEGER NOT NULL DEFAULT 0,     -- tiles since the last reject
        rejects INTEGER NOT NULL DEFAULT 0,
        quarantined_until_s REAL NOT NULL DEFAULT 0,
        last_reject TEXT NOT NULL DEFAULT ''   -- which job, and why
    );
    -- Each board is one index in its own order; equal scores stand in order of registration (an index ends in the key).
    CREATE INDEX devices_by_average ON devices (average_score DESC) WHERE average_score IS NOT NULL;
    CREATE INDEX devices_by_total ON devices (gflop DESC, flop DESC) WHERE accepted > 0;
    CREATE INDEX devices_by_day ON devices (day, day_gflop DESC, day_flop DESC) WHERE day IS NOT NULL;
    CREATE INDEX devices_by_last_seen ON devices (last_seen_s DESC);

    -- One row a verified tile of a step still open: what makes a second grant for the same rectangle impossible.
    CREATE TABLE ledger (
        job INTEGER NOT NULL REFERENCES jobs (key),
        epoch INTEGER NOT NULL,
        step INTEGER NOT NULL,
        gemm INTEGER NOT NULL,
        b0 INTEGER NOT NULL, b1 INTEGER NOT NULL,
        m0 INTEGER NOT NULL, m1 INTEGER NOT NULL,
        n0 INTEGER NOT NULL, n1 INTEGER NOT NULL,
        device INTEGER NOT NULL REFERENCES devices (key),
        flop INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (job, epoch, step, gemm, b0, b1, m0, m1, n0, n1)
    ) WITHOUT ROWID;

    -- Rows of closed steps, summed.
    CREATE TABLE ledger_folded (
        job INTEGER NOT NULL REFERENCES jobs (key),
        epoch INTEGER NOT NULL,
        device INTEGER NOT NULL REFERENCES devices (key),
        tiles INTEGER NOT NULL,
        gflop INTEGER NOT NULL,
        flop INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (job, epoch, device)
    ) WITHOUT ROWID;
    """,
    """
    -- What a job's products are checked for: rowwise or normwise (tileweave/protocol/messages.py, Accuracy).
    ALTER TABLE jobs ADD COLUMN accuracy TEXT NOT NULL DEFAULT 'rowwise';
    """,
    """
    -- The figure on data held out, of the steps after which it was taken, and the latest.
    ALTER TABLE metrics ADD COLUMN validation REAL;
    ALTER TABLE jobs ADD COLUMN validation REAL;
    ALTER TABLE jobs ADD COLUMN validation_step INTEGER;
    """,
    """
    -- How a job's numbers travel (tileweave/protocol/elements.py, Wire).
    ALTER TABLE jobs ADD COLUMN wire TEXT NOT NULL DEFAULT 'f32';

    -- A tile may be a partial sum over [k0, k1) of k; 0, 0: over all of it.
    ALTER TABLE ledger RENAME TO ledger_before;
    CREATE TABLE ledger (
        job INTEGER NOT NULL REFERENCES jobs (key),
        epoch INTEGER NOT NULL,
        step INTEGER NOT NULL,
        gemm INTEGER NOT NULL,
        b0 INTEGER NOT NULL, b1 INTEGER NOT NULL,
        m0 INTEGER NOT NULL, m1 INTEGER NOT NULL,
        n0 INTEGER NOT NULL, n1 INTEGER NOT NULL,
        k0 INTEGER NOT NULL, k1 INTEGER NOT NULL,
        device INTEGER NOT NULL REFERENCES devices (key),
        flop INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (job, epoch, step, gemm, b0, b1, m0, m1, n0, n1, k0, k1)
    ) WITHOUT ROWID;
    INSERT INTO ledger
        SELECT job, epoch, step, gemm, b0, b1, m0, m1, n0, n1, 0, 0, device, flop, seconds FROM ledger_before;
    DROP TABLE ledger_before;
    """,
)
