"""REST: who may do what, what a job's life looks like from outside, and bodies that must not get through."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save

from backend.stores.jobs import StepRow
from backend.switchboard.streams import WAKE_CHANNEL

TOKEN = "a-token-for-tests-only"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
TRAIN = {"kind": "train", "recipe": "gpt-bytes", "config": {"layers": 2}, "steps": 5, "name": "n\u0000 <b>"}
API = "/api/v1"


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def files(a: bytes, b: bytes, names: tuple[str, str] = ("a.npy", "b.npy")) -> dict:
    return {"a": (names[0], a), "b": (names[1], b)}


def step(number: int, **values) -> StepRow:
    row = {
        "step": number, "loss": 2.0, "seconds": 2.0, "samples": 100, "unit": "tokens", "tiles": 3,
        "flop_offloaded": 30, "flop_local": 10, "bytes_down": 1, "bytes_up": 1, "devices": 1, "time_s": 1.0,
    }  # fmt: skip
    return StepRow(**{**row, **values})


WRITES = [
    ("POST", "/jobs"), ("POST", "/jobs/j1/cancel"), ("GET", "/jobs/j1/checkpoint"), ("GET", "/jobs/j1/result"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer \u00e9".encode("latin-1")}, 401),
        ({"Cookie": f"tileweave_session={TOKEN}"}, 401),
        ({"Cookie": "tileweave_session=99999999999.x.y"}, 401),
    ],
)
def test_changes_need_the_token(make_client, headers, status) -> None:
    client, _ = make_client()
    for method, path in WRITES:
        answer = client.request(method, API + path, headers=headers)
        assert answer.status_code == status, (method, path)
        assert "detail" in answer.json()
    assert client.post(f"{API}/jobs?token={TOKEN}", json=TRAIN).status_code == 401


def test_wrong_tokens_make_an_address_wait(make_client) -> None:
    client, _ = make_client(login_failures_per_minute_max=3)
    for _ in range(3):
        assert client.post(f"{API}/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    answer = client.post(f"{API}/jobs", headers=ADMIN, json=TRAIN)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "60"
    assert client.get(f"{API}/jobs").status_code == 200


def test_a_training_job_from_submission_to_cancel(make_client) -> None:
    client, world = make_client()
    with world.redis.pubsub() as wake:
        wake.subscribe(WAKE_CHANNEL)
        world.wait_until("the subscription", lambda: wake.get_message(timeout=1))
        answer = client.post(f"{API}/jobs", headers=ADMIN, json=TRAIN)
        assert answer.status_code == 201
        assert world.wait_until("the wake-up", lambda: wake.get_message(timeout=1))["type"] == "message"
    job = answer.json()
    assert (job["name"], job["state"], job["steps"], job["config"]["layers"]) == ("n <b>", "queued", 5, 2)
    assert job["config"]["width"] == 128  # the recipe's defaults, so that the page shows what runs
    world.jobs.begin_epoch(job["id"], time.time())
    world.jobs.record_step(job["id"], 1, step(1, loss=float("nan"), unit="=tokens"))
    world.jobs.record_step(job["id"], 1, step(2, loss=1.5))
    shown = client.get(f"{API}/jobs/{job['id']}").json()
    assert (shown["step"], shown["loss"], shown["samples_per_s"], shown["eta_s"]) == (2, 1.5, 50.0, 6.0)
    assert (shown["offloaded_flop_share"], shown["flop"], shown["waiting"]) == (0.75, 60, None)
    assert (shown["bytes_per_step"], shown["wire"]) == (2.0, "f32")
    assert shown["validation"] is None
    world.jobs.record_validation(job["id"], 1, 2, 1.75)
    assert client.get(f"{API}/jobs/{job['id']}").json()["validation"] == {"step": 2, "value": 1.75}
    rows = client.get(f"{API}/jobs/{job['id']}/metrics").json()["rows"]
    assert [row["validation"] for row in rows] == [None, 1.75]
    assert [row["loss"] for row in rows] == [None, 1.5]
    text = client.get(f"{API}/jobs/{job['id']}/metrics?format=csv").text.splitlines()
    assert len(text) == 3
    assert ",'=tokens," in text[1]  # no formula
    listed = client.get(f"{API}/jobs?state=running").json()
    assert (listed["total"], listed["jobs"][0]["id"]) == (1, job["id"])
    assert client.get(f"{API}/jobs?state=queued").json() == {"jobs": [], "total": 0}
    cancelled = client.post(f"{API}/jobs/{job['id']}/cancel", headers=ADMIN).json()
    assert cancelled["state"] == "cancelled"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"recipe": "nope"}, "gpt-bytes"),
        ({"recipe": "gemm"}, "gpt-bytes"),
        ({"config": {"layers": "many"}}, "config.layers"),
        ({"config": {"width": 130}}, "multiple"),
        ({"config": {"nope": 1}}, "config.nope"),
        ({"steps": 0}, "steps"),
        ({"steps": 10**9}, "at most"),
        ({"mode": "slices"}, "mode"),
        ({"accuracy": "loose"}, "accuracy: Input should be 'rowwise' or 'normwise'; got 'loose'"),
        ({"wire": "fp4"}, "wire: Input should be 'f32', 'bf16', 'f16' or 'int8'; got 'fp4'"),
        ({"extra": 1}, "extra"),
        ({"weight": float("nan")}, "weight"),
        ({"config": {"lr": float("nan")}}, "lr"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_a_reason(make_client, change, word) -> None:
    client, _ = make_client()
    body = json.dumps({**TRAIN, **change})
    answer = client.post(f"{API}/jobs", headers=ADMIN, content=body)
    assert answer.status_code == 422
    assert word in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"[", b"[" * 100_000, b"\xff", b'"x"', b"null", b'{"kind":"train"'])
def test_bodies_that_are_no_job(make_client, body) -> None:
    client, _ = make_client()
    answer = client.post(f"{API}/jobs", headers=ADMIN, content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_the_queue_is_bounded(make_client) -> None:
    client, _ = make_client(jobs_queued_max=1)
    assert client.post(f"{API}/jobs", headers=ADMIN, json=TRAIN).status_code == 201
    answer = client.post(f"{API}/jobs", headers=ADMIN, json=TRAIN)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")


def test_a_gemm_job_keeps_its_matrices(make_client) -> None:
    client, world = make_client()
    a, b = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    answer = client.post(
        f"{API}/jobs",
        headers=ADMIN,
        data={"kind": "gemm", "name": "product"},
        files=files(npy(a), save({"b": b}), ("a.npy", "b.safetensors")),
    )
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["kind"], job["name"], job["config"]) == ("gemm", "product", {})
    stored = world.jobs.get(job["id"]).inputs
    assert np.array_equal(np.load(stored["a"]), a)
    assert stored["b"].endswith("b.safetensors")


BAD_FILES = [
    (npy(np.ones((3, 4))), npy(np.ones((4, 5), np.float32)), "float64"),
    (npy(np.ones((3, 4), ">f4")), npy(np.ones((4, 5), np.float32)), "byte-swapped"),
    (npy(np.ones((3, 4), np.float32)), npy(np.ones((3, 5), np.float32)), "columns"),
    (npy(np.ones(3, np.float32)), npy(np.ones((3, 5), np.float32)), "two dimensions"),
    (npy(np.ones((0, 3), np.float32)), npy(np.ones((3, 5), np.float32)), "neither 0"),
    (b"\x80\x04pickle", npy(np.ones((3, 5), np.float32)), "not a readable"),
    (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, npy(np.ones((3, 5), np.float32)), "not a readable"),
    (npy(np.ones((3, 4), np.float32))[:-8], npy(np.ones((4, 5), np.float32)), "not a readable"),
    (b"", npy(np.ones((4, 5), np.float32)), "not a readable"),
]


@pytest.mark.parametrize(("a", "b", "word"), BAD_FILES)
def test_matrices_that_cannot_be_multiplied(make_client, a, b, word) -> None:
    client, world = make_client()
    answer = client.post(f"{API}/jobs", headers=ADMIN, data={"kind": "gemm"}, files=files(a, b))
    assert answer.status_code == 422, answer.text
    assert word in answer.json()["detail"]
    assert list((world.settings.jobs_dir / "uploads").iterdir()) == []
    assert world.jobs.count() == 0


@pytest.mark.parametrize("wire", ["bf16", "int8", None])
def test_a_job_says_how_its_numbers_travel(make_client, wire) -> None:
    client, world = make_client()
    chosen = {} if wire is None else {"wire": wire}
    for body in ({**TRAIN, **chosen}, {"kind": "run", **chosen}):
        job = client.post(f"{API}/jobs", headers=ADMIN, json=body).json()["id"]
        assert client.get(f"{API}/jobs/{job}").json()["wire"] == (wire or "f32")
        assert world.jobs.get(job).wire == (wire or "f32")


@pytest.mark.parametrize("accuracy", ["rowwise", "normwise", None])
def test_a_job_says_what_its_products_are_checked_for(make_client, accuracy) -> None:
    client, world = make_client()
    chosen = {} if accuracy is None else {"accuracy": accuracy}
    ones = npy(np.ones((2, 2), np.float32))
    for answer in (
        client.post(f"{API}/jobs", headers=ADMIN, json={**TRAIN, **chosen}),
        client.post(f"{API}/jobs", headers=ADMIN, data={"kind": "gemm", **chosen}, files=files(ones, ones)),
    ):
        assert answer.status_code == 201, answer.text
        job = answer.json()["id"]
        assert client.get(f"{API}/jobs/{job}").json()["accuracy"] == (accuracy or "rowwise")
        assert world.jobs.get(job).accuracy == (accuracy or "rowwise")


def test_a_place_for_a_script_of_ones_own(make_client) -> None:
    client, world = make_client()
    assert client.post(f"{API}/jobs", json={"kind": "run"}).status_code == 401
    answer = client.post(f"{API}/jobs", headers=ADMIN, json={"kind": "run", "name": "mine", "accuracy": "normwise"})
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["kind"], job["name"], job["steps"], job["eta_s"]) == ("run", "mine", None, None)
    assert world.jobs.get(job["id"]).accuracy == "normwise"
    for body, word in (({"kind": "run", "recipe": "gpt-bytes"}, "recipe: "), ({"kind": "walk"}, "'train', 'run'")):
        refused = client.post(f"{API}/jobs", headers=ADMIN, json=body)
        assert refused.status_code == 422 and word in refused.json()["detail"]


def test_pickles_are_refused(make_client) -> None:
    client, _ = make_client()
    evil = io.BytesIO()
    np.save(evil, np.array([[object]], dtype=object), allow_pickle=True)
    good = npy(np.ones((1, 1), np.float32))
    answer = client.post(f"{API}/jobs", headers=ADMIN, data={"kind": "gemm"}, files=files(evil.getvalue(), good))
    assert answer.status_code == 422


def test_forms_that_are_not_as_expected(make_client) -> None:
    client, world = make_client(upload_bytes_max=4096)
    good = npy(np.ones((2, 2), np.float32))
    for form, sent, status, word in (
        ({"kind": "gemm"}, {"a": ("a.npy", good)}, 422, "missing"),
        ({"kind": "train"}, files(good, good), 422, "kind"),
        ({"kind": "gemm"}, files(good, good, ("../../a.exe", "b.npy")), 422, ".npy"),
        ({"kind": "gemm"}, files(good, bytes(5000)), 413, "4096"),
        (
            {"kind": "gemm", "accuracy": "loose"},
            files(good, good),
            422,
            "accuracy: got 'loose', expected 'rowwise' or 'normwise'",
        ),
        ({"kind": "x" * 5000}, files(good, good), 422, "short text"),
        ({f"f{number}": "x" for number in range(20)}, files(good, good), 422, "fields"),
    ):
        answer = client.post(f"{API}/jobs", headers=ADMIN, data=form, files=sent)
        assert answer.status_code == status, answer.text
        assert word in answer.json()["detail"]
    for content_type, body in (
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"--y\r\n"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="kind"\r\n\r\ngem'),
    ):
        answer = client.post(f"{API}/jobs", headers={**ADMIN, "Content-Type": content_type}, content=body)
        assert answer.status_code == 422, answer.text
    assert list((world.settings.jobs_dir / "uploads").iterdir()) == []


def test_ids_that_would_leave_their_folder(make_client) -> None:
    client, _ = make_client()
    for bad in ("..%2f..%2fetc%2fpasswd", "%00", "x" * 65, "a b", "%3Cscript%3E", "j%0a"):
        for path in (f"/jobs/{bad}", f"/jobs/{bad}/metrics", f"/jobs/{bad}/events", f"/devices/{bad}"):
            answer = client.get(API + path)
            assert answer.status_code == 404, path
            assert "script" not in answer.text


def test_downloads_are_whole_and_stay_in_the_data_directory(make_client) -> None:
    client, world = make_client()
    job = world.running_job().id
    path = world.settings.jobs_dir / job / "checkpoints" / "step-3.safetensors"
    path.parent.mkdir(parents=True)
    data = np.random.default_rng(0).bytes(3_000_000)
    path.write_bytes(data)
    assert client.get(f"{API}/jobs/{job}/checkpoint", headers=ADMIN).status_code == 404
    world.jobs.record_checkpoint(job, 1, 3, str(path), "0" * 64, len(data), time.time())
    answer = client.get(f"{API}/jobs/{job}/checkpoint", headers=ADMIN)
    assert answer.content == data
    assert f"{job}-step-3.safetensors" in answer.headers["content-disposition"]
    assert client.get(f"{API}/jobs/{job}").json()["has_checkpoint"]
    assert client.get(f"{API}/jobs/{job}/result", headers=ADMIN).status_code == 404
    outside = world.settings.token_path
    outside.write_text("secret")
    link = path.parent / "link.npy"
    link.symlink_to(outside)
    world.jobs.set_result(job, str(link))
    assert client.get(f"{API}/jobs/{job}/result", headers=ADMIN).status_code == 404


def test_events_follow_a_job_to_its_end(make_client) -> None:
    client, world = make_client()
    job = world.running_job().id
    world.jobs.request_cancel(job, time.time())
    with client.stream("GET", f"{API}/jobs/{job}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0] == "event: job"
    assert json.loads(lines[1].removeprefix("data: "))["state"] == "cancelled"


def test_devices_and_boards(make_client) -> None:
    client, world = make_client()
    name = "<script>alert(1)</script>"
    device, _ = world.devices.register(name, "agent", time.time())
    row = client.get(f"{API}/devices").json()["devices"][0]
    assert (row["id"], row["name"], row["online"], row["state"], row["flop"]) == (device, name, False, "offline", 0)
    assert (row["kernel"], row["flops"], row["claimed_flops"], row["measured_flops"]) == ("", None, None, None)
    fields = {"state": '"ready"', "kernel": '"native-torch"', "claimed_flops": "2e9", "rtt_s": "NaN"}
    world.redis.hset(f"tw:dev:{device}", mapping=fields)
    row = client.get(f"{API}/devices/{device}").json()
    assert (row["online"], row["state"], row["kernel"], row["rtt_s"]) == (True, "ready", "native-torch", None)
    assert (row["flops"], row["claimed_flops"], row["measured_flops"]) == (2e9, 2e9, None)
    world.redis.hset(f"tw:dev:{device}", mapping={"measured_flops": "1e9", "workers": "3"})
    row = client.get(f"{API}/devices/{device}").json()
    assert (row["flops"], row["claimed_flops"], row["measured_flops"]) == (3e9, 2e9, 1e9)
    board = client.get(f"{API}/leaderboard?order=total&limit=5").json()
    assert board == {"by": "device", "order": "total", "total": 0, "limit": 5, "offset": 0, "rows": []}
    for bad in ("limit=0", "limit=101", "offset=-1", "by=team", "order=x", "limit=nan"):
        assert client.get(f"{API}/leaderboard?{bad}").status_code == 422


def test_health_and_metrics(make_client, valkey) -> None:
    client, _ = make_client()
    for prefix in ("", API):
        assert client.get(f"{prefix}/healthz").json() == {"ok": True}
        assert client.get(f"{prefix}/readyz").json() == {"ok": True, "redis": "ok", "database": "ok"}
    text = client.get("/metrics").text
    assert 'tileweave_devices_online{gateway="0"} 0.0' in text
    forwarded = {"X-Forwarded-For": "10.0.0.1"}
    assert client.get("/metrics", headers=forwarded).status_code == 401
    assert client.get("/metrics", headers={**forwarded, **ADMIN}).status_code == 200
    valkey.kill()
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["redis"]) == (503, "no answer")
    assert client.get(f"{API}/jobs").status_code == 200  # the store still answers
    valkey.start()


def test_the_description_matches_the_routes(make_client) -> None:
    client, _ = make_client()
    paths = client.get(f"{API}/openapi.json").json()["paths"]
    assert {f"{API}/jobs", f"{API}/jobs/{{job_id}}/events", f"{API}/leaderboard"} <= set(paths)
    body = paths[f"{API}/jobs"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "multipart/form-data"}


def test_bodies_are_bounded(make_client) -> None:
    client, _ = make_client(body_bytes_max=1024)
    answer = client.post(f"{API}/jobs", headers=ADMIN, content=b" " * 1025)
    assert (answer.status_code, answer.json()["detail"]) == (413, "the body is over 1024 bytes, the most it may have")


def test_no_torch_and_no_token_in_the_gateway_process() -> None:
    program = "import sys, backend.gateway.__main__; print([name for name in sys.modules if name.startswith('torch')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["../token", "/etc/passwd", "missing.txt", ".", "a/../../token", "x\0y"])
def test_data_must_be_in_the_datasets_folder(make_client, name) -> None:
    client, world = make_client()
    world.settings.datasets_dir.mkdir(parents=True)
    (world.settings.data_dir / "token").write_text("secret" * 5)
    answer = client.post("/api/v1/jobs", headers=ADMIN, json={"kind": "train", "recipe": "gpt-bytes", "data": name})
    assert answer.status_code == 422
    assert "datasets" in answer.json()["detail"]


def test_data_names_a_file_or_a_folder(make_client) -> None:
    client, world = make_client()
    (world.settings.datasets_dir / "poems").mkdir(parents=True)
    (world.settings.datasets_dir / "poems" / "one.txt").write_text("a rose")
    for name in ("poems", "poems/one.txt"):
        body = {"kind": "train", "recipe": "gpt-bytes", "data": name}
        job = client.post("/api/v1/jobs", headers=ADMIN, json=body).json()
        assert world.jobs.get(job["id"]).data == name
