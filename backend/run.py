"""`tileweave run`: starts somebody's script here and gives it a job of the server on this machine.

The idea: the server makes a coordinator for the job and leaves a file, readable by its own user only, that says where
it listens; the script's process gets that in its environment and does the rest (tileweave/script/plain.py). Its output
and input are the terminal's; its exit status is ours.
Left out: servers elsewhere, whose coordinator could not read the script's memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

from backend.settings import Settings
from backend.supervisor.script import ATTACHMENT, script_environment
from tileweave.rest import Client, RestError
from tileweave.script.wire import SOCKET_VARIABLE, TOKEN_VARIABLE

START_S_MAX = 60.0
POLL_S = 0.1
CANCELLED_S_MAX = 5.0  # what a script gets to end by itself once its job has ended
END_S_MAX = 5.0  # what the coordinator gets to record the script's last words


def run_script(client: Client, job: str, command: list[str]) -> int:
    """Runs `command` (a script or `-m module`, and its arguments) under the job; its exit status. Raises RuntimeError
    where the server cannot be reached from a process on this machine, or does not start the job."""
    try:
        environment = _attachment(client, job)
    except KeyboardInterrupt:
        client.cancel(job)
        raise
    # -P: our own imports must not find the script's files, whatever they are called.
    script = subprocess.Popen([sys.executable, "-P", "-m", "tileweave.script.plain", *command], env=environment)
    try:
        status = _wait(client, job, script)
    finally:
        if script.poll() is None:
            script.kill()
            script.wait()
        state, reason = _ended(client, job)
    if state != "succeeded":
        print(f"job {job} {state}: {reason}", file=sys.stderr)
        return status or 1
    return status


def _wait(client: Client, job: str, script: subprocess.Popen[bytes]) -> int:
    """The script's exit status. One whose job has been cancelled is ended where it does not end by itself."""
    patience_s = [CANCELLED_S_MAX, CANCELLED_S_MAX]
    while True:
        try:
            return script.wait(1.0)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # the script has got it too, and may want to end by itself
            continue
        with suppress(RestError):  # the server is away: the script will hear of it from its coordinator
            if client.job(job)["state"] == "cancelled":
                patience_s[-1] -= 1.0
                if patience_s[-1] <= 0:
                    patience_s.pop()
                    script.terminate() if patience_s else script.kill()
                    patience_s = patience_s or [CANCELLED_S_MAX]


def _attachment(client: Client, job: str) -> dict[str, str]:
    """The script's environment, from the file that the server leaves."""
    path = Settings().jobs_dir.absolute() / job / ATTACHMENT
    deadline = time.monotonic() + START_S_MAX
    waiting = ""
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            found = json.loads(path.read_text())
            path.unlink()
            return script_environment(found[SOCKET_VARIABLE], found[TOKEN_VARIABLE], os.environ)
        state = client.job(job)
        if state["state"] not in ("queued", "running"):
            raise RuntimeError(f"job {job} {state['state']}: {state['reason']}")
        if state["state"] == "running" and not path.parent.parent.is_dir():
            break
        if state["state"] == "queued":
            deadline = time.monotonic() + START_S_MAX
            if waiting != state["waiting"]:
                waiting = state["waiting"]
                print(f"job {job}: {waiting}", file=sys.stderr)
        time.sleep(POLL_S)
    client.cancel(job)
    raise RuntimeError(
        f"the server left no word in {path.parent}: `run` works on the machine of the server, as the user that runs "
        "it; set TILEWEAVE_DATA_DIR where the server has another data directory than the default"
    )


def _ended(client: Client, job: str) -> tuple[str, str]:
    """The job's state and reason; one whose script ended without a word is cancelled."""
    deadline = time.monotonic() + END_S_MAX
    state = client.job(job)
    while state["state"] in ("queued", "running") and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = client.job(job)
    if state["state"] in ("queued", "running"):
        state = client.cancel(job)
    return state["state"], state["reason"]
