"""The one SQLite file behind jobs, the ledger and devices: connections, transactions, the schema's version.

Many processes open the file (gateways, coordinators, the supervisor) in WAL mode, so that readers never wait. A write
is one `BEGIN IMMEDIATE` transaction: it takes the write lock before it reads, so what it read is still true when it
commits. Within a process a lock queues the writers; between processes SQLite's busy timeout and a bounded retry do.

Durability. A commit is in the WAL file, in the kernel's cache, before `write()` returns: it survives kill -9 of any
process. `synchronous=NORMAL` does not wait for the disk, so a power cut may lose the last ledger rows (work is
repeated, nothing is ever half there, the file is never corrupt) and tiles stay cheap. `write(durable=True)` sets FULL:
accepted jobs, their states and their checkpoints are on the disk, with every commit before them, when it returns.

Left out: backups and any knowledge of the tables.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.stores.schema import MIGRATIONS

BUSY_TIMEOUT_MS = 5_000
BEGIN_ATTEMPTS_MAX = 6  # x BUSY_TIMEOUT_MS: a writer gives up after half a minute
WAL_BYTES_KEPT_MAX = 64 << 20
INTEGER_MAX = 2**63 - 1  # what an SQLite column holds


class DatabaseBusy(RuntimeError):
    """Another process held the write lock for too long."""


class SchemaTooNew(RuntimeError):
    """The file was written by a newer release."""


class _Handle:
    """A thread's connection; closed with its thread, or by `Database.close`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.durable = False

    def __del__(self) -> None:
        self.connection.close()


class Database:
    """Opens (and creates or migrates) the file at `path`. Safe to share between threads; not across a fork.

    Raises SchemaTooNew where the file's version is above this release's, sqlite3.DatabaseError where it is no database.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._handles_lock = threading.Lock()
        self._writer = threading.Lock()
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # secrets' hashes and prompts are the owner's; SQLite gives -wal and -shm the same mode
        self._migrate()

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection, in autocommit: for reads. Writes go through `write`."""
        return self._handle().connection

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises. Blocks do not nest.

        Raises DatabaseBusy when the write lock cannot be had in BEGIN_ATTEMPTS_MAX x BUSY_TIMEOUT_MS.
        """
        handle = self._handle()
        connection = handle.connection
        with self._writer:
            if handle.durable != durable:  # not allowed inside a transaction, hence a property of the connection
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                handle.durable = durable
            self._begin(connection)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close every thread's connection; the object is of no more use."""
        with self._handles_lock:
            self._closed = True
            handles = list(self._handles)
        for handle in handles:
            handle.connection.close()

    def _handle(self) -> _Handle:
        handle: _Handle | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = _Handle(self._connect())
            with self._handles_lock:
                self._handles.add(handle)
        return handle

    def _connect(self) -> sqlite3.Connection:
        if self._closed:
            raise RuntimeError(f"the database {self.path} was closed")
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT_MAX}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _begin(self, connection: sqlite3.Connection) -> None:
        for _ in range(BEGIN_ATTEMPTS_MAX):
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            else:
                return
        raise DatabaseBusy(
            f"no write lock on {self.path} in {BEGIN_ATTEMPTS_MAX * BUSY_TIMEOUT_MS / 1000:.0f} s: another process has "
            "it; is a backup tool or a database shell open on the file?"
        )

    def _migrate(self) -> None:
        with self.write(durable=True) as connection:
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                raise SchemaTooNew(
                    f"{self.path} has schema version {version}, this release knows up to {len(MIGRATIONS)}: "
                    "start a release at least as new as the one that wrote it, or name another data directory"
                )
            for script in MIGRATIONS[version:]:
                for statement in _statements(script):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one; `executescript` would commit the transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise ValueError(
            f"a migration ends in an incomplete statement: {statement.strip()[:80]!r}; end it with a semicolon"
        )
