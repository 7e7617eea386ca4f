"""A synchronous client of the server's REST interface, for scripts, the command line and tests.

One `Client` holds one connection pool and, where given, the admin token, which travels in the Authorization header
only. Answers are the server's JSON as plain dictionaries (/docs names the fields); every failure, of the network or of
the request, is a `RestError` whose text is fit to show. Left out: retries (the caller knows what may be repeated) and
asynchronous use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx2

CONNECT_S_MAX = 5.0  # to open a connection
ANSWER_S_MAX = 30.0  # between two pieces of an answer; an event stream has a heartbeat more often than this
DOWNLOAD_CHUNK_BYTES = 1 << 20
EVENT_LINE_CHARS_MAX = 1 << 22

Json = dict[str, Any]


class RestError(RuntimeError):
    """A request failed. `status` is the HTTP status, 0 where no answer came; the text is the server's own detail."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """The REST interface at `url` (scheme, host and port). `token` is needed for everything that changes something."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx2.Timeout(ANSWER_S_MAX, connect=CONNECT_S_MAX)
        self._http = httpx2.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=timeout)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def submit_train(
        self,
        recipe: str,
        config: Mapping[str, Any] | None = None,
        steps: int | None = None,
        mode: str = "tiles",
        name: str = "",
        data: str | None = None,
        accuracy: str = "rowwise",
        wire: str = "f32",
    ) -> Json:
        """Submit a training job; gives the job. `steps` None: the recipe's default; `data`: a file or folder in the
        server's datasets folder, None: the recipe's own; `accuracy`: what its products are checked for; `wire`: how its
        numbers travel, f32, bf16, f16 or int8."""
        body: Json = {"kind": "train", "recipe": recipe, "config": dict(config or {}), "mode": mode, "name": name}
        body |= {"data": data, "accuracy": accuracy, "wire": wire}
        if steps is not None:
            body["steps"] = steps
        return self._json("POST", "/jobs", json=body)

    def submit_run(self, name: str = "", steps: int = 0, accuracy: str = "rowwise", wire: str = "f32") -> Json:
        """A place for a script that runs beside the server; gives the job. `steps` 0: not known."""
        body = {"kind": "run", "name": name, "steps": steps, "accuracy": accuracy, "wire": wire}
        return self._json("POST", "/jobs", json=body)

    def submit_gemm(self, a: Path, b: Path, name: str = "", accuracy: str = "rowwise", wire: str = "f32") -> Json:
        """Submit the product of two float32 matrices in .npy or .safetensors files; gives the job. `accuracy`: what the
        product is checked for; `wire`: how its numbers travel."""
        with ExitStack() as stack:
            files = {}
            for field, path in (("a", a), ("b", b)):
                try:
                    file = stack.enter_context(path.open("rb"))
                except OSError as error:
                    raise RestError(f"cannot read {path}: {error.strerror}") from error
                files[field] = (path.name, file, "application/octet-stream")
            form = {"kind": "gemm", "name": name, "accuracy": accuracy, "wire": wire}
            return self._json("POST", "/jobs", data=form, files=files)

    def jobs(self, state: str | None = None, limit: int = 100, offset: int = 0) -> list[Json]:
        """Jobs, newest first; only those in `state` where given."""
        params: dict[str, str | int] = {"limit": limit, "offset": offset}
        if state is not None:
            params["state"] = state
        rows: list[Json] = self._json("GET", "/jobs", params=params)["jobs"]
        return rows

    def job(self, job: str) -> Json:
        """One job. RestError with status 404 where there is none."""
        return self._json("GET", f"/jobs/{_segment(job)}")

    def cancel(self, job: str) -> Json:
        """Ask a job to end; gives the job, which may take a moment to be `cancelled`."""
        return self._json("POST", f"/jobs/{_segment(job)}/cancel")

    def metrics(self, job: str, after_step: int = -1) -> list[Json]:
        """The job's steps after `after_step`, oldest first, all of them."""
        rows: list[Json] = []
        while True:
            params = {"after_step": rows[-1]["step"] if rows else after_step}
            more = self._json("GET", f"/jobs/{_segment(job)}/metrics", params=params)["rows"]
            if not more:
                return rows
            rows += more

    def events(self, job: str) -> Iterator[tuple[str, Json]]:
        """(event, data) of a job as they happen: `job`, `step`, `sample`, `gemm`, `lease_lost`, until the job ends."""
        with self._stream(f"/jobs/{_segment(job)}/events") as response:
            event = "message"
            for line in response.iter_lines():
                if len(line) > EVENT_LINE_CHARS_MAX:
                    raise RestError(f"event of {len(line)} characters, expected at most {EVENT_LINE_CHARS_MAX}")
                if line.startswith("event:"):
                    event = line[6:].strip()
                elif line.startswith("data:"):
                    yield event, json.loads(line[5:])

    def download_checkpoint(self, job: str, path: Path) -> int:
        """The latest checkpoint (safetensors) into `path`; gives its size in bytes."""
        return self._download(f"/jobs/{_segment(job)}/checkpoint", path)

    def download_result(self, job: str, path: Path) -> int:
        """The product of a gemm job (.npy) into `path`; gives its size in bytes."""
        return self._download(f"/jobs/{_segment(job)}/result", path)

    # ---- fleet -------------------------------------------------------------------------------------------------------

    def devices(self, limit: int = 100, offset: int = 0) -> list[Json]:
        """Devices, last seen first."""
        rows: list[Json] = self._json("GET", "/devices", params={"limit": limit, "offset": offset})["devices"]
        return rows

    def device(self, device: str) -> Json:
        """One device."""
        return self._json("GET", f"/devices/{_segment(device)}")

    def leaderboard(self, order: str = "rac", limit: int = 100, offset: int = 0) -> Json:
        """The board: {by, order, total, limit, offset, rows}."""
        params: dict[str, str | int] = {"by": "device", "order": order, "limit": limit, "offset": offset}
        return self._json("GET", "/leaderboard", params=params)

    def ready(self) -> bool:
        """Whether the server and what it depends on answer. RestError where nothing listens."""
        try:
            return bool(self._json("GET", "/readyz")["ok"])
        except RestError as error:
            if error.status == 503:
                return False
            raise

    # ---- the connection ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _json(self, method: str, path: str, **request: Any) -> Json:
        try:
            response = self._http.request(method, path, **request)
        except httpx2.HTTPError as error:
            raise RestError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        _raise_for_status(response)
        try:
            answer = response.json()
        except ValueError as error:
            raise RestError(f"{self.url}{path} answered no JSON; is that a Tileweave server?", 200) from error
        if not isinstance(answer, dict):
            raise RestError(f"{self.url}{path} answered {type(answer).__name__}, expected a JSON object", 200)
        return answer

    @contextmanager
    def _stream(self, path: str) -> Iterator[httpx2.Response]:
        try:
            with self._http.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield response
        except httpx2.HTTPError as error:
            raise RestError(f"{self.url} broke off: {error or type(error).__name__}") from error

    def _download(self, url_path: str, path: Path) -> int:
        """Write aside, then rename: a broken download never looks like a file."""
        part = path.with_name(path.name + ".part")
        size = 0
        try:
            with self._stream(url_path) as response, part.open("wb") as file:
                for chunk in response.iter_bytes(DOWNLOAD_CHUNK_BYTES):
                    size += file.write(chunk)
            part.replace(path)
        except OSError as error:
            raise RestError(f"cannot write {path}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return size


def _segment(value: str) -> str:
    """An id as one segment of a path: nothing in it can address another resource."""
    if not value or not all(char.isalnum() or char in "_-" for char in value):
        raise RestError(f"{value!r} is no id: expected letters, digits, - and _")
    return value


def _raise_for_status(response: httpx2.Response) -> None:
    if response.is_success:
        return
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = response.text[:200] or response.reason_phrase
    raise RestError(f"{response.status_code}: {detail}", response.status_code)
