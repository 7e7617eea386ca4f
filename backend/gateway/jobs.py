"""/api/v1/jobs: submit, look, cancel, follow, download.

Creating or cancelling a job changes one row of the store and wakes the supervisor; nothing else of a job happens here.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import structlog
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.responses import Response, StreamingResponse

from backend.gateway.answers import JsonResponse, explain
from backend.gateway.auth import address_of, require_admin
from backend.gateway.context import Gateway, gateway_of, known_id
from backend.gateway.events import EventStream
from backend.gateway.render import RECENT_STEPS, job_json
from backend.gateway.security import network_of
from backend.gateway.uploads import check_matrices, discard, receive_form
from backend.recipes import RECIPES
from backend.stores.jobs import Job, JobSpec, JobStore, State, StepRow
from backend.switchboard.streams import SwitchboardError
from tileweave.protocol.elements import WIRES, Wire
from tileweave.protocol.messages import Accuracy

T = TypeVar("T", bound=str)
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
DOWNLOAD_CHUNK_BYTES = 1 << 20
STEPS_SUMMED_MAX = 100_000

router = APIRouter(tags=["jobs"])
log = structlog.get_logger("gateway")


class TrainRequest(BaseModel):
    """What POST /jobs takes as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["train"]
    recipe: str = Field(max_length=64)
    config: dict[str, Any] = {}
    steps: int | None = Field(default=None, ge=1)
    mode: Literal["tiles"] = "tiles"
    accuracy: Accuracy = "rowwise"
    wire: Wire = "f32"
    data: str | None = Field(default=None, min_length=1, max_length=200)
    name: str = Field(default="", max_length=100)
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)


