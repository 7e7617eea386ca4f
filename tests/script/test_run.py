"""A script's run: what it reports, when it writes checkpoints, how it ends, and that a resume continues exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tileweave.script import wire
from tileweave.script.channel import Channel, JobCancelled
from tileweave.script.checkpoint import CheckpointError, TrainState
from tileweave.script.run import LossNotFiniteError, Run, local_welcome

PROGRAM = """
from tileweave.script.run import attach
run = attach()
assert attach() is run
{body}
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def small(seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return TrainState(model, torch.optim.AdamW(model.parameters()))


def train(run: Run, state: TrainState, stop_after: int | None = None) -> list[float]:
    losses = []
    for step in run.steps_left(state):
        with run.offload():
            loss = state.model(torch.randn(8, 4)).square().mean() + torch.rand(())  # draws from the saved generator
            state.optimizer.zero_grad()
            loss.backward()
        state.optimizer.step()
        state.position += 8
        losses.append(loss.item())
        run.step(step, loss.item(), samples=8, unit="rows")
        if step == stop_after:
            return losses
    run.finish()
    return losses


@pytest.fixture
def connected() -> Iterator[Callable[..., Run]]:
    channels = []

    def connect(peer: Any, clock: Any = None) -> Run:
        channel, welcome = Channel.connect(peer.path, peer.token, os.getpid())
        channels.append(channel)
        return Run(welcome, channel, clock or Clock())

    yield connect
    for channel in channels:
        channel.close()


def run_program(peer: Any, body: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TILEWEAVE_JOB_SOCKET": peer.path, "TILEWEAVE_JOB_TOKEN": peer.token}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], env=environment, capture_output=True, text=True, check=False
    )
    peer.join()
    return done


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_job_reports_steps_and_keeps_the_two_last_recorded_checkpoints(start_peer: Any, connected: Any) -> None:
    peer = start_peer(steps=4)
    train(connected(peer), small())
    peer.join()
    reports = peer.of(wire.StepReport)
    assert [(r.step, r.samples, r.unit) for r in reports] == [(s, 8, "rows") for s in (1, 2, 3, 4)]
    assert all(r.flop_offloaded == 2 * 2 * 8 * 4 * 4 and r.flop_local == 0 for r in reports)  # forward, and d weight
    assert {g.step for g in peer.of(wire.GemmRequest)} == {1, 2, 3, 4}
    written = peer.of(wire.CheckpointWritten)
    assert [w.step for w in written] == [1, 2, 3, 4]
    assert names(peer.checkpoints) == ["step-00000003.epoch-3.safetensors", "step-00000004.epoch-3.safetensors"]
    assert peer.messages[-1] == wire.ScriptDone(result=None)
    assert not any(Path(peer.welcome.arena_dir).iterdir())


def test_checkpoints_are_written_by_the_clock_and_at_the_end(start_peer: Any, connected: Any) -> None:
    peer, clock = start_peer(steps=5, checkpoint_every_s=10.0), Clock()
    run, state = connected(peer, clock), small()
    for step in run.steps_left(state):
        clock.now_s += 4.0
        run.step(step, 1.0, samples=1)
    run.finish()
    peer.join()
    assert [w.step for w in peer.of(wire.CheckpointWritten)] == [3, 5]
    assert [r.seconds for r in peer.of(wire.StepReport)] == [4.0] * 5


def test_nothing_is_deleted_before_it_is_recorded(start_peer: Any, connected: Any) -> None:
    peer = start_peer(steps=4)
    peer.answer = lambda m: [] if isinstance(m, wire.CheckpointWritten) else peer.default_answer(m)
    run, state = connected(peer), small()
    train(run, state, stop_after=4)
    assert len(names(peer.checkpoints)) == 4
    peer.send(wire.Recorded(step=4))
    run.finish()
    assert names(peer.checkpoints) == ["step-00000003.epoch-3.safetensors", "step-00000004.epoch-3.safetensors"]


def test_resumed_is_bit_identical_to_uninterrupted(tmp_path: Path) -> None:
    def local(folder: str, **resume: Any) -> Run:
        welcome = local_welcome(6, None, str(tmp_path / folder))
        return Run(wire.ScriptWelcome(**{**{f: getattr(welcome, f) for f in welcome.__struct_fields__}, **resume}))

    whole = small()
    curve = train(local("whole"), whole)
    first = small()
    stopped = local("part")
    head = train(stopped, first, stop_after=3)
    stopped.finish()
    path = tmp_path / "part" / names(tmp_path / "part")[-1]
    torch.rand(17)  # the generator is elsewhere meanwhile
    second = small(seed=99)
    tail = train(local("part", resume=str(path)), second)
    assert head + tail == curve
    assert second.position == whole.position == 48
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_a_resume_goes_on_under_the_job_and_keeps_its_file_until_two_newer_ones(
    start_peer: Any, connected: Any
) -> None:
    before = start_peer(steps=2)
    train(connected(before), small())
    before.join()
    last = before.of(wire.CheckpointWritten)[-1]
    orphan = Path(last.path).with_name("step-00000099.epoch-4.safetensors")
    orphan.write_bytes(b"written, never recorded")
    peer = start_peer(
        steps=3, epoch=5, resume=last.path, resume_sha256=last.sha256, checkpoint_dir=str(before.checkpoints)
    )
    train(connected(peer), small())
    peer.join()
    assert [r.step for r in peer.of(wire.StepReport)] == [3]
    assert names(before.checkpoints) == ["step-00000002.epoch-3.safetensors", "step-00000003.epoch-5.safetensors"]


def test_a_damaged_checkpoint_is_never_a_fresh_start(start_peer: Any, connected: Any, tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").write_bytes(b"nonsense")
    peer = start_peer(resume=str(tmp_path / "c.safetensors"), resume_sha256="00")
    run = connected(peer)
    with pytest.raises(CheckpointError, match="is damaged"):
        train(run, small())
    run.fail(CheckpointError("x"))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_with_a_reason(loss: float) -> None:
    run = Run(local_welcome(3, None))
    with pytest.raises(LossNotFiniteError, match=r"the loss is (nan|inf) at step 1.*there is no checkpoint"):
        run.step(1, loss, samples=1)


def test_cancel_ends_the_script_before_a_further_checkpoint(start_peer: Any, connected: Any) -> None:
    peer = start_peer()
    peer.answer = lambda m: [wire.Control(what="cancel")] if isinstance(m, wire.GemmRequest) else peer.default_answer(m)
    with pytest.raises(JobCancelled):
        train(connected(peer), small())
    assert peer.of(wire.CheckpointWritten) == []


def test_an_uncaught_exception_reaches_the_job_with_its_line(start_peer: Any, tmp_path: Path) -> None:
    peer = start_peer()
    program = tmp_path / "broken.py"
    program.write_text("def f():\n    raise ValueError('no such luck')\nf()\n")
    done = run_program(peer, f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    assert done.returncode == 1
    reason = "ValueError: no such luck (broken.py, line 2: raise ValueError('no such luck'))"
    assert peer.messages[-1] == wire.ScriptFailed(reason=reason)


def test_a_cancelled_script_exits_with_its_own_status_and_reports_no_failure(start_peer: Any) -> None:
    peer = start_peer()
    peer.answer = lambda m: [wire.Control(what="cancel")] if isinstance(m, wire.SampleText) else peer.default_answer(m)
    body = "run.sample(0, 'x')\nwhile True:\n    try: run.step(1, 1.0, 1)\n    except Exception: pass"
    done = run_program(peer, body)
    assert (done.returncode, done.stderr) == (3, "")
    assert peer.of(wire.ScriptFailed) == []


def test_a_lost_coordinator_ends_the_script_with_the_reason(start_peer: Any) -> None:
    peer = start_peer()
    peer.answer = lambda m: None if isinstance(m, wire.SampleText) else peer.default_answer(m)
    done = run_program(peer, "run.sample(0, 'x')\nwhile True: run.step(1, 1.0, 1)")
    assert done.returncode == 1
    assert "JobLost" in done.stderr.splitlines()[-1]


def test_the_token_is_not_left_to_child_processes(start_peer: Any) -> None:
    peer = start_peer()
    done = run_program(peer, "import os; print('TILEWEAVE_JOB_TOKEN' in os.environ); run.finish()")
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_importing_the_package_or_its_protocol_loads_no_torch() -> None:
    code = (
        "import sys, tileweave, tileweave.script.wire; assert not {'torch', 'tileweave.script.run'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
