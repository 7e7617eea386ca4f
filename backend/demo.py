"""`tileweave demo`: the whole thing on one machine, in about five minutes.

Starts a server on the usual data directory, submits the demo job (or goes on with the one an earlier demo left), starts
two local volunteers and shows the training until it ends. Ctrl-C stops the volunteers, then the server; the job stays
in the database and the next `demo` resumes it from its last checkpoint.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backend import chromium
from backend.settings import Settings
from backend.swarm import Swarm
from tileweave.rest import Client, RestError

JOB_NAME = "demo"
STEPS = 220
# Less work a step than the recipe's default, so that two browsers on two cores are done in about five minutes.
CONFIG = {"batch": 8, "context": 64}
POLL_S = 0.5
SERVER_LOST_S_MAX = 60.0
BAR_CHARS = 40
STEPS_A_LINE = 20  # where the output is a file, a line is printed this often
UNFINISHED = ("queued", "running")
# Ctrl-C, `kill`, and the terminal being closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Job = dict[str, Any]


def demo(steps: int = STEPS, as_json: bool = False) -> int:
    """Run the demo. Returns the exit code: 0 when the job succeeded. With `as_json` one object goes to standard output
    and everything else to standard error."""
    settings = Settings()
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_once)
    try:
        console.print("Starting the server …")
        log = (settings.data_dir / "serve.log").open("a")
        with Swarm(settings.data_dir, _port(settings, console), log=log) as swarm:
            try:
                job = _submit_or_resume(swarm.client, steps, console)
                _print_addresses(swarm, job, console)
                _start_volunteers(swarm, console)
                job = _watch(swarm.client, job["id"], console)
            except KeyboardInterrupt:
                console.print("\nStopping the volunteers, then the server …")
                raise
            _print_end(swarm, job, console)
            if as_json:
                print(json.dumps({"job": job, "board": swarm.client.leaderboard()["rows"]}))
            return 0 if job["state"] == "succeeded" else 1
    except KeyboardInterrupt:
        console.print("Stopped. `make demo` again goes on from the last checkpoint.")
        return 130
    except (RuntimeError, TimeoutError, RestError) as error:
        console.print(str(error), style="red", markup=False)
        return 1


def _stop_once(*_: object) -> None:
    """Every signal takes the way of Ctrl-C, once: a second one must not keep the children from being ended."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _port(settings: Settings, console: Console) -> int | None:
    """The usual port, or None (any free one) where something listens on it already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError:
            console.print(f"Port {settings.port} is in use, so the demo takes another one.")
            return None
    return settings.port


def _submit_or_resume(client: Client, steps: int, console: Console) -> Job:
    left = [job for job in client.jobs() if job["name"] == JOB_NAME and job["state"] in UNFINISHED]
    if left:
        job = left[0]
        console.print(f"Going on with demo job {job['id']}, {job['step'] or 0} of {job['steps']} steps done.")
        return job
    return client.submit_train("gpt-bytes", CONFIG, steps=steps, name=JOB_NAME)


def _print_addresses(swarm: Swarm, job: Job, console: Console) -> None:
    rows = {
        "Volunteer": f"{swarm.url}/",
        "Leaderboard": f"{swarm.url}/leaderboard",
        "This job": f"{swarm.url}/jobs/{job['id']}",
        "Admin": f"{swarm.url}/admin",
        "Admin token": f"in {swarm.settings.token_path}",
        "Server log": swarm.log.name,
    }
    for name, value in rows.items():
        console.print(f" {name:<12} {value}", markup=False)
    console.print("Open the volunteer page in any browser on this machine and click Start.")


def _start_volunteers(swarm: Swarm, console: Console) -> None:
    names = ("Ada", "Emmy")
    if chromium.find():
        console.print(f"Starting {len(names)} local volunteers in headless Chromium ({chromium.find()}).")
        for name in names:
            swarm.add_browser(name)
    else:
        console.print(f"No Chromium found, so {len(names)} native volunteers are started (apt-get install chromium).")
        for name in names:
            swarm.add_native(name)


def _watch(client: Client, job_id: str, console: Console) -> Job:
    """Show the job until it ends. The server may restart a part of itself meanwhile; that is not the demo's end."""
    in_place = console.is_terminal and not console.is_dumb_terminal
    last_answer = time.monotonic()
    told = ""
    # Drawn here and not by a thread: a terminal that is gone is an error here, which ends the demo and its children.
    with Live(console=console, transient=not in_place, auto_refresh=False) as live:
        while True:
            try:
                job = client.job(job_id)
                last_answer = time.monotonic()
            except RestError:
                if time.monotonic() - last_answer > SERVER_LOST_S_MAX:
                    raise
                time.sleep(POLL_S)
                continue
            live.update(_view(job), refresh=True)
            news = f"{job['waiting']} {(job['step'] or 0) // STEPS_A_LINE}"
            if not in_place and news != told:
                told = news
                console.print(f"{_step(job)}  {_describe(job)}", markup=False)
            if job["state"] not in UNFINISHED:
                return job
            time.sleep(POLL_S)


def _view(job: Job) -> Group:
    """Two lines of less than 80 columns: how far it is, and how it goes."""
    far = Table.grid(padding=(0, 2))
    left = "" if job["eta_s"] is None else f"{int(job['eta_s']) // 60}:{int(job['eta_s']) % 60:02} left"
    far.add_row(_step(job), ProgressBar(job["steps"], job["step"] or 0, width=BAR_CHARS), left)
    return Group(far, Text(_describe(job), overflow="ellipsis", no_wrap=True))


def _step(job: Job) -> str:
    return f"step {job['step'] or 0}/{job['steps']}"


def _describe(job: Job) -> str:
    if job["state"] not in UNFINISHED:
        return str(job["state"])
    if job["state"] == "queued" or job["loss"] is None:
        return str(job["waiting"] or job["state"])
    devices = job["devices"] or 0
    return (
        f"loss {job['loss']:.3f}   {job['tiles_per_s'] or 0:.0f} tiles/s   {job['gflops'] or 0:.1f} GFLOP/s   "
        f"{devices} device{'' if devices == 1 else 's'}" + (f"   {job['waiting']}" if job["waiting"] else "")
    )


def _print_end(swarm: Swarm, job: Job, console: Console) -> None:
    if job["state"] != "succeeded":
        console.print(f"The job {job['state']}: {job['reason']}", style="red", markup=False)
        return
    console.print(f"Loss {job['first_loss']:.3f} -> {job['loss']:.3f} in {job['elapsed_s']:.0f} s")
    if job["sample"]:
        console.print("Generated text:", style="bold")
        console.print(job["sample"]["text"], markup=False)
    checkpoints = sorted((swarm.settings.jobs_dir / job["id"] / "checkpoints").glob("*.safetensors"))
    console.print(f"Checkpoint {checkpoints[-1] if checkpoints else 'missing'}", markup=False)
    board = Table("rank", "device", "verified GFLOP", "credit", title="Leaderboard")
    for row in swarm.client.leaderboard()["rows"]:
        name = Text(row["name"] or row["id"])
        board.add_row(str(row["rank"]), name, f"{row['flop'] / 1e9:,.1f}", f"{row['credit']:.3f}")
    console.print(board)
    console.print("The server stops now; `make serve` brings its pages back, `make demo` trains another model.")
