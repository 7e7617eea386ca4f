"""A database of its own for each test, and the stores over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.stores.database import Database
from backend.stores.devices import DeviceStore
from backend.stores.jobs import JobStore
from backend.stores.ledger import Ledger


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "tileweave.sqlite")
    yield database
    database.close()


@pytest.fixture
def jobs(db: Database) -> JobStore:
    return JobStore(db)


@pytest.fixture
def ledger(db: Database) -> Ledger:
    return Ledger(db)


@pytest.fixture
def devices(db: Database) -> DeviceStore:
    return DeviceStore(db)
