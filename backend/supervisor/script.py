"""How a job's script process is started: a command and an environment, nothing more.

The idea: a recipe is an ordinary Python file that calls `tileweave.script.run.attach()`; that finds the coordinator
through two variables. The script is the user's code: it gets no token of ours, no address of Redis or the database,
only the one-off secret of its own socket.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from backend.recipes import RECIPES
from backend.stores.jobs import Job
from tileweave.script.wire import SOCKET_VARIABLE, TOKEN_VARIABLE

GEMM_RECIPE = "gemm"
ATTACHMENT = "attach.json"


def script_path(job: Job) -> Path:
    """The file the job runs. Raises LookupError for a recipe that this release does not have."""
    name = GEMM_RECIPE if job.kind == "gemm" else job.recipe
    recipe = RECIPES.get(name)
    if recipe is None:
        raise LookupError(f"got recipe {name!r}, expected one of {sorted(RECIPES)}")
    return recipe.script


def write_attachment(folder: Path, socket: Path, token: str) -> None:
    """Tells a script that we do not start how to reach its coordinator: readable by our own user only."""
    temporary = folder / f"{ATTACHMENT}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600, exist_ok=False)
    temporary.write_text(json.dumps({SOCKET_VARIABLE: str(socket), TOKEN_VARIABLE: token}))
    temporary.replace(folder / ATTACHMENT)


def script_command(
    path: Path, socket: Path, token: str, inherited: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that runs the script at `path`, and its environment: `inherited` without anything of Tileweave's own,
    plus the way to its coordinator."""
    return [sys.executable, str(path)], script_environment(str(socket), token, inherited)


def script_environment(socket: str, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` without anything of Tileweave's own, plus the way to the script's coordinator."""
    env = {name: value for name, value in inherited.items() if not name.startswith("TILEWEAVE_")}
    env |= {SOCKET_VARIABLE: socket, TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
    # A core stays for the coordinator and the gateway: the script waits for them at every GEMM.
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    return env