class RunRequest(BaseModel):
    """What POST /jobs takes as JSON for a script that runs beside the server (`tileweave run`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["run"]
    steps: int = Field(default=0, ge=0, description="0: not known")
    accuracy: Accuracy = "rowwise"
    wire: Wire = "f32"
    name: str = Field(default="", max_length=100)
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)


WANTED: TypeAdapter[TrainRequest | RunRequest] = TypeAdapter(
    Annotated[TrainRequest | RunRequest, Field(discriminator="kind")]
)
JSON_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": WANTED.json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["kind", "a", "b"],
                    "properties": {
                        "kind": {"type": "string", "enum": ["gemm"]},
                        "name": {"type": "string"},
                        "accuracy": {"type": "string", "enum": list(ACCURACIES), "default": "rowwise"},
                        "wire": {"type": "string", "enum": list(WIRES), "default": "f32"},
                        "a": {"type": "string", "format": "binary"},
                        "b": {"type": "string", "format": "binary"},
                    },
                }
            },
        },
    }
}


@router.post("/jobs", status_code=201, dependencies=[Depends(require_admin)], openapi_extra=JSON_BODY)
async def create_job(request: Request) -> Response:
    """Submit a training job or a place for a script of your own (JSON), or the product of two matrices (multipart:
    kind=gemm, files a and b)."""
    gateway = gateway_of(request)
    if await gateway.store(gateway.jobs.count, ["queued"]) >= gateway.settings.jobs_queued_max:
        raise HTTPException(503, f"{gateway.settings.jobs_queued_max} jobs are waiting, the most there may be",
                            {"Retry-After": "60"})  # fmt: skip
    content_type = request.headers.get("content-type", "")
    if content_type.lower().startswith("multipart/form-data"):
        job = await _create_gemm(gateway, request, content_type)
    else:
        job = await gateway.store(gateway.jobs.create, await _json_spec(gateway, request), time.time())
    await _wake(gateway)
    return JsonResponse(await render_job(gateway, job), 201, {"Location": f"/api/v1/jobs/{job.id}"})


async def _json_spec(gateway: Gateway, request: Request) -> JobSpec:
    try:
        wanted = WANTED.validate_json(await request.body())
    except ValidationError as error:
        raise HTTPException(422, explain(error, tags=("train", "run"))) from None
    if wanted.steps is not None and wanted.steps > gateway.settings.steps_max:
        raise HTTPException(422, f"steps: got {wanted.steps}, expected at most {gateway.settings.steps_max}")
    if isinstance(wanted, TrainRequest):
        return await _train_spec(gateway, wanted)
    return JobSpec(
        kind="run", name=clean_text(wanted.name), steps=wanted.steps, accuracy=wanted.accuracy, wire=wanted.wire,
        weight=wanted.weight,
    )  # fmt: skip


async def _train_spec(gateway: Gateway, wanted: TrainRequest) -> JobSpec:
    recipe = RECIPES.get(wanted.recipe)
    if recipe is None or wanted.recipe == "gemm":
        known = ", ".join(name for name in RECIPES if name != "gemm")
        raise HTTPException(422, f"recipe: got {wanted.recipe!r}, expected one of {known}")
    try:
        config = recipe.config.model_validate(wanted.config)
    except ValidationError as error:
        raise HTTPException(422, explain(error, ("config",))) from None
    if wanted.data is not None:
        await gateway.store(_check_data, gateway.settings.datasets_dir, wanted.data)
    return JobSpec(
        kind="train",
        data=wanted.data,
        name=clean_text(wanted.name),
        recipe=recipe.name,
        config=config.model_dump(mode="json"),
        steps=wanted.steps or recipe.default_steps,
        mode=wanted.mode,
        accuracy=wanted.accuracy,
        wire=wanted.wire,
        weight=wanted.weight,
    )


def _check_data(folder: Path, name: str) -> None:
    """Raises HTTPException 422 unless `name` is a file or folder below `folder` by its plain path."""
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or folder not in path.parents or not path.exists():
        raise HTTPException(422, f"data: got {name!r}, expected the name of a file or folder in {folder}")


async def _create_gemm(gateway: Gateway, request: Request, content_type: str) -> Job:
    directory = gateway.settings.jobs_dir.absolute() / "uploads" / secrets.token_hex(8)
    await gateway.store(lambda: directory.mkdir(parents=True, mode=0o700))
    try:
        form = await receive_form(
            request.stream(), content_type, directory, gateway.settings.upload_bytes_max, gateway.store
        )
        if form.texts.get("kind") != "gemm":
            raise HTTPException(422, f"kind: got {form.texts.get('kind')!r}, expected 'gemm' for a multipart request")
        missing = [name for name in ("a", "b") if name not in form.files]
        if missing:
            raise HTTPException(422, f"the files {missing} are missing; expected a and b, .npy or .safetensors")
        a, b = form.files["a"], form.files["b"]
        await gateway.store(check_matrices, a, b, gateway.settings.gemm_dimension_max)
        spec = JobSpec(
            kind="gemm",
            name=clean_text(form.texts.get("name", "")),
            recipe="gemm",
            accuracy=_one_of(ACCURACIES, "accuracy", form.texts.get("accuracy", "rowwise")),
            wire=_one_of(tuple(WIRES), "wire", form.texts.get("wire", "f32")),
            inputs={"a": str(a), "b": str(b)},
        )
        return await gateway.store(gateway.jobs.create, spec, time.time())
    except BaseException:
        await gateway.store(discard, directory)
        raise


def _one_of(known: tuple[T, ...], field: str, text: str) -> T:
    """Raises HTTPException 422 for anything that is not known."""
    for value in known:
        if text == value:
            return value
    raise HTTPException(422, f"{field}: got {text[:64]!r}, expected {' or '.join(map(repr, known))}")


@router.get("/jobs")
async def list_jobs(
    request: Request,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
) -> Response:
    """Jobs, newest first."""
    gateway = gateway_of(request)
    states = None if state is None else [state]

    def read() -> tuple[list[tuple[Job, list[StepRow], bool]], int]:
        jobs = gateway.jobs.list(states, min(limit, gateway.settings.page_rows_max), offset)
        return [(job, *_details(gateway.jobs, job)) for job in jobs], gateway.jobs.count(states)

    rows, total = await gateway.store(read)
    live = await gateway.live_jobs([job.id for job, _, _ in rows])
    now_s = time.time()
    answer = [
        job_json(job, steps, saved, fields, now_s) for (job, steps, saved), fields in zip(rows, live, strict=True)
    ]
    return JsonResponse({"jobs": answer, "total": total})


@router.get("/jobs/{job_id}")
async def get_job(request: Request, job_id: str) -> Response:
    """One job."""
    gateway = gateway_of(request)
    return JsonResponse(await render_job(gateway, await find_job(gateway, job_id)))


@router.post("/jobs/{job_id}/cancel", dependencies=[Depends(require_admin)])
async def cancel_job(request: Request, job_id: str) -> Response:
    """End a queued or running job; one that has ended stays as it is."""
    gateway = gateway_of(request)
    await find_job(gateway, job_id)
    job = await gateway.store(gateway.jobs.request_cancel, job_id, time.time())
    await _wake(gateway)
    return JsonResponse(await render_job(gateway, job))


@router.get("/jobs/{job_id}/metrics")
async def job_metrics(
    request: Request,
    job_id: str,
    after_step: Annotated[int, Query(ge=-1, le=2**53)] = -1,
    limit: Annotated[int, Query(ge=1)] = 10_000,
    format: Literal["json", "csv"] = "json",
) -> Response:
    """The job's steps after `after_step`, oldest first."""
    gateway = gateway_of(request)
    await find_job(gateway, job_id)
    most = min(limit, gateway.settings.metrics_rows_max)
    rows = await gateway.store(gateway.jobs.metrics, job_id, after_step, most)
    if format == "csv":
        return Response(_csv(rows), media_type="text/csv")
    return JsonResponse({"job": job_id, "rows": rows})


