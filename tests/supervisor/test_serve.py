"""The server as a user starts it: every process comes back when killed, and none is left when the server is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend.swarm import Swarm, descendants, wait_for

ENTRY = (str(Path(__file__).with_name("tiny_serve.py")), "serve")
DEADLINE_S = 40.0
MANY_STEPS = 1_000_000


@contextmanager
def server(**environment: str) -> Iterator[Swarm]:
    with Swarm(entry=ENTRY, environment=environment) as swarm:
        yield swarm


def submit(swarm: Swarm, steps: int = MANY_STEPS, seed: int = 1) -> str:
    return str(swarm.client.submit_train("gpt-bytes", config={"seed": seed}, steps=steps)["id"])


def wait_job(swarm: Swarm, job: str, what: str, condition: Any) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = swarm.client.job(job)
        return found if condition(found) else None

    return wait_for(f"job {job}: {what}", look, DEADLINE_S)


def is_gone(pid: int) -> bool:
    """Ended, whether or not somebody has collected its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_all_gone(pids: list[int]) -> None:
    assert pids
    wait_for(f"processes {pids} to end", lambda: all(is_gone(pid) for pid in pids), DEADLINE_S)


def test_a_job_runs_to_its_end_and_a_stop_leaves_nothing() -> None:
    with server() as swarm:
        job = submit(swarm, steps=20)
        done = wait_job(swarm, job, "ended", lambda found: found["state"] not in ("queued", "running"))
        assert (done["state"], done["step"], done["epoch"]) == ("succeeded", 20, 1)
        assert [row["step"] for row in swarm.client.metrics(job)] == list(range(1, 21))
        wait_for("the job's processes to end", lambda: not swarm.pids("backend.jobs"), DEADLINE_S)
        submit(swarm)
        wait_for("a coordinator", lambda: swarm.pids("backend.jobs.coordinator"), DEADLINE_S)
        processes = [process.pid for process in descendants(swarm.process.pid)]
        swarm.process.send_signal(signal.SIGTERM)
        assert swarm.process.wait(DEADLINE_S) == 0
        wait_all_gone(processes)
        assert not swarm.settings.run_dir.exists()


def test_parts_that_are_killed_come_back_and_the_job_goes_on() -> None:
    with server() as swarm:
        job = submit(swarm)
        for role, new_epoch in (
            ("backend.jobs.coordinator", True),
            ("tiny_serve.py", True),
            ("backend.gateway", False),
            ("valkey-server", False),
        ):
            before = wait_job(swarm, job, "runs", lambda found: (found["step"] or 0) > 0 and found["has_checkpoint"])
            [pid] = wait_for(role, lambda role=role: swarm.pids(role), DEADLINE_S)
            os.kill(pid, signal.SIGKILL)
            wait_for(f"another {role}", lambda role=role, pid=pid: set(swarm.pids(role)) - {pid}, DEADLINE_S)
            swarm.wait_ready()
            after = wait_job(swarm, job, "goes on", lambda found, step=before["step"]: found["step"] > step + 5)
            assert (after["epoch"] > before["epoch"]) is new_epoch, role
        steps = [row["step"] for row in swarm.client.metrics(job)]
        assert steps == list(range(1, len(steps) + 1))
        assert "goes on after step 0" in (swarm.settings.jobs_dir / job / "script.log").read_text()


def test_kill_9_of_the_server_leaves_nothing_and_a_restart_resumes() -> None:
    with server() as swarm:
        job = submit(swarm)
        before = wait_job(swarm, job, "has a checkpoint", lambda found: found["has_checkpoint"] and found["step"] > 3)
        processes = [process.pid for process in descendants(swarm.process.pid)]
        swarm.process.kill()
        wait_all_gone(processes)
        swarm.restart_server()
        after = wait_job(swarm, job, "goes on", lambda found: found["step"] > before["step"] + 3)
        assert (after["state"], after["epoch"]) == ("running", before["epoch"] + 1)
        lines = (swarm.settings.jobs_dir / job / "script.log").read_text().splitlines()
        resumed = int(lines[-1].removeprefix("goes on after step "))
        assert before["step"] - 1 <= resumed <= after["step"]


