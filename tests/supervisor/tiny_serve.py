"""`tileweave serve` with a training script that needs no torch and no devices in the recipe's place.

As that script it makes a step about every 20 ms, each with a checkpoint that holds only its number, until it is told to
stop. `config.seed` 13 makes it crash with a message at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import select
import socket
import sys
from pathlib import Path

import msgspec

from tileweave.script.wire import (
    CheckpointWritten,
    Control,
    ScriptDone,
    ScriptHello,
    ScriptWelcome,
    StepReport,
    ToScript,
)

STEP_S = 0.02
CRASHING_SEED = 13


def serve() -> None:
    from backend.cli import main
    from backend.recipes import RECIPES

    RECIPES["gpt-bytes"] = dataclasses.replace(RECIPES["gpt-bytes"], script=Path(__file__).resolve())
    main()


class Coordinator:
    """The script's end of the socket, as plain as it gets."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["TILEWEAVE_JOB_SOCKET"])
        self.file = self.socket.makefile("rb")
        self.say(ScriptHello(token=os.environ["TILEWEAVE_JOB_TOKEN"], pid=os.getpid()))

    def say(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        self.socket.sendall(len(body).to_bytes(4, "little") + body)

    def hear(self) -> ToScript:
        head = self.file.read(4)
        if not head:
            sys.exit("the coordinator is gone")
        return msgspec.msgpack.decode(self.file.read(int.from_bytes(head, "little")), type=ToScript)


def train() -> None:
    coordinator = Coordinator()
    welcome = coordinator.hear()
    assert isinstance(welcome, ScriptWelcome)
    if welcome.config["seed"] == CRASHING_SEED:
        sys.exit("this script was told to crash")
    done = 0
    if welcome.resume is not None:
        body = Path(welcome.resume).read_bytes()
        assert hashlib.sha256(body).hexdigest() == welcome.resume_sha256
        done = int(body)
    print(f"goes on after step {done}", flush=True)
    for step in range(done + 1, welcome.steps + 1):
        while select.select([coordinator.socket], [], [], STEP_S)[0]:
            message = coordinator.hear()
            if isinstance(message, Control):
                sys.exit(3)
        coordinator.say(
            StepReport(step=step, loss=1.0 / step, samples=1, seconds=STEP_S, flop_offloaded=0, flop_local=1)
        )
        path = Path(welcome.checkpoint_dir) / f"step-{step}.txt"
        body = str(step).encode()
        path.write_bytes(body)
        coordinator.say(
            CheckpointWritten(step=step, path=str(path), sha256=hashlib.sha256(body).hexdigest(), size=len(body))
        )
    coordinator.say(ScriptDone())


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        train()
