"""The REST client against a real gateway process: what it gives, and that each failure is a RestError with a reason."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from backend.cli import app
from backend.settings import Settings
from backend.stores.database import Database
from backend.stores.jobs import JobStore, StepRow
from tileweave.rest import Client, RestError

TOKEN = "a-token-for-tests-only"


@pytest.fixture
def settings(valkey) -> Iterator[Settings]:
    directory = Path(tempfile.mkdtemp(prefix="tw-rest-"))
    made = Settings(data_dir=directory, redis_url=valkey.url, metrics_rows_max=2)
    yield made
    shutil.rmtree(made.run_dir, ignore_errors=True)
    shutil.rmtree(directory)


@pytest.fixture
def client(settings) -> Iterator[Client]:
    listener = socket.create_server(("127.0.0.1", 0))
    environment = os.environ | settings.environment() | {"TILEWEAVE_ADMIN_TOKEN": TOKEN}
    argv = [sys.executable, "-m", "backend.gateway", "--index", "0", "--fd", str(listener.fileno())]
    process = subprocess.Popen(argv, env=environment, pass_fds=[listener.fileno()])
    try:
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}/", TOKEN) as client:
            yield client
    finally:
        process.kill()
        process.wait()
        listener.close()


@pytest.fixture
def store(settings) -> Iterator[JobStore]:
    database = Database(settings.database_path)
    yield JobStore(database)
    database.close()


def a_step(number: int) -> StepRow:
    return StepRow(
        step=number, loss=1.0, seconds=1.0, samples=1, unit="tokens", tiles=1, flop_offloaded=1, flop_local=0,
        bytes_down=0, bytes_up=0, devices=1, time_s=1.0,
    )  # fmt: skip


def test_a_job_from_submission_to_its_files(client, store, settings, tmp_path) -> None:
    assert client.ready()
    job = client.submit_train("gpt-bytes", {"layers": 2}, steps=3, name="mine", accuracy="normwise")
    assert client.job(job["id"])["name"] == "mine"
    assert client.job(job["id"])["accuracy"] == "normwise"
    assert [row["id"] for row in client.jobs(state="queued")] == [job["id"]]
    epoch = store.begin_epoch(job["id"], time.time())
    for number in range(1, 6):
        store.record_step(job["id"], epoch, a_step(number))
    assert [row["step"] for row in client.metrics(job["id"])] == [1, 2, 3, 4, 5]  # over three pages
    assert [row["step"] for row in client.metrics(job["id"], after_step=3)] == [4, 5]
    file = settings.jobs_dir / job["id"] / "result.npy"
    file.parent.mkdir(parents=True)
    file.write_bytes(os.urandom(2_500_000))
    store.set_result(job["id"], str(file))
    target = tmp_path / "out.npy"
    assert client.download_result(job["id"], target) == 2_500_000
    assert target.read_bytes() == file.read_bytes()
    with pytest.raises(RestError, match="no checkpoint") as none:
        client.download_checkpoint(job["id"], tmp_path / "none")
    assert none.value.status == 404
    assert list(tmp_path.iterdir()) == [target]
    assert client.cancel(job["id"])["state"] == "cancelled"
    events = list(client.events(job["id"]))
    assert events[-1][0] == "job"
    assert events[-1][1]["state"] == "cancelled"


def test_a_gemm_job_of_two_files(client, tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 4), np.float32))
    np.save(tmp_path / "b.npy", np.ones((4, 2), np.float32))
    job = client.submit_gemm(tmp_path / "a.npy", tmp_path / "b.npy", name="product", accuracy="normwise", wire="bf16")
    assert (job["accuracy"], job["wire"]) == ("normwise", "bf16")
    assert (job["kind"], job["name"], job["state"]) == ("gemm", "product", "queued")
    with pytest.raises(RestError, match="columns"):
        client.submit_gemm(tmp_path / "a.npy", tmp_path / "a.npy")
    with pytest.raises(RestError, match="cannot read"):
        client.submit_gemm(tmp_path / "none.npy", tmp_path / "b.npy")


def test_the_fleet_of_a_fresh_server(client) -> None:
    assert client.devices() == []
    assert client.leaderboard()["rows"] == []
    with pytest.raises(RestError, match="no device"):
        client.device("d1")


@pytest.mark.parametrize("accuracy", ["rowwise", "normwise"])
def test_the_command_submits_what_was_asked_for(client, settings, accuracy) -> None:
    options = ["submit", "gpt-bytes", "--url", client.url, "--token", TOKEN, "--accuracy", accuracy, "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert client.job(json.loads(result.stdout)["id"])["accuracy"] == accuracy
    result = CliRunner().invoke(app, [*options, "--wire", "int8"])
    assert client.job(json.loads(result.stdout)["id"])["wire"] == "int8"
    refused = CliRunner().invoke(app, [*options, "--accuracy", "loose"])
    assert refused.exit_code == 1
    assert "Input should be 'rowwise' or 'normwise'; got 'loose'" in refused.stderr


def test_failures_have_a_status_and_a_reason(client, settings) -> None:
    with pytest.raises(RestError, match="expected one of gpt-bytes") as bad:
        client.submit_train("nope")
    assert bad.value.status == 422
    with Client(client.url, "wrong") as stranger, pytest.raises(RestError, match="wrong token") as refused:
        stranger.submit_train("gpt-bytes")
    assert refused.value.status == 401
    for evil in ("", "../devices", "a/b", "a?b", "a#b"):
        with pytest.raises(RestError, match="is no id"):
            client.job(evil)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as nobody, pytest.raises(RestError, match="does not answer") as silence:
        nobody.ready()
    assert silence.value.status == 0
