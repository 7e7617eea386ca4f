"""Running jobs: a coordinator and a script each, started as a pair and started again as a pair.

The idea: the two share one epoch. When either dies the other is ended too, the job begins the next epoch from its last
checkpoint, and waits a little longer each time that a run made no step; after `job_restarts_max` such runs in a row the
job fails with the last lines that its script printed. Which jobs run is read from the store: what is `running` is
resumed at start, what is `queued` follows in order, what was cancelled is stopped.

A job of kind `run` has a script that somebody else starts on this machine (`tileweave run`): it gets a coordinator, and
a file beside its logs says how to reach that. What we did not start we cannot start again: such a job has one epoch.

    store: queued -> running -------------------> succeeded | failed   (written by the coordinator)
                       |   ^ pair died: next epoch
                       +---> cancelled                                 (written by the gateway; stopped here)
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from backend.settings import Settings
from backend.stores.jobs import ENDED, LIST_LIMIT_MAX, Job, JobStore, State
from backend.supervisor.children import Child, Log, ParentPipe, describe_exit, restart_delay_s
from backend.supervisor.script import script_command, script_path, write_attachment
from backend.switchboard.messages import JobControl, JobGone
from backend.switchboard.streams import ALLOCATOR_STREAM, Switchboard, coordinator_stream
from tileweave.script.wire import TOKEN_VARIABLE

CANCEL_S_MAX = 5.0  # from telling the script to ending it
PARTNER_S_MAX = 10.0  # what the coordinator gets to finish its books after the script has ended
STOP_S_MAX = 5.0
POLL_S = 1.0  # the store is read at each wake-up, and this often in case one was missed

log = structlog.get_logger("supervisor")


class JobRun:
    """One job's processes, epoch after epoch, until the store says that it has ended or `stop` is called."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        store: JobStore,
        switchboard: Switchboard,
        pipe: ParentPipe,
        environment: Mapping[str, str],
    ) -> None:
        self.job_id = job.id
        self._settings = settings
        self._store = store
        self._switchboard = switchboard
        self._pipe = pipe
        self._environment = environment
        self._stopping = asyncio.Event()
        self._cancelling = asyncio.Event()
        self._log = log.bind(job=job.id)

    def stop(self) -> None:
        """The supervisor ends: stop the pair; the job stays `running` and is resumed at the next start."""
        self._stopping.set()

    def cancel(self) -> None:
        """The store says that the job is cancelled."""
        self._cancelling.set()

    async def run(self) -> None:
        """Returns when the job has ended or was stopped."""
        failures = 0
        try:
            while not self._stopping.is_set():
                before = self._job()
                if before.state in ENDED:
                    return
                if before.kind == "run" and before.epoch > 0:
                    self._fail("the server was started again, and a script of your own cannot be")
                    return
                began_s = time.time()
                reason = await self._epoch(before)
                if self._job().state != "running" or self._stopping.is_set():
                    return
                if before.kind == "run":
                    self._fail(reason)
                    return
                failures = 1 if self._made_a_step(began_s) else failures + 1
                if failures > self._settings.job_restarts_max:
                    self._fail(f"gave up after {failures} runs without a step: {reason}")
                    await self._tell("")
                    return
                delay_s = restart_delay_s(failures)
                self._log.warning("job restarts", reason=reason, failures=failures, delay_s=delay_s)
                await self._tell(f"starting again: {reason}")
                await _first((self._stopping, self._cancelling), delay_s)
        finally:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            if self._job().state in ENDED:
                await self._switchboard.drop_stream(coordinator_stream(self.job_id))
            self._log.info("job ends here", state=self._job().state)

    def _fail(self, reason: str) -> None:
        self._store.set_state(self.job_id, "failed", reason, time.time(), ["running"])

    @property
    def _run_dir(self) -> Path:
        return self._settings.run_dir.absolute() / "jobs" / self.job_id

    def _job(self) -> Job:
        job = self._store.get(self.job_id)
        if job is None:
            raise LookupError(f"job {self.job_id} is no longer in the store")
        return job

    def _made_a_step(self, since_s: float) -> bool:
        """Whether the run that began then recorded any step, be it a replayed one."""
        last = self._job().step
        rows = self._store.metrics(self.job_id, after_step=last - 1, limit=1) if last is not None else []
        return bool(rows) and rows[0].time_s >= since_s

    async def _tell(self, waiting: str) -> None:
        """Shows on the job's page why nothing moves."""
        live = {"waiting": waiting or None, "devices": 0, "gflops": 0.0, "tiles_per_s": 0.0}
        await self._switchboard.set_job_live(self.job_id, live)
        await self._switchboard.publish_live(self.job_id, "job", live)

    async def _epoch(self, job: Job) -> str:
        """One run of the pair; why it ended."""
        epoch = self._store.begin_epoch(self.job_id, time.time())
        self._log.info("job starts", epoch=epoch, recipe=job.recipe or job.kind)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        directory = self._run_dir / f"e{epoch}"
        directory.mkdir(parents=True, mode=0o700)
        pair: list[Child] = []
        try:
            await self._start_pair(job, epoch, directory, pair)
            return await self._watch(*pair)
        except (OSError, LookupError) as error:
            return f"cannot be started: {error}"
        finally:
            await asyncio.gather(*(child.stop(STOP_S_MAX) for child in pair))
            await self._switchboard.send(ALLOCATOR_STREAM, [JobGone(job=self.job_id, epoch=epoch)])

    async def _start_pair(self, job: Job, epoch: int, directory: Path, pair: list[Child]) -> None:
        """Appends the coordinator, and the script if it is ours. Its socket is bound here: neither has to wait."""
        token = secrets.token_urlsafe(32)
        logs = self._settings.jobs_dir.absolute() / self.job_id
        path = None if job.kind == "run" else script_path(job)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "script.sock"))
            listener.listen(4)
            argv = [sys.executable, "-m", "backend.jobs.coordinator"]
            argv += ["--job", self.job_id, "--epoch", str(epoch), "--script-fd", str(listener.fileno())]
            argv += ["--directory", str(directory)]
            # One BLAS thread for each check thread: more only spin (measured: 20 times slower).
            env = {**self._environment, TOKEN_VARIABLE: token, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            coordinator = await Child.start(
                "coordinator", argv, env, self._pipe, pass_fds=[listener.fileno()], log=Log(logs / "coordinator.log")
            )
            pair.append(coordinator)
        if path is None:
            write_attachment(logs, directory / "script.sock", token)
            return
        argv, env = script_command(path, directory / "script.sock", token, os.environ)
        script = await Child.start(
            "script", argv, env, self._pipe, death_signal=signal.SIGKILL, log=Log(logs / "script.log"), cwd=logs
        )
        pair.append(script)

    async def _watch(self, *pair: Child) -> str:
        """Waits for an end: of the job, of any process, of us. Why it came."""
        ends = {asyncio.create_task(child.wait()): child for child in pair}
        orders = [asyncio.create_task(event.wait()) for event in (self._stopping, self._cancelling)]
        try:
            done, _ = await asyncio.wait([*ends, *orders], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                return "the server stops"
            if self._cancelling.is_set():
                await self._switchboard.send(coordinator_stream(self.job_id), [JobControl(what="cancel")])
                await asyncio.wait(ends, timeout=CANCEL_S_MAX)
                return "cancelled"
            first = next(end for end in ends if end in done)
            # The other one has words left: the script's reason, the coordinator's last commits.
            others = [end for end in ends if end is not first]
            if others:
                await asyncio.wait([*others, orders[0]], timeout=PARTNER_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            return _why(ends[first], first.result())
        finally:
            for task in (*ends, *orders):
                task.cancel()


def _why(child: Child, status: int) -> str:
    tail = child.log.tail if child.log is not None else ""
    return f"the {child.name} ended ({describe_exit(status)})" + (f"; its last lines: {tail}" if tail else "")


async def _first(events: tuple[asyncio.Event, ...], seconds: float) -> None:
    """Waits for the first of the events, at most `seconds`."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class JobQueue:
    """Keeps up to `jobs_running_max` jobs running: those that were, then those that wait, oldest first."""

    def __init__(self, settings: Settings, store: JobStore, make_run: Callable[[Job], JobRun]) -> None:
        self._settings = settings
        self._store = store
        self._make_run = make_run
        self._running: dict[str, tuple[JobRun, asyncio.Task[None]]] = {}
        self._look = asyncio.Event()

    def look(self) -> None:
        """Something changed in the store."""
        self._look.set()

    async def serve(self) -> None:
        """Runs until cancelled; then stops all jobs and returns when their processes are gone."""
        try:
            while True:
                self._look.clear()
                self._turn()
                await _first((self._look,), POLL_S)
        finally:
            for run, _ in self._running.values():
                run.stop()
            await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)

    def _turn(self) -> None:
        for job_id, (_, task) in list(self._running.items()):
            if task.done():
                del self._running[job_id]
                if (error := task.exception()) is not None:
                    log.error("a job's supervision failed", job=job_id, error=repr(error))
        for job_id, (run, _) in self._running.items():
            job = self._store.get(job_id)
            if job is not None and job.state == "cancelled":
                run.cancel()
        free = self._settings.jobs_running_max - len(self._running)
        states: tuple[State, ...] = ("running", "queued")
        waiting = [job for state in states for job in reversed(self._store.list([state], limit=LIST_LIMIT_MAX))]
        for job in [job for job in waiting if job.id not in self._running][: max(0, free)]:
            run = self._make_run(job)
            task = asyncio.create_task(run.run(), name=f"job {job.id}")
            task.add_done_callback(lambda _: self.look())
            self._running[job.id] = (run, task)