@router.get("/jobs/{job_id}/events")
async def job_events(request: Request, job_id: str) -> Response:
    """Server-sent events: `job` (this job), `step` (a row of its metrics), `sample`, `gemm` (a gemm job's product),
    `lease_lost`; ends when the job ends."""
    gateway = gateway_of(request)
    await find_job(gateway, job_id)
    return EventStream(gateway.live, job_id, network_of(address_of(request)), gateway.settings.event_heartbeat_s)


@router.get("/jobs/{job_id}/checkpoint", dependencies=[Depends(require_admin)])
async def job_checkpoint(request: Request, job_id: str) -> Response:
    """The latest checkpoint, safetensors."""
    gateway = gateway_of(request)
    await find_job(gateway, job_id)
    checkpoint = await gateway.store(gateway.jobs.latest_checkpoint, job_id)
    if checkpoint is None:
        raise HTTPException(404, f"job {job_id} has no checkpoint yet")
    return await _download(gateway, Path(checkpoint.path), f"{job_id}-step-{checkpoint.step}.safetensors")


@router.get("/jobs/{job_id}/result", dependencies=[Depends(require_admin)])
async def job_result(request: Request, job_id: str) -> Response:
    """The product of a gemm job, .npy; another job's result file where its script made one."""
    gateway = gateway_of(request)
    job = await find_job(gateway, job_id)
    if job.result is None:
        raise HTTPException(404, f"job {job_id} is {job.state} and has no result")
    path = Path(job.result)
    return await _download(gateway, path, f"{job_id}{path.suffix}")


async def find_job(gateway: Gateway, job_id: str) -> Job:
    """The job. Raises HTTPException 404."""
    job = await gateway.store(gateway.jobs.get, known_id("job", job_id))
    if job is None:
        raise HTTPException(404, f"no job {job_id}")
    return job


async def render_job(gateway: Gateway, job: Job) -> dict[str, Any]:
    """The job's JSON."""
    (live,) = await gateway.live_jobs([job.id])
    rows, has_checkpoint = await gateway.store(_details, gateway.jobs, job)
    if not live and job.step is not None:
        live = await gateway.store(_sums, gateway.jobs, job.id)
    return job_json(job, rows, has_checkpoint, live, time.time())


def clean_text(text: str) -> str:
    """A name without control characters and runs of blanks."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _details(jobs: JobStore, job: Job) -> tuple[list[StepRow], bool]:
    rows = [] if job.step is None else jobs.metrics(job.id, job.step - RECENT_STEPS, RECENT_STEPS)
    return rows, jobs.latest_checkpoint(job.id) is not None


def _sums(jobs: JobStore, job_id: str) -> dict[str, Any]:
    """What the live hash would say of the past, for a job whose hash is gone."""
    rows = jobs.metrics(job_id, -1, STEPS_SUMMED_MAX)
    return {"tiles": sum(row.tiles for row in rows), "flop": sum(row.flop_offloaded for row in rows)}


async def _wake(gateway: Gateway) -> None:
    try:
        await gateway.switchboard.wake_supervisor()
    except SwitchboardError as error:  # the supervisor also looks by itself; the row is what counts
        log.warning("supervisor not woken", error=str(error))


def _csv(rows: list[StepRow]) -> str:
    out = io.StringIO()
    names = [item.name for item in fields(StepRow)]
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        values = asdict(row)
        unit = str(values["unit"])
        # The unit comes from a script: a spreadsheet must not take it for a formula.
        values["unit"] = f"'{unit}" if unit[:1] in "=+-@\t\r" and unit else unit
        writer.writerow([values[name] for name in names])
    return out.getvalue()


async def _download(gateway: Gateway, path: Path, name: str) -> Response:
    root = gateway.settings.jobs_dir.absolute()

    def open_inside() -> int:
        if not path.resolve().is_relative_to(root.resolve()):
            raise HTTPException(404, "the file is not in the data directory")
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HTTPException(404, f"the file {path.name} cannot be read: {error.strerror}") from error

    descriptor = await gateway.store(open_inside)
    size = os.fstat(descriptor).st_size

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            while data := await gateway.store(os.read, descriptor, DOWNLOAD_CHUNK_BYTES):
                yield data
        finally:
            os.close(descriptor)

    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)
