"""JSON answers: a NaN or an infinity is null, and an error is {"detail": text} whatever raised it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from backend.switchboard.streams import SwitchboardError

DETAIL_CHARS_MAX = 2000
PROBLEMS_SHOWN_MAX = 5

ErrorPage = Callable[[Request, int, str], Response | None]


class JsonResponse(Response):
    """`content` is anything msgspec can write: dicts, lists, dataclasses, numbers."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """JSON bytes; not-a-number is null."""
        return msgspec.json.encode(content)


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JsonResponse:
    """An error's answer."""
    return JsonResponse({"detail": detail[:DETAIL_CHARS_MAX]}, status, headers)


def explain(
    error: ValidationError | RequestValidationError, start: tuple[str, ...] = (), tags: Collection[str] = ()
) -> str:
    """What is wrong with each field: where, what was expected, and what was got. `tags`: of a union, which users do not
    see."""
    problems = []
    for item in error.errors()[:PROBLEMS_SHOWN_MAX]:
        loc = item["loc"][1:] if item["loc"][:1] and item["loc"][0] in tags else item["loc"]
        path = ".".join(str(part) for part in (*start, *loc) if part not in ("body", "query", "path"))
        got = repr(item.get("input"))
        problems.append(f"{path or 'body'}: {item['msg']}; got {got if len(got) <= 80 else got[:77] + '...'}")
    return "; ".join(problems)


def install(app: FastAPI, page: ErrorPage) -> None:
    """Makes every error of the application such an answer, or what `page` gives where that is not None."""

    def answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
        return page(request, status, detail) or problem(status, detail, headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return answer(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> Response:
        return answer(request, 422, explain(error))

    @app.exception_handler(SwitchboardError)
    async def no_redis(request: Request, error: SwitchboardError) -> Response:
        detail = "Redis does not answer or is full; try again in a moment"
        return answer(request, 503, detail, {"Retry-After": "5"})
