"""Redis as the switchboard: one stream per reading process, live state for the pages, and a wake-up call.

The idea: a sender adds one stream entry (a msgpack list of messages) per turn; the reader of a stream is the only
member of its consumer group, so that after a crash its successor first gets what was read but never acknowledged. An
acknowledged entry is deleted, hence a stream holds work in flight and nothing else. Delivery is at least once: a send
that is repeated after a lost connection may arrive twice, and every message is idempotent or fenced. Live state
(hashes that expire, pub/sub) is a mirror for the pages and may be lost at any time.

Works with Redis 6.2 to Valkey 9: XADD, XREADGROUP, HSET, PUBLISH and nothing newer. A Redis that may evict keys is
refused, since it could drop work. Left out: clusters, and any tensor.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from backend.switchboard.messages import SwitchMessage

ALLOCATOR_STREAM = "tw:al"
GROUP = "readers"
CONSUMER = "reader"
FIELD = b"m"

STREAM_ENTRIES_MAX = 100_000  # approximate bound of a stream whose reader is gone; a live one stays near empty
READ_ENTRIES_MAX = 256  # entries one read takes
ANSWER_S_MAX = 10.0  # beyond what a read waits on purpose
READ_BLOCK_S = 2.0  # how long an idle read waits in Redis before it asks again
OUTAGE_S_MAX = 30.0  # how long an operation is tried again before it fails: a Redis restart takes a few seconds
RETRY_FIRST_S = 0.02
RETRY_S_MAX = 1.0
DEVICE_LIVE_S = 30.0  # a device's hash outlives its last refresh by this
JOB_LIVE_S = 3600.0
REDIS_VERSION_MIN = (6, 2)

_SET_IF_THERE = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], unpack(ARGV)) end"

log = structlog.get_logger("switchboard")
T = TypeVar("T")
M = TypeVar("M")


class SwitchboardError(RuntimeError):
    """Redis cannot be used: away for too long, too old, or set to evict."""


def gateway_stream(gateway: str) -> str:
    """What the gateway `gateway` reads."""
    return f"tw:gw:{gateway}"


def coordinator_stream(job: str) -> str:
    """What the coordinator of `job` reads."""
    return f"tw:co:{job}"


def live_channel(job: str) -> str:
    """Pub/sub channel of a job's live events."""
    return f"tw:live:{job}"


WAKE_CHANNEL = "tw:wake"


