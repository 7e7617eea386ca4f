"""`tileweave run`: a script that knows nothing of us, its GEMMs on volunteers, its output and status the terminal's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.swarm import Swarm, wait_for

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
assert sys.argv[1:] == ["--lr", "0.1", "--name", "mine"], sys.argv
for step in range(4):
    x = torch.randn(128, 256)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), flush=True)
"""
ARGUMENTS = ["--lr", "0.1", "--name", "mine"]


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with Swarm() as swarm:
        swarm.wait_ready()
        swarm.add_native("v")
        yield swarm


def environment(swarm: Swarm, **changes: str) -> dict[str, str]:
    ours = {"TILEWEAVE_DATA_DIR": str(swarm.settings.data_dir), "TILEWEAVE_URL": swarm.url}
    return {**os.environ, **ours, "TILEWEAVE_ADMIN_TOKEN": swarm.token, **changes}


def run(swarm: Swarm, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backend.cli", "run", *arguments]
    return subprocess.run(
        command, env=environment(swarm, **changes), capture_output=True, text=True, timeout=120, check=False
    )


def newest(swarm: Swarm) -> dict[str, Any]:
    job: dict[str, Any] = next(iter(swarm.client.jobs()), {"name": ""})
    return job


def test_an_unmodified_script_trains_on_volunteers(swarm: Swarm, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = subprocess.run([sys.executable, script, *ARGUMENTS], capture_output=True, text=True, check=True)
    done = run(swarm, "--steps", "4", str(script), *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    losses = [[float(line) for line in out.stdout.split()] for out in (done, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    job = newest(swarm)
    assert (job["kind"], job["name"], job["state"], job["step"], job["steps"]) == ("run", "train.py", "succeeded", 4, 4)
    assert job["loss"] == pytest.approx(losses[0][-1])
    assert job["offloaded_flop_share"] > 0.99


def test_a_module_runs_too_and_options_behind_it_are_its_own(swarm: Swarm, tmp_path: Path) -> None:
    done = run(swarm, "-m", "json.tool", "--help")
    assert done.returncode == 0 and "json.tool" in done.stdout
    assert newest(swarm)["state"] == "succeeded"


def test_a_scripts_error_is_the_jobs_reason(swarm: Swarm, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import torch\nraise ValueError('no such luck')\n")
    done = run(swarm, str(script))
    assert done.returncode == 1 and "no such luck" in done.stderr
    job = newest(swarm)
    assert (job["state"], job["reason"]) == (
        "failed", "ValueError: no such luck (broken.py, line 2: raise ValueError('no such luck'))",
    )  # fmt: skip
    script.write_text("raise SystemExit(7)")
    assert run(swarm, str(script)).returncode == 7
    assert newest(swarm)["state"] == "failed"


def test_a_missing_file_and_a_server_elsewhere_are_explained(swarm: Swarm, tmp_path: Path) -> None:
    missing = run(swarm, str(tmp_path / "none.py"))
    assert missing.returncode == 2 and "expected a Python file" in missing.stderr
    script = tmp_path / "train.py"
    script.write_text("")
    elsewhere = run(swarm, str(script), TILEWEAVE_DATA_DIR=str(tmp_path / "elsewhere"))
    assert elsewhere.returncode == 1 and "works on the machine of the server" in elsewhere.stderr
    assert newest(swarm)["state"] == "cancelled"


def test_children_that_train_say_nothing_in_the_scripts_name(swarm: Swarm, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys, multiprocessing, torch\n"
        "model = torch.nn.Linear(256, 256)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n"
        "    for step in range(5):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(64, 256)).mean().backward()\n"
        "        optimizer.step()\n"
        "child = multiprocessing.get_context('fork').Process(target=train)\n"
        "child.start()\n"
        "train()\n"
        "child.join()\n"
        "if os.fork() == 0:\n"
        "    sys.exit(0)\n"
        "os.wait()\n"
        "train()\n"
        "print(child.exitcode, [name for name in os.environ if name.startswith('TILEWEAVE_')])\n"
    )
    done = run(swarm, str(script))
    assert (done.returncode, done.stdout) == (0, "0 ['TILEWEAVE_JOB_SOCKET']\n"), done.stderr
    job = newest(swarm)
    assert (job["state"], job["step"]) == ("succeeded", 10)
    assert [row["step"] for row in swarm.client.metrics(job["id"])] == list(range(1, 11))


def test_our_own_imports_do_not_find_the_scripts_files(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "tileweave.py").write_text("raise RuntimeError('nor this one')")
    (tmp_path / "mine.py").write_text("answer = 42")
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "train.py"
    script.write_text("import sys, torch\nprint(sys.argv[0], 'here')")
    command = [sys.executable, "-m", "backend.cli", "run", "sub/train.py"]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command, env=environment(swarm, PYTHONPATH=root, PYTHONSAFEPATH="1"), cwd=tmp_path, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "sub/train.py here\n"), done.stderr


def test_a_cancelled_script_that_does_not_listen_is_ended(swarm: Swarm, tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text("import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.1)")
    command = [sys.executable, "-m", "backend.cli", "run", str(script)]
    with subprocess.Popen(command, env=environment(swarm), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        swarm.client.cancel(newest(swarm)["id"])
        process.communicate(timeout=60)
    assert process.returncode != 0


@pytest.mark.parametrize("how", ["cancelled over REST", "killed"])
def test_a_script_that_goes_takes_its_job_along(swarm: Swarm, tmp_path: Path, how: str) -> None:
    script = tmp_path / f"{how.split()[0]}.py"
    script.write_text(SCRIPT.replace("range(4)", "iter(int, 1)"))
    command = [sys.executable, "-m", "backend.cli", "run", str(script), *ARGUMENTS]
    with subprocess.Popen(command, env=environment(swarm), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        found = wait_for("steps", lambda: j if (j := newest(swarm))["name"] == script.name and j["step"] else None, 60)
        job = found["id"]
        if how == "killed":
            listing = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
            os.kill(int(listing.stdout), signal.SIGKILL)
        else:
            swarm.client.cancel(job)
        process.communicate(timeout=60)
    assert process.returncode != 0
    state = wait_for("the end", lambda: s if (s := swarm.client.job(job))["state"] != "running" else None, 30)
    assert state["state"] == ("failed" if how == "killed" else "cancelled")
