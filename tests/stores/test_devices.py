"""Devices and the boards."""

from __future__ import annotations

import pytest

from backend.credit.rules import DAY_S, HALF_LIFE_S, cobblestones
from backend.stores.database import Database
from backend.stores.devices import BOARDS, BY_LAST_SEEN, DeviceStore, Order
from backend.stores.jobs import JobSpec, JobStore
from backend.stores.ledger import Grant, Ledger
from planner.shapes import Rect

NOW = 1_800_000_000.0


def test_a_device_comes_back_with_its_secret_and_not_without(devices: DeviceStore, db: Database) -> None:
    device, secret = devices.register("Ada's laptop", "Mozilla/5.0", NOW)
    other, other_secret = devices.register("", "", NOW)
    assert device != other and secret != other_secret and len(secret) >= 32
    row = devices.authenticate(device, secret)
    assert row is not None and (row.id, row.name, row.first_seen_s) == (device, "Ada's laptop", NOW)
    for wrong in (other_secret, "", secret[:-1], secret + "x", "é"):
        assert devices.authenticate(device, wrong) is None
    assert devices.authenticate("dnothing", secret) is None
    assert secret.encode() not in b"".join(p.read_bytes() for p in db.path.parent.iterdir())


def test_hello_updates_what_a_device_says_of_itself(devices: DeviceStore) -> None:
    device, _ = devices.register("a", "b", NOW)
    devices.update(device, "c", "d", "wasm-simd", NOW + 5)
    row = devices.get(device, NOW + 5)
    assert row is not None
    assert (row.name, row.agent, row.kernel, row.first_seen_s, row.last_seen_s) == ("c", "d", "wasm-simd", NOW, NOW + 5)
    assert (row.flop, row.credit, row.rac, row.accepted, row.rejects, row.quarantined_until_s) == (0, 0, 0, 0, 0, 0)
    with pytest.raises(LookupError, match="no device 'dx'"):
        devices.update("dx", "", "", "", NOW)
    assert devices.get("dx", NOW) is None


def test_devices_are_listed_last_seen_first(devices: DeviceStore) -> None:
    made = [devices.register(str(i), "", NOW + i % 2)[0] for i in range(4)]
    assert [d.id for d in devices.list(10, 0, NOW)] == [made[1], made[3], made[0], made[2]]
    assert [d.id for d in devices.list(2, 1, NOW)] == [made[3], made[0]]
    assert devices.count() == 4


def test_the_boards_rank_by_average_by_total_and_by_today(devices: DeviceStore, jobs: JobStore, ledger: Ledger) -> None:
    job = jobs.create(JobSpec(kind="train", name="x"), NOW).id
    old, fresh, idle = (devices.register(name, "", NOW)[0] for name in ("old", "fresh", "idle"))
    grant(ledger, job, old, 1, 50 * 10**12, NOW)
    later = NOW + 4 * HALF_LIFE_S
    grant(ledger, job, fresh, 2, 20 * 10**12, later)

    rows, total = devices.leaderboard("total", 10, 0, later)
    assert [(r.rank, r.id, r.flop) for r in rows] == [(1, old, 50 * 10**12), (2, fresh, 20 * 10**12)]
    assert total == 2  # `idle` has nothing to show
    rows, total = devices.leaderboard("rac", 10, 0, later)
    assert [(r.rank, r.name) for r in rows] == [(1, "fresh"), (2, "old")] and total == 2
    assert rows[1].rac == pytest.approx(24 * cobblestones(50 * 10**12) / 16)
    rows, total = devices.leaderboard("day", 10, 0, later)
    assert [(r.rank, r.name, r.day_credit) for r in rows] == [(1, "fresh", cobblestones(20 * 10**12))] and total == 1
    assert devices.leaderboard("day", 10, 0, later + DAY_S) == ([], 0)
    assert devices.get(idle, later) is not None


def test_the_day_ends_at_midnight_utc(devices: DeviceStore, jobs: JobStore, ledger: Ledger) -> None:
    job = jobs.create(JobSpec(kind="train", name="x"), NOW).id
    device, _ = devices.register("a", "", NOW)
    midnight = (NOW // DAY_S + 1) * DAY_S
    for gemm, (now_s, flop) in enumerate([(midnight - 2, 10**12), (midnight - 1, 10**12), (midnight, 3 * 10**12)]):
        grant(ledger, job, device, gemm, flop, now_s)
        row = devices.get(device, now_s)
        assert row is not None
        assert row.day_credit == cobblestones([10**12, 2 * 10**12, 3 * 10**12][gemm])
    assert row.flop == 5 * 10**12


def grant(ledger: Ledger, job: str, device: str, gemm: int, flop: int, now_s: float) -> None:
    assert ledger.commit(job, 1, [Grant(device, 0, gemm, Rect(0, 1, 0, 8, 0, 8), flop, 0.1)], now_s) == [True]


@pytest.fixture
def crowd(db: Database) -> int:
    """100,000 devices in a hundred groups of equal scores."""
    count = 100_000
    day = int(NOW // DAY_S)
    with db.write() as connection:
        connection.executemany(
            "INSERT INTO devices (id, secret_sha256, name, agent, first_seen_s, last_seen_s, gflop, flop, average,"
            " average_s, average_score, day, day_gflop, day_flop, accepted)"
            " VALUES (?, x'', '', '', 0, 0, ?, 7, ?, ?, ?, ?, ?, 3, 1)",
            ((f"d{i}", i % 100, 1.0 + i % 100, NOW, float(i % 100), day, i % 100) for i in range(count)),
        )
    return count


@pytest.mark.parametrize("order", BOARDS)
def test_a_board_of_a_hundred_thousand_is_read_from_its_index_in_a_stable_order(
    crowd: int, db: Database, devices: DeviceStore, order: Order
) -> None:
    for query in BOARDS[order]:
        parameters = {"day": int(NOW // DAY_S), "limit": 100, "offset": 0}
        plan = [row["detail"] for row in db.connection.execute(f"EXPLAIN QUERY PLAN {query}", parameters)]
        assert len(plan) == 1 and "INDEX devices_by_" in plan[0], plan  # no line for a sort
    pages = [devices.leaderboard(order, 100, offset, NOW) for offset in range(0, 2_000, 100)]
    assert all(total == crowd for _, total in pages)
    rows = [row for page, _ in pages for row in page]
    assert [row.rank for row in rows] == list(range(1, 2_001))
    assert [row.id for row in rows] == [f"d{i}" for group in (99, 98) for i in range(group, crowd, 100)]
    last, _ = devices.leaderboard(order, 100, crowd - 1, NOW)
    assert [row.rank for row in last] == [crowd]


def test_the_list_of_devices_is_read_from_an_index_too(crowd: int, db: Database, devices: DeviceStore) -> None:
    plan = db.connection.execute(f"EXPLAIN QUERY PLAN {BY_LAST_SEEN}", (10, 10)).fetchall()
    assert [row["detail"] for row in plan] == ["SCAN devices USING INDEX devices_by_last_seen"]
    assert devices.count() == crowd
