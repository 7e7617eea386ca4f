"""The coordinator process of one job and epoch: `python -m backend.jobs.coordinator --job … --epoch … --script-fd …`.

    stream tw:co:{job} --\\                        /--> one stream entry a turn and gateway: leases, ACKs, slots freed
    script's socket -------> Shell, Machine.handle ---> check threads (Freivalds, one BLAS thread each)
    ticks, checks, commits -/                      \\--> one store thread: ledger commit, then the copy into C

The idea: the lease state machine (backend/coordinator) decides, the shell carries out, and this module is the process
around them: the script's requests, what is recorded of the job, the clock. It holds no state that matters: when it
dies, the supervisor begins the next epoch from the last checkpoint, and results of this one are answered `late`. Torch
is never imported here, and no user code runs here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
import uvloop

from backend.coordinator.events import Tick
from backend.jobs.counters import Counters
from backend.jobs.link import ScriptError, ScriptLink
from backend.jobs.shell import Shell
from backend.logs import configure_logging
from backend.parent import watch_parent
from backend.settings import Settings
from backend.stores.database import Database
from backend.stores.jobs import Job, JobStore, State
from backend.stores.ledger import Ledger
from backend.switchboard.messages import JobControl, JobReady, ToCoordinator
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, coordinator_stream
from tileweave.script.wire import (
    TOKEN_VARIABLE,
    CheckpointWritten,
    Control,
    FromScript,
    GemmRequest,
    Recorded,
    SampleText,
    ScriptDone,
    ScriptFailed,
    ScriptWelcome,
    StepReport,
    ToScript,
    Validated,
)

LIVE_S = 0.5  # between live figures
ANNOUNCE_S = 3.0
EXIT_SCRIPT_LOST = 4
ATTACH_S_MAX = 120.0  # for the script of `tileweave run` to connect

log = structlog.get_logger("coordinator")


class Coordinator:
    """One epoch of one job, from the script's hello to its end."""

    def __init__(
        self, job: Job, epoch: int, directory: Path, settings: Settings, switchboard: Switchboard, database: Database
    ) -> None:
        self._job = job
        self._epoch = epoch
        self._directory = directory
        self._settings = settings
        self._switchboard = switchboard
        self._store = JobStore(database)
        self._ledger = Ledger(database)
        self._link: ScriptLink | None = None
        self._connected = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._counters = Counters()
        self._shell = Shell(
            job.id, epoch, job.accuracy, job.wire, settings, switchboard, self._ledger, self._counters,
            self._tell_script, self._gemm_done,
        )  # fmt: skip

    async def run(self, listener: socket.socket, token: str) -> int:
        """Returns the exit status: 0 when the job has ended (or was stopped), EXIT_SCRIPT_LOST when the script died."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        before = (await self._switchboard.job_live([self._job.id]))[0]
        self._counters.go_on_from(before.get("tiles", 0), before.get("flop", 0))
        books = asyncio.create_task(self._shell.books.serve())
        loops = (
            self._read_stream(), self._ticks(), self._announce(), self._show(), self._shell.outbox.serve()
        )  # fmt: skip
        helpers = [asyncio.create_task(work) for work in loops]
        script = asyncio.create_task(self._serve_script(listener, token))
        stopped = asyncio.create_task(stop.wait())
        status = 0
        try:
            watched: set[asyncio.Future[Any]] = {script, stopped, books, self._shell.fatal, *helpers}
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {script, stopped}:
                task.result()  # raises: helpers only end by an error
            status = script.result() if script in done else 0
        finally:
            for task in (script, stopped, *helpers):
                task.cancel()
            await asyncio.gather(script, stopped, *helpers, return_exceptions=True)
            await self._shell.close()
            books.cancel()
            await asyncio.gather(books, return_exceptions=True)
        self._shell.goodbye()
        await self._shell.outbox.flush()
        await self._switchboard.set_job_live(self._job.id, self._live() | {"devices": 0, "waiting": None})
        return status

    # ---- the loops beside the script ---------------------------------------------------------------------------------

    async def _read_stream(self) -> None:
        stream = coordinator_stream(self._job.id)
        entries: AsyncIterator[tuple[str, list[ToCoordinator]]] = self._switchboard.receive(stream, ToCoordinator)
        async for entry, messages in entries:
            self._shell.receive(entry, messages)
            if any(isinstance(message, JobControl) for message in messages):
                log.info("cancelled")
                self._cancelled.set()
                self._tell_script(Control(what="cancel"))

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            self._shell.handle(Tick())

    async def _announce(self) -> None:
        """Takes devices from now on. Repeated, since the allocator may start anew and not know of this job."""
        await self._connected.wait()
        while True:
            ready = JobReady(job=self._job.id, epoch=self._epoch, weight=self._job.weight)
            self._shell.outbox.put(ALLOCATOR_STREAM, ready)
            await asyncio.sleep(ANNOUNCE_S)

    async def _show(self) -> None:
        """Mirrors totals, rates and device speeds for the pages, where they changed."""
        shown: dict[str, Any] = {}
        speeds: dict[str, dict[str, float]] = {}
        while True:
            await asyncio.sleep(LIVE_S)
            live, now = self._live(), self._shell.device_speeds()
            if live != shown:
                shown = live
                await self._switchboard.set_job_live(self._job.id, live)
            changed = {device: fields for device, fields in now.items() if speeds.get(device) != fields}
            if changed:
                speeds = now
                await self._switchboard.update_devices_live(changed)

    def _live(self) -> dict[str, Any]:
        return self._shell.live() | self._counters.gemm_figures()

    # ---- the script --------------------------------------------------------------------------------------------------

    def _tell_script(self, message: ToScript) -> None:
        if self._link is not None:
            self._link.send(message)

    def _gemm_done(self, figures: dict[str, Any]) -> None:
        """A product is the whole point of a gemm job; of a training job's hundreds a second only the sums are shown."""
        if self._job.kind == "gemm":
            self._shell.publish("gemm", figures)

    async def _serve_script(self, listener: socket.socket, token: str) -> int:
        # A script of ours is there at once; one that its user starts may never come, and the job holds a place.
        limit_s = ATTACH_S_MAX if self._job.kind == "run" else None
        try:
            self._link = await asyncio.wait_for(ScriptLink.accept(listener, token, self._welcome), limit_s)
        except TimeoutError:
            log.warning("no script came", waited_s=limit_s)
            return EXIT_SCRIPT_LOST
        if self._cancelled.is_set():
            self._tell_script(Control(what="cancel"))
        self._connected.set()
        async for message in self._link.received():
            if await self._from_script(message):
                return 0
        if self._cancelled.is_set():
            return 0
        log.warning("the script closed its connection before the job was done")
        return EXIT_SCRIPT_LOST

    def _welcome(self) -> ScriptWelcome:
        job = self._job
        checkpoint = self._store.latest_checkpoint(job.id)
        folder = self._job_dir / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        arena = self._directory / "arena"
        arena.mkdir(exist_ok=True, mode=0o700)
        return ScriptWelcome(
            job=job.id, epoch=self._epoch, steps=job.steps, config={**job.config, **job.inputs},
            data=None if job.data is None else str(self._settings.datasets_dir.absolute() / job.data),
            arena_dir=str(arena), checkpoint_dir=str(folder), checkpoint_every_s=self._settings.checkpoint_every_s,
            min_gemm_flop=self._settings.gemm_flop_min, wire=job.wire,
            resume=checkpoint.path if checkpoint else None, resume_sha256=checkpoint.sha256 if checkpoint else None,
        )  # fmt: skip

    @property
    def _job_dir(self) -> Path:
        return self._settings.jobs_dir.absolute() / self._job.id

    async def _from_script(self, message: FromScript) -> bool:
        """One message of the script; whether it was its last."""
        match message:
            case GemmRequest():
                self._shell.submit(message)
            case StepReport():
                self._record_step(message)
            case CheckpointWritten():
                self._own_path(message.path)
                self._shell.spawn(self._record_checkpoint(message))
            case SampleText():
                self._shell.spawn(self._record_sample(message))
            case Validated():
                self._shell.spawn(self._record_validation(message))
            case ScriptDone():
                await self._end("succeeded", "", message.result)
                return True
            case ScriptFailed():
                await self._end("failed", message.reason, None)
                return True
            case _:
                raise ScriptError(f"got {type(message).__name__} from the script, expected a request or a report")
        return False

    def _record_step(self, report: StepReport) -> None:
        row = self._counters.step_row(report, time.time())

        def record() -> None:
            self._store.record_step(self._job.id, self._epoch, row)
            self._ledger.close_step(self._job.id, self._epoch, report.step)

        async def work() -> None:
            await self._shell.books.call(record)
            await self._switchboard.publish_live(self._job.id, "step", asdict(row))
            await self._switchboard.set_job_live(self._job.id, self._live())

        self._shell.spawn(work())

    async def _record_checkpoint(self, written: CheckpointWritten) -> None:
        """Only what the store has may make the script delete older files."""
        kept: list[bool] = []
        await self._shell.books.call(
            lambda: kept.append(
                self._store.record_checkpoint(
                    self._job.id, self._epoch, written.step, written.path, written.sha256, written.size, time.time()
                )
            )
        )
        if not kept[0]:
            raise ScriptError(f"epoch {self._epoch} of job {self._job.id} is over: another coordinator runs it")
        log.info("checkpoint", step=written.step, bytes=written.size)
        self._tell_script(Recorded(step=written.step))

    async def _record_sample(self, sample: SampleText) -> None:
        await self._shell.books.call(lambda: self._store.set_sample(self._job.id, sample.step, sample.text))
        await self._switchboard.publish_live(self._job.id, "sample", {"step": sample.step, "text": sample.text})

    async def _record_validation(self, validated: Validated) -> None:
        """Watchers learn of it from the job's record, which the gateway reads twice a second."""
        await self._shell.books.call(
            lambda: self._store.record_validation(self._job.id, self._epoch, validated.step, validated.value)
        )

    async def _end(self, state: State, reason: str, result: str | None) -> None:
        """The job's last word, after everything recorded before it."""
        if result is not None:
            self._own_path(result)

        def record() -> None:
            if result is not None:
                self._store.set_result(self._job.id, result)
            self._store.set_state(self._job.id, state, reason, time.time(), ["running"])

        await self._shell.settle()
        await self._shell.books.call(record)
        log.info("job ends", state=state, reason=reason)

    def _own_path(self, path: str) -> None:
        """A file the script names must be one of this job's: GET serves it and a later run reads it."""
        if self._job_dir not in Path(os.path.normpath(path)).parents:
            raise ScriptError(f"the script named {path}, expected a file below {self._job_dir}")


