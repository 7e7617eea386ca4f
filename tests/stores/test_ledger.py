"""Credit is granted once: to threads, to processes, across kill -9, epochs and closed steps."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.credit.rules import cobblestones
from backend.stores.database import Database
from backend.stores.devices import DeviceStore
from backend.stores.flop import joined
from backend.stores.jobs import JobSpec, JobStore
from backend.stores.ledger import REASON_LENGTH_MAX, Grant, Ledger, Standing
from planner.shapes import Rect

NOW = 1_800_000_000.0
TILE = Rect(0, 1, 0, 256, 0, 256)


@dataclass
class World:
    """A running job in its first epoch and two devices."""

    db: Database
    ledger: Ledger
    jobs: JobStore
    devices: DeviceStore
    job: str
    one: str
    two: str

    def flop(self, device: str) -> int:
        row = self.devices.get(device, NOW)
        assert row is not None
        return row.flop

    def rows_sum(self) -> dict[str, int]:
        """FLOP per device by the ledger's own rows, open and folded."""
        sums: Counter[str] = Counter()
        for row in self.db.connection.execute("SELECT id, ledger.flop AS f FROM ledger JOIN devices ON key = device"):
            sums[row["id"]] += row["f"]
        folded = "SELECT id, l.gflop AS g, l.flop AS f FROM ledger_folded l JOIN devices ON key = device"
        for row in self.db.connection.execute(folded):
            sums[row["id"]] += joined(row["g"], row["f"])
        return sums

    def count(self, table: str) -> int:
        return int(self.db.connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def made(path: Path) -> World:
    db = Database(path)
    jobs, devices = JobStore(db), DeviceStore(db)
    job = jobs.create(JobSpec(kind="train", name="x"), NOW).id
    assert jobs.begin_epoch(job, NOW) == 1
    return World(
        db, Ledger(db), jobs, devices, job, devices.register("1", "", NOW)[0], devices.register("2", "", NOW)[0]
    )


@pytest.fixture
def world(db: Database) -> World:
    return made(db.path)


def test_a_rectangle_is_credited_once_whoever_brings_it(world: World) -> None:
    grant = Grant(world.one, 0, 0, TILE, 1000, 0.1)
    assert world.ledger.commit(world.job, 1, [grant], NOW) == [True]
    assert world.ledger.commit(world.job, 1, [grant], NOW) == [False]
    assert world.ledger.commit(world.job, 1, [Grant(world.two, 0, 0, TILE, 1000, 0.1)], NOW) == [False]
    assert (world.flop(world.one), world.flop(world.two)) == (1000, 0)
    assert world.ledger.standing(world.one, NOW) == Standing(1, 0, 0.0)
    assert world.ledger.standing(world.two, NOW) == Standing(0, 0, 0.0)


def test_each_part_of_the_key_makes_another_rectangle(world: World) -> None:
    other_job = world.jobs.create(JobSpec(kind="train", name="y"), NOW).id
    rects = [TILE, Rect(1, 2, 0, 256, 0, 256), Rect(0, 2, 0, 256, 0, 256), Rect(0, 1, 1, 256, 0, 256)]
    rects += [Rect(0, 1, 0, 255, 0, 256), Rect(0, 1, 0, 256, 1, 256), Rect(0, 1, 0, 256, 0, 255)]
    grants = [Grant(world.one, 0, 0, rect, 1, 0.1) for rect in rects]
    grants += [Grant(world.one, 1, 0, TILE, 1, 0.1), Grant(world.one, 0, 1, TILE, 1, 0.1)]
    assert all(world.ledger.commit(world.job, 1, grants, NOW))
    assert world.ledger.commit(world.job, 2, grants[:1], NOW) == [True]
    assert world.ledger.commit(other_job, 1, grants[:1], NOW) == [True]
    assert world.flop(world.one) == len(grants) + 2


def test_a_batch_answers_each_grant_and_a_duplicate_within_it_counts_once(world: World) -> None:
    tile, other = Grant(world.one, 0, 0, TILE, 7, 0.1), Grant(world.two, 0, 1, TILE, 9, 0.1)
    assert world.ledger.commit(world.job, 1, [tile, tile, other, tile], NOW) == [True, False, True, False]
    assert world.ledger.commit(world.job, 1, [], NOW) == []
    assert (world.flop(world.one), world.flop(world.two)) == (7, 9)


def test_a_batch_that_cannot_be_stored_whole_is_not_stored_at_all(world: World) -> None:
    good = Grant(world.one, 0, 0, TILE, 7, 0.1)
    with pytest.raises(LookupError, match="no device 'dx'"):
        world.ledger.commit(world.job, 1, [good, Grant("dx", 0, 1, TILE, 7, 0.1)], NOW)
    with pytest.raises(LookupError, match="no job 'jx'"):
        world.ledger.commit("jx", 1, [good], NOW)
    for flop in (0, -1, 2**63):
        with pytest.raises(ValueError, match="expected 1 to"):
            world.ledger.commit(world.job, 1, [good, Grant(world.one, 0, 1, TILE, flop, 0.1)], NOW)
    assert world.count("ledger") == 0 and world.flop(world.one) == 0


def test_totals_are_exact_beyond_63_bits_also_when_folded(world: World) -> None:
    big = 2**63 - 1
    for step in range(5):
        grants = [Grant(world.one, step, gemm, TILE, big - gemm, 0.5) for gemm in range(3)]
        assert all(world.ledger.commit(world.job, 1, grants, NOW))
        world.ledger.close_step(world.job, 1, step)
    expected = 5 * (3 * big - 3)
    assert expected > 2**66
    assert world.flop(world.one) == expected == world.rows_sum()[world.one]
    row = world.devices.get(world.one, NOW)
    assert row is not None and row.credit == cobblestones(expected) and row.accepted == 15
    assert world.devices.leaderboard("total", 1, 0, NOW)[0][0].flop == expected


def test_a_closed_step_is_folded_and_refuses_what_comes_later(world: World) -> None:
    for step in range(3):
        for gemm, device in enumerate((world.one, world.one, world.two)):
            world.ledger.commit(world.job, 1, [Grant(device, step, gemm, TILE, 10**9 + gemm, 0.5)], NOW)
    before = world.rows_sum()
    world.ledger.close_step(world.job, 1, 1)
    assert world.rows_sum() == before
    assert (world.count("ledger"), world.count("ledger_folded")) == (3, 2)
    new = Rect(0, 1, 256, 512, 0, 256)
    late = [Grant(world.one, step, 0, new, 1, 0.1) for step in (0, 1, 2)]
    assert world.ledger.commit(world.job, 1, late, NOW) == [False, False, True]
    world.ledger.close_step(world.job, 1, 0)  # an older watermark moves nothing back
    assert world.ledger.commit(world.job, 1, [Grant(world.one, 1, 9, new, 1, 0.1)], NOW) == [False]
    tiles = world.db.connection.execute("SELECT tiles, seconds FROM ledger_folded ORDER BY device").fetchall()
    assert [tuple(row) for row in tiles] == [(4, 2.0), (2, 1.0)]
    with pytest.raises(LookupError):
        world.ledger.close_step("jx", 1, 0)


def test_a_replayed_step_is_a_new_epoch_and_the_old_one_earns_nothing_more(world: World) -> None:
    grant = Grant(world.one, 5, 0, TILE, 10, 0.1)
    assert world.ledger.commit(world.job, 1, [grant], NOW) == [True]
    assert world.jobs.begin_epoch(world.job, NOW) == 2
    assert world.ledger.commit(world.job, 1, [Grant(world.one, 5, 1, TILE, 10, 0.1)], NOW) == [False]
    assert world.ledger.commit(world.job, 2, [grant], NOW) == [True]
    world.ledger.close_step(world.job, 2, 5)
    assert world.count("ledger") == 0  # what epoch 1 left open is folded too
    assert world.flop(world.one) == 20 == world.rows_sum()[world.one]


def test_blame_doubles_the_quarantine_up_to_a_day_and_the_streak_starts_anew(world: World) -> None:
    world.ledger.commit(world.job, 1, [Grant(world.one, 0, g, TILE, 1, 0.1) for g in range(4)], NOW)
    spans = [world.ledger.blame(world.one, world.job, "zeros", NOW).quarantined_until_s - NOW for _ in range(13)]
    assert spans[:4] == [60.0, 120.0, 240.0, 480.0]
    assert spans[-2:] == [86400.0, 86400.0]
    assert world.ledger.standing(world.one, NOW) == Standing(0, 13, NOW + 86400.0)
    assert world.ledger.standing(world.one, NOW + 86400.0) == Standing(0, 13, 0.0)
    world.ledger.commit(world.job, 1, [Grant(world.one, 0, 9, TILE, 1, 0.1)], NOW)
    row = world.devices.get(world.one, NOW)
    assert row is not None
    assert (row.accepted, row.streak, row.rejects, row.last_reject) == (5, 1, 13, f"job {world.job}: zeros")
    assert row.quarantined_until_s == NOW + 86400.0
    world.ledger.blame(world.two, world.job, "x" * 10_000, NOW)
    other = world.devices.get(world.two, NOW)
    assert other is not None and len(other.last_reject) == REASON_LENGTH_MAX
    for call in (lambda: world.ledger.blame("dx", world.job, "", NOW), lambda: world.ledger.standing("dx", NOW)):
        with pytest.raises(LookupError, match="no device 'dx'"):
            call()


def test_fifty_threads_with_one_rectangle_earn_one_credit(world: World) -> None:
    start = threading.Barrier(50)

    def submit(thread: int) -> list[bool]:
        start.wait(timeout=60)
        device = world.one if thread % 2 else world.two
        return world.ledger.commit(world.job, 1, [Grant(device, 0, gemm, TILE, 100, 0.1) for gemm in range(4)], NOW)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(submit, range(50)))
    assert [sum(column) for column in zip(*answers, strict=True)] == [1, 1, 1, 1]
    assert world.flop(world.one) + world.flop(world.two) == 400
    assert world.rows_sum().get(world.one, 0) == world.flop(world.one)


