"""What a training script sees of its job.

    run = attach()                                   # under a job: connects; by hand: a plain local run
    state = TrainState(model, optimizer)
    for step in run.steps_left(state):               # 1, 2, ... ; after a restart: from the last checkpoint on
        with run.offload():
            loss = ...; loss.backward(); optimizer.step()
        run.step(step, loss.item(), samples=tokens)  # reports, writes a checkpoint when one is due
    run.finish()

The idea: the same script trains on volunteers' devices, or alone in this process, and need not know which. Step s is
the s-th update: 0 means that nothing has been done yet, and a checkpoint of step s holds s updates.
A cancel or a lost coordinator shows as JobCancelled (a SystemExit) or JobLost at the next GEMM or step; an uncaught
exception is reported to the job with its message and line.
Left out: several optimizers in one checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from tileweave.script.arena import Arena
from tileweave.script.channel import Channel, JobLost
from tileweave.script.checkpoint import TrainState, checkpoint_name, read_checkpoint, remove_others, write_checkpoint
from tileweave.script.executor import Eager, Executor
from tileweave.script.multiply import ArenaMultiplier, Multiplier, PlainMultiplier
from tileweave.script.offload import MIN_GEMM_FLOP, Offloader, OffloadMode, math_attention
from tileweave.script.task import Task
from tileweave.script.wire import (
    SOCKET_VARIABLE,
    TOKEN_VARIABLE,
    CheckpointWritten,
    SampleText,
    ScriptDone,
    ScriptFailed,
    ScriptWelcome,
    StepReport,
    Validated,
)

CHECKPOINTS_KEPT = 2
SAMPLE_CHARACTERS_MAX = 64_000
REASON_CHARACTERS_MAX = 4_000


class LossNotFiniteError(ArithmeticError):
    """The loss became NaN or infinite: going on would only train noise."""


class Run:
    """A script's run: as a job's where `channel` is connected, else alone. `welcome` says what the job is."""

    def __init__(
        self,
        welcome: ScriptWelcome,
        channel: Channel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = welcome.job
        self.config: dict[str, Any] = welcome.config
        self.steps = welcome.steps
        self.data: str | None = welcome.data
        self.multiplier: Multiplier = PlainMultiplier()
        self._welcome = welcome
        self._channel = channel
        self._clock = clock
        self._remote: ArenaMultiplier | None = None
        if channel is not None:
            self._arena = Arena(Path(welcome.arena_dir))
            self.multiplier = self._remote = ArenaMultiplier(channel, self._arena, welcome.wire)
        self.offloader = Offloader(self.multiplier, welcome.min_gemm_flop)
        self._state: TrainState | None = None
        self._step = 0
        self._step_began_s = self._checkpointed_s = clock()
        self._flop_reported = (0, 0)
        self._written: list[tuple[int, Path]] = []  # this run's checkpoints and the one resumed from, oldest first
        self._recorded = -1
        self._finished = False
        self._process = os.getpid()

    @property
    def _over(self) -> bool:
        """Nothing more is to be said: the run has ended, or this is a forked child with the parent's socket."""
        return self._finished or os.getpid() != self._process

    def resume(self, state: TrainState) -> int:
        """Makes `state` what checkpoints hold, and loads the job's last one into it; the number of steps done.

        Raises CheckpointError where the recorded checkpoint is missing or damaged: never starts afresh instead."""
        self._state = state
        if self._welcome.resume is not None:
            path = Path(self._welcome.resume)
            self._step = read_checkpoint(path, self._welcome.resume_sha256, state)
            self._written = [(self._step, path)]
        self._begin_step()
        return self._step

    def steps_left(self, state: TrainState) -> Iterator[int]:
        """Resumes, then gives each step to do, by its number."""
        yield from range(self.resume(state) + 1, self.steps + 1)

    def offload(self) -> AbstractContextManager[object]:
        """GEMMs inside go to the job's devices (in this thread); a run by hand computes them here as ever."""
        if self._channel is None:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(math_attention())
        stack.enter_context(OffloadMode(self.offloader))
        return stack

    def step(self, step: int, loss: float | None, samples: int, unit: str = "tokens") -> None:
        """Step `step` is done, on `samples` tokens or rows: reports it, and writes a checkpoint when one is due.

        Raises LossNotFiniteError, JobCancelled or JobLost."""
        if self._over:
            return
        if loss is not None and not math.isfinite(loss):
            last = (
                f"the last checkpoint is of step {self._written[-1][0]}" if self._written else "there is no checkpoint"
            )
            raise LossNotFiniteError(
                f"the loss is {loss} at step {step}, expected was a finite number: lower the learning rate, or look at "
                f"the data ({last})"
            )
        seconds = self._clock() - self._step_began_s
        self._report(step, loss, samples, unit, seconds)
        if self._channel is None:
            print(
                f"step {step}/{self.steps}: loss {loss:.4f}, {samples / max(seconds, 1e-9):,.0f} {unit}/s", flush=True
            )
        if self._clock() - self._checkpointed_s >= self._welcome.checkpoint_every_s:
            self._checkpoint()
        self._begin_step()

    def sample(self, step: int, text: str) -> None:
        """Text that the model made after `step` steps, for the job's page."""
        if self._channel is not None:
            self._channel.send(SampleText(step=step, text=text[:SAMPLE_CHARACTERS_MAX]))
        print(f"sample after step {step}:\n{text}", flush=True)

    def validated(self, step: int, value: float) -> None:
        """The figure on held-out data after `step` steps, for the job's page."""
        if self._channel is not None:
            self._channel.send(Validated(step=step, value=value))
        print(f"validation after step {step}: {value:.4f}", flush=True)

    def executor(self, task: Task) -> Executor:
        """What computes this run's gradients: the config's `executor`, "eager" or "graph"."""
        if self.config.get("executor", "eager") == "eager":
            return Eager(task, self.offload)
        from tileweave.script.graph import GraphExecutor  # what captures takes a second to import

        return GraphExecutor(task, self.offloader)

    def result_path(self, suffix: str) -> Path:
        """Where a result file of this job belongs: beside the checkpoints' folder, or the working directory by hand."""
        if self._channel is None:
            return Path(f"result{suffix}")
        return Path(self._welcome.checkpoint_dir).parent / f"result{suffix}"

    def finish(self, result: Path | None = None) -> None:
        """The script has done its work: writes the last checkpoint, names `result`, and lets the job succeed."""
        if self._over:
            return
        if self._state is not None and not any(step == self._step for step, _ in self._written):
            self._checkpoint()
        if self._channel is not None:
            if self._written:
                self._channel.wait_recorded(self._written[-1][0])
                self._forget_older(self._written[-1][0])
            self._channel.send(ScriptDone(result=None if result is None else str(result.absolute())))
            self._channel.close()
            self._arena.close()
        self._finished = True

    def fail(self, error: BaseException) -> None:
        """Tells the job why the script cannot go on: type, message and the script's last line."""
        if self._channel is None or self._over:
            return
        with contextlib.suppress(JobLost):  # then nobody is left to tell
            self._channel.send(ScriptFailed(reason=describe(error)))
        self._channel.close()
        self._finished = True

    def _begin_step(self) -> None:
        self._step_began_s = self._clock()
        if self._remote is not None:
            self._remote.step = self._step + 1

    def _report(self, step: int, loss: float | None, samples: int, unit: str, seconds: float) -> None:
        self._step = step
        if self._channel is None:
            return
        offloaded, local = self.offloader.flop_offloaded, self.offloader.flop_local
        before_offloaded, before_local = self._flop_reported
        self._flop_reported = (offloaded, local)
        self._channel.send(
            StepReport(
                step=step, loss=loss, samples=samples, unit=unit, seconds=seconds,
                flop_offloaded=offloaded - before_offloaded, flop_local=local - before_local,
            )
        )  # fmt: skip
        self._forget_older(self._channel.poll())

    def _checkpoint(self) -> None:
        self._checkpointed_s = self._clock()
        if self._state is None or not self._welcome.checkpoint_dir:
            return
        folder = Path(self._welcome.checkpoint_dir)
        folder.mkdir(parents=True, exist_ok=True)
        written = write_checkpoint(folder / checkpoint_name(self._step, self._welcome.epoch), self._step, self._state)
        self._written.append((self._step, written.path))
        if self._channel is None:
            self._forget_older(self._step)
        else:
            self._channel.send(
                CheckpointWritten(step=self._step, path=str(written.path), sha256=written.sha256, size=written.size)
            )

    def _forget_older(self, recorded: int) -> None:
        """The checkpoint of step `recorded` is in the store: keeps it, the one before, and any not recorded yet."""
        if recorded <= self._recorded:
            return
        self._recorded = recorded
        oldest = [step for step, _ in self._written if step <= recorded][-CHECKPOINTS_KEPT:][0]
        self._written = [(step, path) for step, path in self._written if step >= oldest]
        remove_others(Path(self._welcome.checkpoint_dir), {path for _, path in self._written})


