"""Opening, migrating, transactions, and what a killed writer leaves behind."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backend.stores import database
from backend.stores.database import Database, DatabaseBusy, SchemaTooNew
from backend.stores.jobs import JobStore
from backend.stores.schema import MIGRATIONS


def test_a_new_file_gets_the_schema_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tileweave.sqlite"
    db = Database(path)
    assert db.connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
    assert db.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.connection.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    assert {p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {0o600}
    db.close()


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    db = Database(tmp_path / "t.sqlite")
    with db.write() as connection:
        insert_device(connection, "d1")
    db.close()
    again = Database(tmp_path / "t.sqlite")
    assert ids(again) == ["d1"]
    again.close()


def test_a_schema_from_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(
        SchemaTooNew,
        match=rf"has schema version {len(MIGRATIONS) + 1}, this release knows up to {len(MIGRATIONS)}: start a",
    ):
        Database(path)


def test_migrations_run_once_each_in_order_and_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.sqlite"
    Database(path).close()
    more = (
        *MIGRATIONS,
        "-- a comment; with a semicolon\nCREATE TABLE extra (x TEXT);\nINSERT INTO extra VALUES ('a;b');",
    )
    monkeypatch.setattr(database, "MIGRATIONS", (*more, "CREATE TABLE half (x);\nCREATE TABLE extra (y);"))
    with pytest.raises(sqlite3.OperationalError, match="extra already exists"):
        Database(path)
    monkeypatch.setattr(database, "MIGRATIONS", more)
    for _ in range(2):
        db = Database(path)
        assert [row[0] for row in db.connection.execute("SELECT x FROM extra")] == ["a;b"]
        assert db.connection.execute("SELECT COUNT(*) FROM sqlite_schema WHERE name = 'half'").fetchone()[0] == 0
        db.close()


def test_a_job_of_the_first_release_is_row_wise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.sqlite"
    monkeypatch.setattr(database, "MIGRATIONS", MIGRATIONS[:1])
    db = Database(path)
    with db.write() as connection:
        connection.execute(
            "INSERT INTO jobs (id, kind, name, recipe, config, steps, mode, weight, inputs, created_s)"
            " VALUES ('j1', 'gemm', '', 'gemm', '{}', 1, 'tiles', 1, '{}', 0)"
        )
    db.close()
    monkeypatch.undo()
    again = Database(path)
    job = JobStore(again).get("j1")
    assert job is not None and job.accuracy == "rowwise"
    again.close()


def test_an_incomplete_migration_is_our_bug_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MIGRATIONS", ("CREATE TABLE a (x)",))
    with pytest.raises(ValueError, match="incomplete statement"):
        Database(tmp_path / "t.sqlite")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        Database(path)


def test_a_block_that_raises_leaves_nothing(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.write() as connection:
        insert_device(connection, "d1")
        raise ZeroDivisionError
    assert ids(db) == []
    with db.write() as connection:
        insert_device(connection, "d2")
    assert ids(db) == ["d2"]


def test_durable_writes_wait_for_the_disk_and_others_do_not(db: Database) -> None:
    for durable, level in ((True, 2), (False, 1), (True, 2)):
        with db.write(durable=durable) as connection:
            assert connection.execute("PRAGMA synchronous").fetchone()[0] == level


def test_a_lock_held_by_another_process_ends_in_a_clear_error(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BEGIN_ATTEMPTS_MAX", 2)
    db.connection.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(db.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseBusy, match="another process has it"), db.write():
        pass
    other.execute("ROLLBACK")
    other.close()
    with db.write() as connection:
        insert_device(connection, "d1")
    assert ids(db) == ["d1"]


def test_readers_see_the_last_commit_while_a_writer_is_at_work(db: Database) -> None:
    seen: list[list[str]] = []
    with db.write() as connection:
        insert_device(connection, "d1")
        reader = threading.Thread(target=lambda: seen.append(ids(db)))
        reader.start()
        reader.join(timeout=30)
    assert seen == [[]]
    assert ids(db) == ["d1"]


def test_connections_end_with_their_threads_and_with_the_database(db: Database) -> None:
    for _ in range(20):
        thread = threading.Thread(target=lambda: ids(db))
        thread.start()
        thread.join(timeout=30)
    assert len(db._handles) == 1  # this thread's
    connection = db.connection
    db.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    late: list[BaseException] = []

    def use() -> None:
        try:
            ids(db)
        except RuntimeError as error:
            late.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=30)
    assert "was closed" in str(late[0])


WRITER = """
import sys
from pathlib import Path
from backend.stores.database import Database
db = Database(Path(sys.argv[1]))
for i in range(50):
    with db.write() as connection:
        connection.execute("INSERT INTO devices (id, secret_sha256, name, agent, first_seen_s, last_seen_s) "
                           "VALUES (?, x'', '', '', 0, 0)", (f"whole{i}",))
with db.write() as connection:
    for i in range(5000):  # enough to spill into the WAL file before the commit
        connection.execute("INSERT INTO devices (id, secret_sha256, name, agent, first_seen_s, last_seen_s) "
                           "VALUES (?, x'', hex(randomblob(500)), '', 0, 0)", (f"half{i}",))
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_kill_9_inside_a_transaction_keeps_what_was_committed_and_nothing_else(db: Database) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(db.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "inside\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    with db.write() as connection:  # the dead process's lock is free
        insert_device(connection, "after")
    assert sorted(ids(db)) == sorted([*(f"whole{i}" for i in range(50)), "after"])
    assert db.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def insert_device(connection: sqlite3.Connection, device: str) -> None:
    connection.execute(
        "INSERT INTO devices (id, secret_sha256, name, agent, first_seen_s, last_seen_s) VALUES (?, x'', '', '', 0, 0)",
        (device,),
    )


def ids(db: Database) -> list[str]:
    return [row["id"] for row in db.connection.execute("SELECT id FROM devices ORDER BY key")]
