"""The graph executor: every GEMM that can run is under way at once, of all micro-batches, while the rest runs here.

The idea: a step's GEMMs come in levels, each of which costs a round trip when they are waited for one by one. Here the
captured graph (capture.py, program.py) is run by its data: a GEMM whose operands are there is started at once, and
while products are on their way, other operators run, of this micro-batch or another. With a few micro-batches one's
round trip hides behind another's computing.

    ready GEMMs  -> started (at most IN_FLIGHT_MAX)  -> finished -> result -> steps that waited for it
    ready others -> run here, in the order of capture, the first micro-batch first

Gradients are added in the order of the micro-batches; those of weights, dW = dY^T X, are one product for all of them,
whose operands wait for each other (program.py). Timing changes nothing.
Left out: an optimizer that starts before all gradients are there (clipping needs them all).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileweave.script.capture import Captured, capture
from tileweave.script.multiply import Pending
from tileweave.script.offload import Offloader, Started, math_attention
from tileweave.script.program import Instance, Program
from tileweave.script.task import Batch, Task

IN_FLIGHT_MAX = 64
"""Products under way at once: each holds its operands in the arena."""

PROGRAMS_MAX = 8
"""Captured graphs kept, the last used ones."""

_Job = tuple[int, int]  # step, micro-batch
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class GraphExecutor:
    """Runs a task's captured graph; see Executor. A batch of a new shape, and a model whose parameters are others or
    train otherwise than before, are captured when they come first."""

    def __init__(self, task: Task, offloader: Offloader) -> None:
        self._task = task
        self._offloader = offloader
        self._programs: dict[tuple[object, ...], tuple[Captured, Program]] = {}

    def gradients(self, batches: Sequence[Batch]) -> float:
        """See Executor. Raises CaptureError, and what the multiplier raises."""
        captured, program = self._program(_own(batches[0]))
        tensors = [tensor.detach() for tensor in (*captured.trained, *captured.others)]
        instances = [Instance(program, [*tensors, *_own(batch)], first=i == 0) for i, batch in enumerate(batches)]
        with torch.no_grad(), math_attention():
            run(instances, self._offloader, len(tensors))
            for number, parameter in enumerate(captured.trained, start=1):
                for instance in instances:
                    _add(parameter, instance.result(number), len(instances))
        return sum(float(instance.result(0)) for instance in instances) / len(instances)

    def _program(self, batch: Batch) -> tuple[Captured, Program]:
        model = self._task.model
        key = (
            self._task.variant(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            *(module.training for module in model.modules()),
            *((id(t), t.requires_grad, *_form(t)) for t in (*model.parameters(), *model.buffers())),
            *(_form(t) for t in batch),
        )
        found = self._programs.pop(key, None)
        if found is None:
            captured = capture(model, self._task.loss, batch)
            found = captured, Program(captured.graph, range(1, 1 + len(captured.trained)))
        self._programs[key] = found  # last used, last in order
        if len(self._programs) > PROGRAMS_MAX:
            del self._programs[next(iter(self._programs))]
        return found


def _own(batch: Batch) -> Batch:
    """In memory of its own: a graph may know where in its memory a tensor began."""
    return tuple(tensor.clone() for tensor in batch)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _add(parameter: Tensor, gradient: Tensor | None, count: int) -> None:
    if gradient is None:
        return
    part = gradient / count if count > 1 else gradient
    if parameter.grad is None:
        parameter.grad = part.clone() if part is gradient else part
    else:
        parameter.grad += part


def run(instances: list[Instance], offloader: Offloader, common: int = 0) -> None:
    """Every step of every micro-batch. The first `common` inputs are the same for all of them. Raises what the
    multiplier raises."""
    _Pass(instances, offloader, common).run()


class _Pass:
    """One pass of all micro-batches through their program."""

    def __init__(self, instances: list[Instance], offloader: Offloader, common: int) -> None:
        self._instances = instances
        self._offloader = offloader
        self._common = common
        program = instances[0].program
        self._steps = program.steps
        self._sums = program.sums if len(instances) > 1 else set()
        self._views = program.views if len(instances) > 1 else set()
        self._gathered: dict[int, dict[int, _Arguments]] = {}  # of each sum, by micro-batch
        self._here: list[_Job] = []  # a heap
        self._away: deque[_Job] = deque()  # ready, to be offloaded or found too small
        self._started: dict[_Job, tuple[Started, int]] = {}  # and how many of its products are outstanding
        self._pending: dict[Pending, _Job] = {}

    def run(self) -> None:
        """Until every step is done."""
        for batch, instance in enumerate(self._instances):
            self._ready(batch, instance.ready())
        while self._away or self._here or self._pending:
            while self._away and len(self._pending) < IN_FLIGHT_MAX:
                self._start(self._away.popleft())
            if self._pending:
                block = not self._here
                for pending in self._offloader.multiplier.finished(self._pending, block):
                    self._finished(pending)
            if self._here and not (self._away and len(self._pending) < IN_FLIGHT_MAX):
                job = heapq.heappop(self._here)
                self._done(job, self._local(*job))

    def _ready(self, batch: int, steps: Sequence[int]) -> None:
        for step in steps:
            if self._offloader.takes(self._steps[step].func):
                self._away.append((step, batch))
            else:
                heapq.heappush(self._here, (step, batch))

    def _start(self, job: _Job) -> None:
        number, batch = job
        step = self._steps[number]
        args, kwargs = self._instances[batch].arguments(number)
        if number in self._sums:
            gathered = self._gathered.setdefault(number, {})
            gathered[batch] = args, kwargs
            if batch > 0:
                self._done(job, None)
            if len(gathered) < len(self._instances):
                return
            job = number, 0  # the sum is the first micro-batch's product, the others have none
            started = self._offloader.start_sum(step.func, [gathered[each] for each in sorted(gathered)])
        else:
            everywhere = step.given is not None and step.given < self._common
            uses = step.uses * (len(self._instances) if everywhere else 1)
            started = self._offloader.start(step.func, args, kwargs, uses)
        if started is None:
            heapq.heappush(self._here, job)
            return
        self._gathered.pop(number, None)
        self._started[job] = started, len(started.pending)
        self._pending |= dict.fromkeys(started.pending, job)

    def _local(self, number: int, batch: int) -> object:
        """The value of a step that runs here."""
        step = self._steps[number]
        if number in self._views and batch > 0:
            return None
        gathered = self._gathered.pop(number, None)
        if gathered is None:
            args, kwargs = self._instances[batch].arguments(number)
            return self._offloader.local(step.func, args, kwargs)
        first, *others = (self._offloader.local(step.func, *gathered[each]) for each in sorted(gathered))
        return sum(others, start=first)

    def _finished(self, pending: Pending) -> None:
        job = self._pending.pop(pending)
        started, outstanding = self._started.pop(job)
        if outstanding > 1:
            self._started[job] = started, outstanding - 1
        else:
            self._done(job, started.result())

    def _done(self, job: _Job, value: object) -> None:
        step, batch = job
        self._ready(batch, self._instances[batch].done(step, value))
        if batch + 1 < len(self._instances):
            self._ready(batch + 1, self._instances[batch + 1].released(self._steps[step].carried))