class Switchboard:
    """A connection pool to Redis with the few operations that Tileweave needs; one per process and event loop.

    Every operation is tried again for `OUTAGE_S_MAX` seconds while Redis is away, then raises SwitchboardError.
    """

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        # No socket_timeout: redis-py would send through asyncio.wait_for, which on Python 3.11 may swallow the reader's
        # cancellation. asyncio.timeout bounds each exchange instead.
        self._redis: Redis = Redis.from_url(
            redis_url, protocol=2, socket_timeout=None, socket_connect_timeout=ANSWER_S_MAX, retry=Retry(NoBackoff(), 0)
        )
        self._handed_out: dict[str, set[str]] = {}

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()

    async def check(self) -> str:
        """Refuses a Redis that evicts or is older than 6.2 (SwitchboardError); gives its name and version."""
        memory: dict[str, Any] = await self._try("INFO", lambda: self._redis.info("memory"))
        server: dict[str, Any] = await self._try("INFO", lambda: self._redis.info("server"))
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise SwitchboardError(
                f"Redis at {self.redis_url} has maxmemory-policy {policy!r}, which may drop work in flight; expected "
                "'noeviction': run CONFIG SET maxmemory-policy noeviction, or point TILEWEAVE_REDIS_URL elsewhere"
            )
        version = str(server.get("redis_version", "0"))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < REDIS_VERSION_MIN:
            raise SwitchboardError(f"Redis at {self.redis_url} is version {version}; expected 6.2 or newer")
        valkey = server.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {version}"

    # ---- streams -----------------------------------------------------------------------------------------------------

    async def send(self, stream: str, messages: Sequence[SwitchMessage]) -> None:
        """Adds one entry that holds all `messages`."""
        await self.send_many({stream: messages})

    async def send_many(
        self, batches: Mapping[str, Sequence[SwitchMessage]], acknowledge: tuple[str, Sequence[str]] | None = None
    ) -> None:
        """One entry for each stream, in one round trip; empty batches send nothing. Then, in the same round trip,
        `acknowledge` (stream, entries): what these messages answer."""
        entries = [(stream, msgspec.msgpack.encode(list(batch))) for stream, batch in batches.items() if batch]
        done_stream, done = acknowledge or ("", ())
        if not entries and not done:
            return

        async def transmit() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for stream, body in entries:
                    pipe.xadd(stream, {FIELD: body}, maxlen=STREAM_ENTRIES_MAX, approximate=True)
                if done:
                    pipe.xack(done_stream, GROUP, *done)
                    pipe.xdel(done_stream, *done)
                await pipe.execute()

        await self._try("XADD", transmit)
        if done:
            self._handed_out.get(done_stream, set()).difference_update(done)

    async def receive(self, stream: str, message_type: type[M] | Any) -> AsyncGenerator[tuple[str, list[M]], None]:
        """Yields (entry id, messages) for ever: first what an earlier reader had not acknowledged, then what comes.

        `message_type` is the union the reader understands. An entry that does not decode is logged and acknowledged.
        After a lost connection, entries that Redis handed out but that never arrived here are read again.
        """
        decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(list[message_type])  # type: ignore[valid-type]
        handed_out: set[str] = set()
        self._handed_out[stream] = handed_out
        after = "0"  # "0": pending entries past this id; ">": entries never delivered
        outage = _Outage(f"reading {stream} at {self.redis_url}")
        while True:
            try:
                if after == "0":
                    async with asyncio.timeout(ANSWER_S_MAX):
                        await self._make_group(stream)
                async with asyncio.timeout(READ_BLOCK_S + ANSWER_S_MAX):
                    entries = await self._read(stream, after)
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                after = "0"  # Redis lost the stream (an emptied or rolled back database): make the group anew
                await outage.wait(error)
                continue
            except (ConnectionError, TimeoutError, OSError) as error:
                after = "0"
                await outage.wait(error)
                continue
            outage.over()
            if after != ">":
                after = entries[-1][0] if entries else ">"
            for entry, body in entries:
                if entry in handed_out:
                    continue
                messages = self._decoded(stream, entry, body, decoder)
                if messages is None:
                    await self.ack(stream, entry)
                    continue
                handed_out.add(entry)
                yield entry, messages

    async def ack(self, stream: str, *entries: str) -> None:
        """These entries are dealt with: they leave the stream for good."""
        await self.send_many({}, (stream, entries))

    async def drop_stream(self, stream: str) -> None:
        """Deletes a stream whose reader will never come back."""
        await self._try("DEL", lambda: self._redis.delete(stream))

    async def _make_group(self, stream: str) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, stream: str, after: str) -> list[tuple[str, bytes | None]]:
        block = int(READ_BLOCK_S * 1000) if after == ">" else None
        reply: Any = await self._redis.xreadgroup(GROUP, CONSUMER, {stream: after}, count=READ_ENTRIES_MAX, block=block)
        if not reply:
            return []
        return [(entry.decode(), (fields or {}).get(FIELD)) for entry, fields in reply[0][1]]

    @staticmethod
    def _decoded(
        stream: str, entry: str, body: bytes | None, decoder: msgspec.msgpack.Decoder[list[M]]
    ) -> list[M] | None:
        if body is None:  # trimmed while it was pending
            return None
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            log.warning("undecodable entry skipped", stream=stream, entry=entry, bytes=len(body), error=str(error))
            return None

    # ---- live state for the pages ------------------------------------------------------------------------------------

    async def set_devices_live(self, devices: Mapping[str, Mapping[str, Any]], expire_s: float = DEVICE_LIVE_S) -> None:
        """Sets some fields (JSON values) of each device's hash, in one round trip; a hash lives `expire_s` from now."""
        await self._set_live({f"tw:dev:{device}": fields for device, fields in devices.items()}, expire_s)

    async def update_devices_live(self, devices: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets fields of devices that are online; one whose hash is gone stays gone, and no hash lives longer."""

        async def transmit() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for device, fields in devices.items():
                    words = [word for name, value in fields.items() for word in (name, json.dumps(value))]
                    pipe.eval(_SET_IF_THERE, 1, f"tw:dev:{device}", *words)
                await pipe.execute()

        await self._try("EVAL", transmit)

    async def drop_device_live(self, device: str) -> None:
        """The device is offline as of now."""
        await self._try("DEL", lambda: self._redis.delete(f"tw:dev:{device}"))

    async def device_live(self, devices: Sequence[str]) -> list[dict[str, Any]]:
        """The live fields of each device, {} for one that is offline."""
        return await self._get_live([f"tw:dev:{device}" for device in devices])

    async def set_job_live(self, job: str, fields: Mapping[str, Any], expire_s: float = JOB_LIVE_S) -> None:
        """Sets some fields (JSON values) of a job's hash."""
        await self._set_live({f"tw:job:{job}": fields}, expire_s)

    async def job_live(self, jobs: Sequence[str]) -> list[dict[str, Any]]:
        """The live fields of each job, {} where there are none."""
        return await self._get_live([f"tw:job:{job}" for job in jobs])

    async def _set_live(self, hashes: Mapping[str, Mapping[str, Any]], expire_s: float) -> None:
        encoded: dict[str, dict[Any, Any]] = {
            key: {name: json.dumps(value) for name, value in fields.items()} for key, fields in hashes.items()
        }

        async def transmit() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, fields in encoded.items():
                    if fields:
                        pipe.hset(key, mapping=fields)
                    pipe.pexpire(key, int(expire_s * 1000))
                await pipe.execute()

        await self._try("HSET", transmit)

    async def _get_live(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        if not keys:
            return []

        async def transmit() -> list[dict[bytes, bytes]]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hgetall(key)
                return await pipe.execute()

        rows = await self._try("HGETALL", transmit)
        return [{name.decode(): json.loads(value) for name, value in row.items()} for row in rows]

    # ---- pub/sub -----------------------------------------------------------------------------------------------------

    async def publish_live(self, job: str, event: str, data: Mapping[str, Any]) -> None:
        """Tells whoever watches the job; nobody watching is fine."""
        body = json.dumps({"event": event, "data": data})
        await self._try("PUBLISH", lambda: self._redis.publish(live_channel(job), body))

    async def subscribe_live(self, job: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields (event, data) for ever. Events during a lost connection are missed: read the store now and then."""
        async with aclosing(self._subscribe(live_channel(job))) as bodies:
            async for body in bodies:
                if body is not None:
                    message = json.loads(body)
                    yield message["event"], message["data"]

    async def wake_supervisor(self) -> None:
        """There is something new in the store for the supervisor (a job, a cancel)."""
        await self._try("PUBLISH", lambda: self._redis.publish(WAKE_CHANNEL, b"1"))

    async def watch_wake(self) -> AsyncGenerator[None, None]:
        """Yields once at each (re)connection, when calls may have been missed, and once for each call."""
        async with aclosing(self._subscribe(WAKE_CHANNEL)) as bodies:
            async for _ in bodies:
                yield

    async def _subscribe(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Bodies of a channel's messages; None each time the subscription (again) stands."""
        outage = _Outage(f"listening to {channel} at {self.redis_url}")
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(channel)
                    while True:
                        message: dict[str, Any] | None = await pubsub.get_message(timeout=READ_BLOCK_S)
                        if message is None:
                            await pubsub.ping()
                        elif message["type"] == "subscribe":
                            outage.over()
                            yield None
                        elif message["type"] == "message":
                            yield message["data"]
            except (ConnectionError, TimeoutError, OSError) as error:
                await outage.wait(error)

    # ---- retries -----------------------------------------------------------------------------------------------------

    async def _try(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        outage = _Outage(f"{what} at {self.redis_url}")
        while True:
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    return await operation()
            except (ConnectionError, TimeoutError, BusyLoadingError, OSError) as error:
                await outage.wait(error)
            except RedisError as error:
                raise SwitchboardError(f"{what} at {self.redis_url}: {error}") from error


class _Outage:
    """How long Redis has been away, with growing waits; raises once that is too long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.over()

    def over(self) -> None:
        self._since: float | None = None
        self._wait_s = RETRY_FIRST_S

    async def wait(self, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        away_s = now - self._since
        if away_s > OUTAGE_S_MAX:
            raise SwitchboardError(
                f"{self._what}: no answer for {away_s:.0f} s ({error}); is that Redis or Valkey running?"
            ) from error
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(RETRY_S_MAX, self._wait_s * 2)
