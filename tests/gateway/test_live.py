"""Watchers of a job: bounded in number and in memory, told of changes only, and released at the job's end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from backend.gateway import live as module
from backend.gateway.live import Live, TooManyWatchers, Watcher
from backend.switchboard.streams import Switchboard


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 20)

    asyncio.run(bounded())


def test_a_slow_watcher_loses_the_oldest_events_only() -> None:
    async def scenario() -> None:
        watcher = Watcher(2)
        for number in range(5):
            watcher.put(("step", {"step": number}))
        watcher.put(None)
        assert await watcher.get() == ("step", {"step": 4})
        assert await watcher.get() is None

    run(scenario())


def test_watchers_are_bounded_and_the_last_one_out_ends_the_loops(valkey) -> None:
    async def scenario() -> None:
        board = Switchboard(valkey.url)

        async def render(job: str) -> dict[str, Any]:
            return {"id": job, "state": "running"}

        live = Live(board, render, streams_max=3, per_address_max=2, events_max=8)
        before = len(asyncio.all_tasks())
        async with live.watch("j", "here") as first, live.watch("j", "here") as second:
            with pytest.raises(TooManyWatchers):
                await live.watch("j", "here").__aenter__()
            async with live.watch("j", "there"):
                with pytest.raises(TooManyWatchers):
                    await live.watch("j", "elsewhere").__aenter__()
            for watcher in (first, second):
                assert await watcher.get() == ("job", {"id": "j", "state": "running"})
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before
        await board.close()

    run(scenario())


def test_changes_are_told_and_the_end_is_the_last_word(valkey, monkeypatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)

    async def scenario() -> None:
        board = Switchboard(valkey.url)
        states = iter([{"step": 1, "elapsed_s": 1}, {"step": 1, "elapsed_s": 2}, {"step": 2}])

        async def render(job: str) -> dict[str, Any]:
            return {"state": "running", **fields} if (fields := next(states, None)) else {"state": "succeeded"}

        live = Live(board, render, streams_max=3, per_address_max=2, events_max=8)
        seen = []
        async with live.watch("j", "here") as watcher:
            while (event := await watcher.get()) is not None:
                seen.append(event[1].get("step", event[1]["state"]))
        assert seen == [1, 2, "succeeded"]
        await board.close()

    run(scenario())