async def _run(job_id: str, epoch: int, directory: Path, fd: int, settings: Settings, token: str) -> int:
    assert settings.redis_url is not None, "the supervisor sets TILEWEAVE_REDIS_URL"
    database = Database(settings.database_path)
    switchboard = Switchboard(settings.redis_url)
    try:
        job = JobStore(database).get(job_id)
        if job is None or job.epoch != epoch:
            raise LookupError(f"job {job_id} in epoch {epoch} is not in the store")
        with socket.socket(fileno=fd) as listener:
            coordinator = Coordinator(job, epoch, directory, settings, switchboard, database)
            return await coordinator.run(listener, token)
    finally:
        await switchboard.close()
        database.close()


def main() -> int:
    """The process entry; started by the supervisor only."""
    parser = argparse.ArgumentParser(prog="backend.jobs.coordinator", description="one job's coordinator process")
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", required=True, type=int)
    parser.add_argument("--directory", required=True, type=Path, help="this epoch's part of the run directory")
    parser.add_argument("--script-fd", required=True, type=int, help="the listening socket, inherited")
    args = parser.parse_args()
    configure_logging("coordinator")
    watch_parent()
    token = os.environ.pop(TOKEN_VARIABLE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(args.job, args.epoch, args.directory, args.script_fd, Settings(), token))


if __name__ == "__main__":
    sys.exit(main())
