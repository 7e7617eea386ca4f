"""The switchboard against a real Valkey: nothing acknowledged twice, nothing unacknowledged lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import pytest
from redis import Redis

from backend.switchboard import streams
from backend.switchboard.messages import DeviceOffline, JobControl, ToAllocator
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, SwitchboardError, coordinator_stream

T = TypeVar("T")
DEADLINE_S = 20.0


def run(scenario: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(scenario, DEADLINE_S)

    return asyncio.run(bounded())


def offline(number: int) -> DeviceOffline:
    return DeviceOffline(device=f"d{number}", connection="c", reason="closed")


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  (the condition is Redis' own state; `run` sets the deadline)
        await asyncio.sleep(0)


async def take(iterator: AsyncIterator[T], count: int) -> list[T]:
    return [await anext(iterator) for _ in range(count)]


def test_batches_arrive_in_order_and_ack_empties_the_stream(valkey) -> None:
    async def scenario() -> int:
        board = Switchboard(valkey.url)
        await board.send(ALLOCATOR_STREAM, [offline(0), offline(1)])
        await board.send(ALLOCATOR_STREAM, [offline(2)])
        reader = board.receive(ALLOCATOR_STREAM, ToAllocator)
        entries = await take(reader, 2)
        assert [messages for _, messages in entries] == [[offline(0), offline(1)], [offline(2)]]
        await board.ack(ALLOCATOR_STREAM, *(entry for entry, _ in entries))
        await reader.aclose()
        await board.close()
        with Redis.from_url(valkey.url) as client:
            return client.xlen(ALLOCATOR_STREAM)

    assert run(scenario()) == 0


def test_a_restarted_reader_gets_what_was_not_acknowledged_first(valkey) -> None:
    async def scenario() -> list[list[object]]:
        first = Switchboard(valkey.url)
        for number in range(3):
            await first.send("tw:gw:0", [offline(number)])
        reader = first.receive("tw:gw:0", DeviceOffline)
        entries = await take(reader, 3)
        await first.ack("tw:gw:0", entries[1][0])
        await first.close()  # dies with entries 0 and 2 read and not acknowledged

        second = Switchboard(valkey.url)
        await second.send("tw:gw:0", [offline(3)])
        seen = [messages for _, messages in await take(second.receive("tw:gw:0", DeviceOffline), 3)]
        await second.close()
        return seen

    assert run(scenario()) == [[offline(0)], [offline(2)], [offline(3)]]


def test_more_pending_than_one_read_takes(valkey, monkeypatch) -> None:
    monkeypatch.setattr(streams, "READ_ENTRIES_MAX", 2)

    async def scenario() -> list[object]:
        first = Switchboard(valkey.url)
        for number in range(5):
            await first.send("s", [offline(number)])
        await take(first.receive("s", DeviceOffline), 5)
        await first.close()
        second = Switchboard(valkey.url)
        seen = [messages[0] for _, messages in await take(second.receive("s", DeviceOffline), 5)]
        await second.close()
        return seen

    assert run(scenario()) == [offline(number) for number in range(5)]


def test_two_readers_of_one_stream_lose_nothing(valkey) -> None:
    """As when a process is started again before its old self is gone. A reader that begins reads what is not yet
    acknowledged, so an entry may come to both: every message is idempotent."""

    async def scenario() -> list[str]:
        boards = [Switchboard(valkey.url) for _ in range(2)]
        seen: list[str] = []
        enough = asyncio.Event()

        async def read(board: Switchboard) -> None:
            async for entry, messages in board.receive("s", DeviceOffline):
                seen.extend(message.device for message in messages)
                await board.ack("s", entry)
                if len(set(seen)) >= 40:
                    enough.set()

        readers = [asyncio.create_task(read(board)) for board in boards]
        await asyncio.gather(*(boards[number % 2].send("s", [offline(number)]) for number in range(40)))
        await enough.wait()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for board in boards:
            await board.close()
        return sorted(set(seen))

    assert run(scenario()) == sorted(f"d{number}" for number in range(40))


def test_undecodable_entries_are_acknowledged_and_skipped(valkey) -> None:
    async def scenario() -> tuple[list[object], int]:
        board = Switchboard(valkey.url)
        stream = coordinator_stream("j")
        with Redis.from_url(valkey.url) as client:
            client.xadd(stream, {b"m": b"\xc1 not msgpack"})
            client.xadd(stream, {b"other": b"field"})
            await board.send(stream, [offline(0)])  # not a message this reader understands
            await board.send(stream, [JobControl(what="cancel")])
            entry, messages = await anext(board.receive(stream, JobControl))
            await board.ack(stream, entry)
            await board.close()
            return messages, client.xpending(stream, "readers")["pending"]

    assert run(scenario()) == ([JobControl(what="cancel")], 0)


def test_a_reader_survives_the_restart_of_redis_and_a_truncated_file(valkey) -> None:
    async def scenario() -> list[object]:
        board = Switchboard(valkey.url)
        await board.send("s", [offline(0)])
        reader = board.receive("s", DeviceOffline)
        first = await anext(reader)
        await asyncio.to_thread(valkey.kill)
        incremental = max((valkey.choice.directory / "appendonlydir").glob("*.incr.aof"))
        body = incremental.read_bytes()
        incremental.write_bytes(body[:-7])  # the last second's writes are cut in the middle of a command
        await asyncio.to_thread(valkey.start)
        await board.send("s", [offline(1)])
        seen = [first[1][0]]
        while offline(1) not in seen:
            seen.append((await anext(reader))[1][0])
        await board.close()
        return seen

    seen = run(scenario())
    assert seen[0] == offline(0)
    assert seen[-1] == offline(1)


def test_an_emptied_redis_gets_its_groups_back(valkey) -> None:
    async def scenario() -> object:
        board = Switchboard(valkey.url)
        reader = board.receive("s", DeviceOffline)
        await board.send("s", [offline(0)])
        await anext(reader)
        with Redis.from_url(valkey.url) as client:
            client.flushall()
        await board.send("s", [offline(1)])
        _, messages = await anext(reader)
        await board.close()
        return messages[0]

    assert run(scenario()) == offline(1)


def test_an_outage_too_long_is_an_error_that_names_the_address(monkeypatch) -> None:
    monkeypatch.setattr(streams, "OUTAGE_S_MAX", 0.05)

    async def scenario() -> None:
        board = Switchboard("unix:///nowhere/at/all.sock")
        with pytest.raises(SwitchboardError, match=r"/nowhere/at/all.sock.*is that Redis or Valkey running"):
            await board.send("s", [offline(0)])
        with pytest.raises(SwitchboardError, match="reading s"):
            await anext(board.receive("s", DeviceOffline))

    run(scenario())


def test_a_redis_that_evicts_is_refused(valkey) -> None:
    async def scenario() -> str:
        board = Switchboard(valkey.url)
        label = await board.check()
        with Redis.from_url(valkey.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(SwitchboardError, match=r"'allkeys-lru'.*expected 'noeviction'"):
            await board.check()
        await board.close()
        return label

    assert run(scenario()).split()[0] in {"Valkey", "Redis"}


def test_wake_and_live_events(valkey) -> None:
    async def scenario() -> tuple[str, dict[str, object]]:
        board = Switchboard(valkey.url)
        wake = board.watch_wake()
        await anext(wake)  # the subscription stands
        await board.wake_supervisor()
        await anext(wake)
        await wake.aclose()

        live = board.subscribe_live("j")
        event = asyncio.ensure_future(anext(live))
        with Redis.from_url(valkey.url) as client:
            await until(lambda: client.pubsub_numsub("tw:live:j")[0][1])
        await board.publish_live("j", "step", {"step": 3, "loss": None})
        got = await event
        await live.aclose()
        await board.close()
        return got

    assert run(scenario()) == ("step", {"step": 3, "loss": None})


def test_live_hashes_keep_types_merge_and_expire(valkey) -> None:
    async def scenario() -> list[dict[str, object]]:
        board = Switchboard(valkey.url)
        await board.set_devices_live({"d": {"state": "ready", "flops": 1.5e9, "job": None}})
        await board.set_devices_live({"d": {"measured_flops": 2}, "e": {"state": "paused"}})
        await board.update_devices_live({"d": {"flops": 2e9}, "never": {"flops": 1.0}})
        await board.set_devices_live({"gone": {"state": "ready"}}, expire_s=0.001)
        with Redis.from_url(valkey.url) as client:
            await until(lambda: not client.exists("tw:dev:gone"))
            assert 0 < client.pttl("tw:dev:d") <= 30_000
        rows = await board.device_live(["d", "e", "gone", "never"])
        await board.set_job_live("j", {"tiles": 7})
        rows += await board.job_live(["j"])
        await board.close()
        return rows

    assert run(scenario()) == [
        {"state": "ready", "flops": 2e9, "job": None, "measured_flops": 2},
        {"state": "paused"},
        {},
        {},
        {"tiles": 7},
    ]