RIVAL = """
import sys
from pathlib import Path
from backend.stores.database import Database
from backend.stores.ledger import Grant, Ledger
from planner.shapes import Rect
path, job, device, kill_after = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
ledger = Ledger(Database(path))
print("ready", flush=True)
sys.stdin.readline()
wins = 0
for gemm in range(100_000 if kill_after else 200):
    wins += sum(ledger.commit(job, 1, [Grant(device, 0, gemm, Rect(0, 1, 0, m, 0, 8), 3, 0.1) for m in (8, 16)], 1.8e9))
    if gemm == kill_after:
        print("at work", flush=True)
print(wins, flush=True)
"""


def rival(world: World, device: str, kill_after: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", RIVAL, str(world.db.path), world.job, device, str(kill_after)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_racing_for_the_same_rectangles_share_them(world: World) -> None:
    with rival(world, world.one) as one, rival(world, world.two) as two:
        for process in (one, two):
            assert told(process) == "ready"
        for process in (one, two):
            go(process)
        wins = []
        for process in (one, two):
            words = [told(process), told(process)]
            assert words[0] == "at work"
            wins.append(int(words[1]))
    assert sum(wins) == 400
    assert [world.flop(world.one), world.flop(world.two)] == [3 * wins[0], 3 * wins[1]]
    assert world.count("ledger") == 400


@pytest.mark.parametrize("trial", range(3))
def test_kill_9_of_a_writer_leaves_totals_that_match_the_rows(world: World, trial: int) -> None:
    with rival(world, world.one, kill_after=20 + 37 * trial) as process:
        assert told(process) == "ready"
        go(process)
        assert told(process) == "at work"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    rows = world.count("ledger")
    assert rows >= 2 * 20 and rows % 2 == 0  # both grants of a commit, or none
    assert world.flop(world.one) == 3 * rows == world.rows_sum()[world.one]
    device = world.devices.get(world.one, NOW)
    assert device is not None and device.accepted == rows
    assert world.ledger.commit(world.job, 1, [Grant(world.two, 0, 200_000, TILE, 5, 0.1)], NOW) == [True]
    assert world.db.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


# ---- any order of calls ----------------------------------------------------------------------------------------------

grants_drawn = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 1), st.integers(1, 3)), max_size=4
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 1), grants_drawn),
        st.tuples(st.just("close"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("epoch")),
        st.tuples(st.just("blame"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_any_interleaving_keeps_the_ledger_true_to_a_simple_model(script: list[tuple[object, ...]]) -> None:
    """The model: a set of keys, a watermark, an epoch; a grant is new if its key is not in the set and it is open."""
    with TemporaryDirectory() as folder:
        world = made(Path(folder) / "t.sqlite")
        devices = (world.one, world.two)
        granted: dict[tuple[int, int, int, int], str] = {}
        flop: Counter[str] = Counter()
        streak: Counter[str] = Counter()
        epoch, closed = 1, (-1, -1)
        for action in script:
            match action:
                case ("commit", int(behind), list(drawn)):
                    at = epoch - behind
                    grants = [
                        Grant(devices[who], step, gemm, Rect(0, 1, 0, m, 0, 8), 10**9 - 1 + m, 0.1)
                        for who, step, gemm, m in drawn
                    ]
                    expected = []
                    for (who, step, gemm, m), grant in zip(drawn, grants, strict=True):
                        key = (at, step, gemm, m)
                        new = key not in granted and behind == 0 and (at, step) > closed
                        expected.append(new)
                        if new:
                            granted[key] = devices[who]
                            flop[devices[who]] += grant.flop
                            streak[devices[who]] += 1
                    assert world.ledger.commit(world.job, at, grants, NOW) == expected
                case ("close", int(behind), int(step)):
                    world.ledger.close_step(world.job, epoch - behind, step)
                    closed = max(closed, (epoch - behind, step))
                case ("epoch",):
                    epoch = world.jobs.begin_epoch(world.job, NOW)
                case ("blame", int(who)):
                    world.ledger.blame(devices[who], world.job, "bad", NOW)
                    streak[devices[who]] = 0
        for device in devices:
            assert world.flop(device) == flop[device] == world.rows_sum().get(device, 0)
            assert world.ledger.standing(device, NOW).accepted == streak[device]
        world.db.close()
