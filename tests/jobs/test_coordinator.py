"""The coordinator's process between a real Valkey, a script's socket and a gateway that the test plays."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from redis import Redis

from backend.settings import Settings
from backend.stores.database import Database
from backend.stores.devices import DeviceStore
from backend.stores.jobs import JobSpec, JobStore
from backend.stores.ledger import Ledger
from backend.switchboard.messages import (
    Acknowledge,
    DeviceJoined,
    DeviceOnline,
    JobControl,
    JobReady,
    Kick,
    Push,
    Release,
    ResultReady,
    RevokeLeases,
    SlotRef,
    ToAllocator,
    ToGateway,
)
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, coordinator_stream, gateway_stream
from tileweave.protocol.messages import Accuracy, Profile
from tileweave.script.wire import (
    CheckpointWritten,
    Control,
    GemmFailed,
    GemmRequest,
    Part,
    Product,
    Recorded,
    Region,
    SampleText,
    ScriptDone,
    ScriptFailed,
    ScriptHello,
    ScriptWelcome,
    StepReport,
    ToScript,
    Validated,
)

DEADLINE_S = 30.0
GATEWAY = "0"
Compute = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Rig:
    """One job in the store, its coordinator process, and the test in the roles of script and gateway."""

    def __init__(self, valkey: Any, accuracy: Accuracy = "rowwise") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tw-"))
        self.settings = Settings(data_dir=self.folder, redis_url=valkey.url)
        self.url = valkey.url
        self.database = Database(self.settings.database_path)
        self.jobs = JobStore(self.database)
        self.ledger = Ledger(self.database)
        spec = JobSpec(kind="train", name="t", recipe="gpt-bytes", steps=3, accuracy=accuracy)
        self.job = self.jobs.create(spec, time.time()).id
        self.device = DeviceStore(self.database).register("dev", "test", time.time())[0]
        self.board = Switchboard(valkey.url)
        self.token = secrets.token_urlsafe(16)
        self.slots = 0
        self.sent: list[ToGateway] = []
        self.from_coordinator: AsyncIterator[tuple[str, list[ToGateway]]]
        self.from_coordinator = self.board.receive(gateway_stream(GATEWAY), ToGateway)

    def start(self) -> None:
        epoch = self.jobs.begin_epoch(self.job, time.time())
        directory = self.settings.run_dir / "jobs" / self.job / f"e{epoch}"
        directory.mkdir(parents=True)
        self.results = self.settings.run_dir / f"results-{epoch}.bin"
        self.results.write_bytes(bytes(1 << 22))
        self.socket_path = directory / "script.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket_path))
            listener.listen()
            argv = [sys.executable, "-m", "backend.jobs.coordinator", "--job", self.job, "--epoch", str(epoch)]
            argv += ["--directory", str(directory), "--script-fd", str(listener.fileno())]
            env = {**os.environ, **self.settings.environment(), "TILEWEAVE_JOB_TOKEN": self.token}
            self.process = subprocess.Popen(argv, env=env, pass_fds=[listener.fileno()])

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)

    async def close(self) -> None:
        await self.board.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.database.close()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.settings.run_dir)

    # ---- as the gateway and its device -------------------------------------------------------------------------------

    async def join(self) -> None:
        epoch = self.jobs.get(self.job).epoch
        online = DeviceOnline(device=self.device, connection="c1", gateway=GATEWAY, profile=Profile(flops=1e9))
        await self.board.send(coordinator_stream(self.job), [DeviceJoined(online=online, epoch=epoch)])

    def upload(self, lease: int, tile: np.ndarray) -> ResultReady:
        offset = self.slots * (1 << 16)
        self.slots += 1
        with self.results.open("r+b") as file:
            file.seek(offset)
            file.write(tile.astype(np.float32).tobytes())
        slot = SlotRef(GATEWAY, self.slots, str(self.results), offset, tile.size * 4)
        return ResultReady(
            device=self.device, connection="c1", lease=lease, seconds=1e-4, upload_s=1e-4, slot=slot
        )  # fmt: skip

    async def serve(self, compute: Compute, until: Callable[[], bool]) -> None:
        """Plays gateway and device until the condition holds."""
        while not until():
            entry, messages = await anext(self.from_coordinator)
            self.sent += messages
            await self.board.ack(gateway_stream(GATEWAY), entry)
            results = [self.upload(m.lease.lease, _tile(m, compute)) for m in messages if isinstance(m, Push)]
            await self.board.send(coordinator_stream(self.job), results)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def _tile(push: Push, compute: Compute) -> np.ndarray:
    lease = push.lease
    panels = {
        ref.panel: np.fromfile(ref.path, np.float32, ref.rows * ref.columns, offset=ref.offset).reshape(-1, ref.columns)
        for ref in push.panels
    }
    total: np.ndarray | None = None
    for term in lease.terms:
        a, b = (
            _lines(panels[name], lease.batch, lines, term.k, by_k, row, column)
            for name, lines, by_k, row, column in (
                (term.a, lease.m, lease.a_by_k, term.a_row, term.a_column),
                (term.b, lease.n, lease.b_by_k, term.b_row, term.b_column),
            )
        )
        part = compute(a, b)
        total = part if total is None else total + part
    assert total is not None
    return total


def _lines(panel: np.ndarray, batch: int, lines: int, k: int, by_k: bool, row: int, column: int) -> np.ndarray:
    height, width = (k, lines) if by_k else (lines, k)
    block = panel[row : row + batch * height, column : column + width].reshape(batch, height, width)
    return block.transpose(0, 2, 1) if by_k else block


def honest(a: np.ndarray, bt: np.ndarray) -> np.ndarray:
    return np.matmul(a, bt.transpose(0, 2, 1))


def liar(a: np.ndarray, bt: np.ndarray) -> np.ndarray:
    product = honest(a, bt)
    product[..., 0, 0] += 1.0
    return product


def norm_wise(a: np.ndarray, bt: np.ndarray) -> np.ndarray:
    """As a fast algorithm might: the last row errs by what is rounding beside the others, and more than its own."""
    product = honest(a, bt)
    product[:, -1] += 1e-6 * np.sqrt(np.square(product).mean())
    return product


class Script:
    """The script's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, rig: Rig, token: str) -> Script:
        script = cls(*await asyncio.open_unix_connection(str(rig.socket_path)))
        script.say(ScriptHello(token=token, pid=os.getpid()))
        return script

    def say(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        self.writer.write(len(body).to_bytes(4, "little") + body)

    async def hear(self) -> ToScript:
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return msgspec.msgpack.decode(await self.reader.readexactly(size), type=ToScript)

    def close(self) -> None:
        self.writer.close()


STAMP = int.from_bytes(b"stamp...", "little")


class Operands:
    """A (batch, m, k), whose last row is small, B^T (batch, n, k) and room for C in one file of the arena."""

    def __init__(
        self, welcome: ScriptWelcome, batch: int, m: int, n: int, k: int, number: int = 1, short: float = 0.03
    ) -> None:
        random = np.random.default_rng(batch + m + n + k)
        self.a = random.standard_normal((batch, m, k), np.float32)
        self.a[:, -1] *= np.float32(short)
        self.bt = random.standard_normal((batch, n, k), np.float32)
        self.shape = (batch, m, n)
        self.path = Path(welcome.arena_dir) / f"segment-{number}.bin"
        self.path.write_bytes(b"stamp..." + self.a.tobytes() + self.bt.tobytes() + bytes(4 * batch * m * n))
        sizes = self.a.nbytes, self.bt.nbytes, 4 * batch * m * n
        offsets = 8, 8 + sizes[0], 8 + sizes[0] + sizes[1]
        regions = [Region(str(self.path), offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        a, b = (Part(region, f"{name}{number}", 0, STAMP) for name, region in zip("ab", regions[:2], strict=True))
        self.request = GemmRequest(id=number, step=1, batch=batch, m=m, n=n, k=k, a=[a], b=[b], c=regions[2])

    def product(self) -> np.ndarray:
        region = self.request.c
        return np.fromfile(self.path, np.float32, region.size // 4, offset=region.offset).reshape(self.shape)


def run(valkey: Any, scenario: Callable[[Rig], Coroutine[Any, Any, None]], accuracy: Accuracy = "rowwise") -> None:
    async def bounded() -> None:
        rig = Rig(valkey, accuracy)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(rig)
        finally:
            await rig.close()

    asyncio.run(bounded())


@asynccontextmanager
async def connected(rig: Rig) -> AsyncIterator[tuple[Script, ScriptWelcome]]:
    rig.start()
    script = await Script.connect(rig, rig.token)
    welcome = await script.hear()
    assert isinstance(welcome, ScriptWelcome)
    try:
        yield script, welcome
    finally:
        script.close()


async def next_of(hear: Callable[[], Coroutine[Any, Any, Any]], kind: type) -> Any:
    while not isinstance(message := await hear(), kind):
        pass
    return message


@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 60, 50, 40), (3, 17, 9, 33)])
def test_a_product_is_verified_assembled_credited_and_recorded(valkey, batch, m, n, k) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            allocator = rig.board.receive(ALLOCATOR_STREAM, ToAllocator)
            assert (await anext(allocator))[1] == [JobReady(job=rig.job, epoch=1, weight=1.0)]
            await rig.board.set_devices_live({rig.device: {"claimed_flops": 1e9}})
            await rig.join()
            work = Operands(welcome, batch, m, n, k)
            script.say(work.request)
            product = asyncio.create_task(script.hear())
            flop = 2 * batch * m * n * k

            def all_acknowledged() -> bool:
                return product.done() and sum(a.ack.flop for a in rig.of(Acknowledge)) == flop

            await rig.serve(honest, all_acknowledged)
            assert product.result() == Product(id=1)
            np.testing.assert_allclose(work.product(), honest(work.a, work.bt), rtol=1e-4, atol=1e-4)
            assert {a.ack.verdict for a in rig.of(Acknowledge)} == {"accepted"}
            pushes = rig.of(Push)
            while len(released := [s for r in rig.of(Release) for s in r.slots]) < len(pushes):
                rig.sent += (await anext(rig.from_coordinator))[1]
            assert sorted(released) == list(range(1, len(pushes) + 1))

            while "measured_flops" not in (speeds := (await rig.board.device_live([rig.device]))[0]):
                pass
            assert speeds["claimed_flops"] == 1e9 != speeds["measured_flops"] > 0

            script.say(StepReport(step=1, loss=2.5, samples=8, seconds=0.1, flop_offloaded=flop, flop_local=7))
            script.say(SampleText(step=1, text="to be"))
            script.say(Validated(step=1, value=2.25))
            body = b"weights"
            path = Path(welcome.checkpoint_dir) / "step-1.safetensors"
            path.write_bytes(body)
            sha256 = hashlib.sha256(body).hexdigest()
            script.say(CheckpointWritten(step=1, path=str(path), sha256=sha256, size=len(body)))
            assert await script.hear() == Recorded(step=1)
            result = rig.settings.jobs_dir / rig.job / "result.npy"
            script.say(ScriptDone(result=str(result)))
            assert await rig.exit_status() == 0

        [row] = rig.jobs.metrics(rig.job)
        assert (row.loss, row.tiles, row.flop_offloaded, row.devices) == (2.5, len(pushes), flop, 1)
        assert row.validation == 2.25
        assert row.bytes_up == 4 * batch * m * n
        panels = {ref.panel: ref.size for push in pushes for ref in push.panels}
        assert row.bytes_down == sum(panels.values())
        job = rig.jobs.get(rig.job)
        assert (job.state, job.result, job.sample) == ("succeeded", str(result), "to be")
        assert (job.validation, job.validation_step) == (2.25, 1)
        assert rig.jobs.latest_checkpoint(rig.job).sha256 == sha256
        assert rig.ledger.standing(rig.device, time.time()).accepted == len(pushes)
        with Redis.from_url(rig.url) as client:
            assert client.xlen(coordinator_stream(rig.job)) == 0
        live = (await rig.board.job_live([rig.job]))[0]
        assert (live["tiles"], live["flop"], live["gemm_totals"]["gemms"]) == (len(pushes), flop, 1)
        assert live["gemm_last"]["kernel_seconds"] > 0

    run(valkey, scenario)


def test_a_liar_is_rejected_quarantined_and_sent_away(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            work = Operands(welcome, 1, 24, 24, 24)
            script.say(work.request)
            await rig.serve(liar, lambda: bool(rig.of(Kick)))
            assert rig.of(Acknowledge)[0].ack.verdict == "rejected"
            [kick] = rig.of(Kick)
            assert (kick.device, kick.code) == (rig.device, "quarantined")
            assert 50 < kick.retry_s <= 60
            standing = rig.ledger.standing(rig.device, time.time())
            assert (standing.accepted, standing.rejects) == (0, 1)
            assert not work.product().any()

    run(valkey, scenario)


def test_a_norm_wise_jobs_product_is_row_wise_where_a_norm_would_hide_its_short_rows(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            script.say(Operands(welcome, 1, 24, 24, 24, short=1e-3).request)
            await rig.serve(honest, lambda: len(rig.of(Acknowledge)) == len(rig.of(Push)) > 0)
            assert {push.lease.accuracy for push in rig.of(Push)} == {"rowwise"}

    run(valkey, scenario, "normwise")


@pytest.mark.parametrize(("accuracy", "verdict"), [("rowwise", "rejected"), ("normwise", "accepted")])
def test_a_norm_wise_product_is_for_jobs_that_accept_it(valkey, accuracy, verdict) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            script.say(Operands(welcome, 1, 24, 24, 24).request)
            await rig.serve(norm_wise, lambda: len(rig.of(Acknowledge)) == len(rig.of(Push)) > 0)
            assert {push.lease.accuracy for push in rig.of(Push)} == {accuracy}
            assert verdict in {acknowledged.ack.verdict for acknowledged in rig.of(Acknowledge)}

    run(valkey, scenario, accuracy)


def test_results_of_an_earlier_epoch_are_answered_late_and_their_slots_freed(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            script.say(Operands(welcome, 1, 24, 24, 24).request)
            await rig.serve(honest, lambda: bool(rig.of(Push)))
            lease = rig.of(Push)[0].lease.lease
            rig.process.kill()  # its result is in the stream, or was read and not acknowledged
            rig.process.wait()
            rig.sent.clear()
        stale = rig.upload(lease, np.zeros((24, 24)))
        await rig.board.send(coordinator_stream(rig.job), [stale])
        async with connected(rig) as (_, welcome):
            assert welcome.epoch == 2
            await rig.serve(honest, lambda: any(stale.slot.slot in release.slots for release in rig.of(Release)))
            late = [a.ack for a in rig.of(Acknowledge) if a.ack.lease == lease]
            assert {ack.verdict for ack in late} == {"late"}
            with Redis.from_url(rig.url) as client:
                while client.xlen(coordinator_stream(rig.job)):  # noqa: ASYNC110  (Redis' state; `run` sets a deadline)
                    await asyncio.sleep(0)
            assert rig.ledger.standing(rig.device, time.time()).accepted == 0

    run(valkey, scenario)


def test_requests_that_cannot_be_are_answered_and_harm_nobody(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            good = Operands(welcome, 1, 8, 8, 8).request
            size = good.a[0].region.size
            outside = [Part(Region("/etc/hostname", 8, size), "x", 0, 1)]
            past = Region(good.c.path, 1 << 30, good.c.size)
            for number, (change, what) in enumerate(
                [
                    ({"a": outside}, "expected a file below"),
                    ({"c": past}, "which has"),
                    ({"m": 9}, "bytes, expected"),
                    ({"a": []}, "0 parts of A"),
                ]
            ):
                script.say(msgspec.structs.replace(good, id=10 + number, **change))
                answer = await script.hear()
                assert isinstance(answer, GemmFailed)
                assert answer.id == 10 + number
                assert what in answer.reason
            script.say(good)
            product = asyncio.create_task(script.hear())
            await rig.serve(honest, product.done)
            assert product.result() == Product(id=1)

    run(valkey, scenario)


def test_operands_that_are_not_finite_fail_the_gemm_and_blame_nobody(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            work = Operands(welcome, 1, 16, 16, 16)
            with work.path.open("r+b") as file:
                file.seek(work.request.a[0].region.offset)
                file.write(np.float32(np.nan).tobytes())
            script.say(work.request)
            answer = asyncio.create_task(script.hear())
            await rig.serve(honest, answer.done)
            assert isinstance(answer.result(), GemmFailed)
            assert "not finite" in answer.result().reason
            assert rig.ledger.standing(rig.device, time.time()).rejects == 0

    run(valkey, scenario)


def test_only_the_script_with_the_token_is_let_in(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        rig.start()
        stranger = await Script.connect(rig, "not the token")
        with pytest.raises(asyncio.IncompleteReadError):
            await stranger.hear()
        script = await Script.connect(rig, rig.token)
        assert isinstance(await script.hear(), ScriptWelcome)
        script.close()
        stranger.close()
        assert await rig.exit_status() == 4  # the script is gone and the job not done
        assert rig.jobs.get(rig.job).state == "running"

    run(valkey, scenario)


def test_a_script_that_fails_fails_the_job_with_its_reason(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, _):
            script.say(ScriptFailed(reason="the loss is nan"))
            assert await rig.exit_status() == 0
        assert (rig.jobs.get(rig.job).state, rig.jobs.get(rig.job).reason) == ("failed", "the loss is nan")

    run(valkey, scenario)


def test_files_outside_the_job_are_not_taken(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, _):
            script.say(ScriptDone(result=str(rig.settings.jobs_dir / rig.job / ".." / ".." / "token")))
            assert await rig.exit_status() == 1
        assert rig.jobs.get(rig.job).result is None

    run(valkey, scenario)


def test_a_cancel_reaches_the_script_and_takes_the_leases_back(valkey) -> None:
    async def scenario(rig: Rig) -> None:
        async with connected(rig) as (script, welcome):
            await rig.join()
            script.say(Operands(welcome, 1, 24, 24, 24).request)
            while not rig.of(Push):
                rig.sent += (await anext(rig.from_coordinator))[1]
            await rig.board.send(coordinator_stream(rig.job), [JobControl(what="cancel")])
            assert await next_of(script.hear, Control) == Control(what="cancel")
            script.close()
            assert await rig.exit_status() == 0
            while not (revoked := [lease for revoke in rig.of(RevokeLeases) for lease in revoke.leases]):
                rig.sent += (await anext(rig.from_coordinator))[1]
            assert rig.of(Push)[0].lease.lease in revoked

    run(valkey, scenario)
