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

from backend.settings import Settings
from backend.supervisor.script import ATTACHMENT
from tileweave.rest import Client

START_S_MAX = 60.0
POLL_S = 0.1
END_S_MAX = 15.0  # what the coordinator gets to record the script's last words


def run_script(client: Client, job: str, command: list[str]) -> int:
    """Runs `command` (a script or `-m module`, and its arguments) under the job; its exit status. Raises RuntimeError
    where the server cannot be reached from a process on this machine, or does not start the job."""
    environment = os.environ | _attachment(client, job)
    script = subprocess.Popen([sys.executable, "-m", "tileweave.script.plain", *command], env=environment)
    try:
        while True:
            try:
                status = script.wait()
                break
            except KeyboardInterrupt:  # the script has got it too, and may want to end by itself
                continue
    finally:
        if script.poll() is None:
            script.kill()
        state = _ended(client, job)
    if state["state"] != "succeeded":
        print(f"job {job} {state['state']}: {state['reason']}", file=sys.stderr)
        return status or 1
    return status


def _attachment(client: Client, job: str) -> dict[str, str]:
    folder = Settings().jobs_dir.absolute() / job
    deadline = time.monotonic() + START_S_MAX
    waiting = ""
    while time.monotonic() < deadline:
        try:
            found: dict[str, str] = json.loads((folder / ATTACHMENT).read_text())
            return found
        except FileNotFoundError:
            pass
        state = client.job(job)
        if state["state"] not in ("queued", "running"):
            raise RuntimeError(f"job {job} {state['state']}: {state['reason']}")
        if state["state"] == "running" and not folder.parent.is_dir():
            break
        if state["state"] == "queued":
            deadline = time.monotonic() + START_S_MAX
            if waiting != state["waiting"]:
                waiting = state["waiting"]
                print(f"job {job}: {waiting}", file=sys.stderr)
        time.sleep(POLL_S)
    client.cancel(job)
    raise RuntimeError(
        f"the server left no word in {folder}: `run` works on the machine of the server, as the user that runs it; set "
        "TILEWEAVE_DATA_DIR where the server has another data directory than the default"
    )


def _ended(client: Client, job: str) -> dict[str, str]:
    """The job's end; a script that ended without a word cancels it."""
    deadline = time.monotonic() + END_S_MAX
    state = client.job(job)
    while state["state"] in ("queued", "running") and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = client.job(job)
    if state["state"] in ("queued", "running"):
        state = client.cancel(job)
    return {name: str(state[name]) for name in ("state", "reason")}