_attached: Run | None = None


def attach(steps: int = 100, data: str | None = None) -> Run:
    """This process's run. Under a job (its supervisor sets the environment) connects to the coordinator, and reports
    uncaught exceptions to it; else a local run of `steps` steps on `data`. Asking again gives the same run.

    Raises JobLost where the coordinator does not answer."""
    global _attached
    if _attached is None:
        path = os.environ.get(SOCKET_VARIABLE)
        if path is None:
            _attached = Run(local_welcome(steps, data))
        else:
            channel, welcome = Channel.connect(path, os.environ.pop(TOKEN_VARIABLE, ""), os.getpid())
            _attached = Run(welcome, channel)
            _report_uncaught(_attached)
    return _attached


def local_welcome(steps: int, data: str | None, checkpoint_dir: str = "") -> ScriptWelcome:
    """What a run by hand is told; without a folder for checkpoints it writes none."""
    return ScriptWelcome(
        job="local", epoch=1, steps=steps, config={}, data=data, arena_dir="", checkpoint_dir=checkpoint_dir,
        checkpoint_every_s=60.0, min_gemm_flop=MIN_GEMM_FLOP,
    )  # fmt: skip


def describe(error: BaseException) -> str:
    """`ValueError: message (train.py, line 12: loss.backward())`, the line being the script's last own one."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("site-packages", "/tileweave/script/", str(Path(os.__file__).parent))
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    if own:
        text += f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})"
    return text[:REASON_CHARACTERS_MAX]


def _report_uncaught(run: Run) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run.fail(error)
        before(kind, error, trace)

    sys.excepthook = hook