def test_a_script_that_only_crashes_fails_its_job_with_its_last_words() -> None:
    with server(TILEWEAVE_JOB_RESTARTS_MAX="1") as swarm:
        job = submit(swarm, seed=13)
        failed = wait_job(swarm, job, "failed", lambda found: found["state"] == "failed")
        assert "gave up after 2 runs without a step" in failed["reason"]
        assert "exit status 1" in failed["reason"]
        assert "this script was told to crash" in failed["reason"]
        assert failed["epoch"] == 2


def test_a_cancel_ends_the_processes_and_the_queue_moves_up() -> None:
    with server(TILEWEAVE_JOBS_RUNNING_MAX="1") as swarm:
        first = submit(swarm)
        wait_job(swarm, first, "runs", lambda found: found["step"])
        second = submit(swarm)
        assert swarm.client.job(second)["state"] == "queued"
        [coordinator] = swarm.pids("backend.jobs.coordinator")
        argv = [sys.executable, "-m", "backend.cli", "jobs", "cancel", first, "--url", swarm.url, "--json"]
        environment = {**os.environ, "TILEWEAVE_ADMIN_TOKEN": swarm.token}
        printed = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert json.loads(printed.stdout)["id"] == first
        wait_job(swarm, second, "runs", lambda found: found["step"])
        assert swarm.client.job(first)["state"] == "cancelled"
        wait_all_gone([coordinator])


def test_a_second_server_on_the_same_data_is_told_so() -> None:
    with server() as swarm:
        second = subprocess.run(
            [sys.executable, "-m", "backend.cli", "serve", "--data-dir", str(swarm.settings.data_dir)],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert second.returncode == 1
        assert f"(process {swarm.process.pid}) uses the data directory" in second.stderr
        assert "TILEWEAVE_DATA_DIR" in second.stderr
        assert second.stdout == ""


def test_no_secret_of_the_server_reaches_the_script() -> None:
    with server() as swarm:
        job = submit(swarm)
        wait_job(swarm, job, "runs", lambda found: found["step"])
        [script] = [p for p in descendants(swarm.process.pid) if p.command.endswith("tiny_serve.py")]
        environment = Path(f"/proc/{script.pid}/environ").read_bytes().decode().split("\0")
        names = {line.partition("=")[0] for line in environment}
        ours = {name for name in names if name.startswith("TILEWEAVE_")}
        assert ours == {"TILEWEAVE_JOB_SOCKET", "TILEWEAVE_JOB_TOKEN", "TILEWEAVE_PARENT_FD"}
        assert swarm.token not in "\n".join(environment)


def test_a_redis_that_is_not_there_is_an_error_with_the_address() -> None:
    environment = {**os.environ, "TILEWEAVE_REDIS_URL": "redis://127.0.0.1:1/0"}
    code = (
        "import backend.switchboard.streams as s, sys; s.OUTAGE_S_MAX = 0.1; sys.argv[1:] = sys.argv[1:];"
        "from backend.cli import main; main()"
    )
    with server() as swarm:  # only for a directory and a free port
        directory = swarm.settings.data_dir / "other"
        run = subprocess.run(
            [sys.executable, "-c", code, "serve", "--data-dir", str(directory), "--port", "0"],
            env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert run.returncode == 1
    assert "redis://127.0.0.1:1/0" in run.stderr
    assert "is that Redis or Valkey running" in run.stderr


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM"])
def test_either_signal_is_an_ordered_stop(way: str) -> None:
    with server() as swarm:
        swarm.process.send_signal(signal.Signals[way])
        assert swarm.process.wait(DEADLINE_S) == 0
