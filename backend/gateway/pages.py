"""The pages: five templates, the static files they load, the admin's login, and the interface's documentation.

Pages hold no data of their own beyond what their template is given here; their scripts ask REST. What a template gets:
`title`, `config` (for a data attribute, as JSON), `admin` (whether the session is the admin's), `csrf` (that session's
token, else ""), and on some pages `job`, `device` or `error`. Left out: any inline script or style, which the CSP bans.
"""

from __future__ import annotations

import json
import mimetypes
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, HTTPException, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from backend.gateway.auth import COOKIE, address_of, auth_of, session_of
from backend.gateway.context import gateway_of
from backend.gateway.devices import find_device
from backend.gateway.jobs import find_job
from backend.gateway.security import origin_is_allowed
from backend.recipes import RECIPES

SWAGGER = "/static/vendor/swagger"
DOCS_HTML = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tileweave REST</title>
<link rel="stylesheet" href="{SWAGGER}/swagger-ui.css"></head>
<body><div id="swagger"></div>
<script src="{SWAGGER}/swagger-ui-bundle.js"></script><script src="/docs/init.js"></script></body></html>
"""
DOCS_JS = 'SwaggerUIBundle({ url: "/api/v1/openapi.json", dom_id: "#swagger", deepLinking: false });\n'

router = APIRouter(include_in_schema=False)


def web_root() -> Path:
    """Templates and static files: inside the installed package, or in the checkout beside it."""
    package = Path(__file__).parents[1]
    packaged = package / "web"
    return packaged if packaged.is_dir() else package.parent / "web"


class Static(StaticFiles):
    """Static files that a browser keeps but asks about, so that a page never runs with an older server's script."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 304."""
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


def install(app: FastAPI, root: Path) -> None:
    """Mounts the static files and makes the templates known."""
    mimetypes.add_type("application/wasm", ".wasm")  # what the system's table says differs
    mimetypes.add_type("text/javascript", ".js")
    mimetypes.add_type("text/javascript", ".mjs")
    app.mount("/static", Static(directory=root / "static"), name="static")
    app.state.templates = Environment(
        loader=FileSystemLoader(root / "templates"), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    app.include_router(router)


def page(request: Request, template: str, title: str, status: int = 200, **context: Any) -> Response:
    """A rendered template. `config` is JSON text; Jinja escapes it for its attribute."""
    session = session_of(request)
    config = {"api": "/api/v1", **context.pop("config", {})}
    html = request.app.state.templates.get_template(template).render(
        title=title,
        admin=session is not None,
        csrf=auth_of(request).csrf_token(session) if session else "",
        config=json.dumps(config),
        **context,
    )
    # What a session sees must not come out of a cache after it has ended.
    return HTMLResponse(html, status, {"Cache-Control": "no-store"})


def error_page(request: Request, status: int, detail: str) -> Response:
    """What a person sees where a program would get {"detail": …}."""
    return page(request, "error.html", f"Error {status}", status, error=detail)


def wants_page(request: Request) -> bool:
    """Whether the answer is for a person in a browser."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")


@router.get("/")
async def volunteer(request: Request) -> Response:
    """The volunteer's page: one click and the tab computes."""
    return page(request, "volunteer.html", "Volunteer", config={"socket": "/ws/device"})


@router.get("/leaderboard")
async def leaderboard(request: Request) -> Response:
    """Who has given what."""
    return page(request, "leaderboard.html", "Leaderboard")


@router.get("/devices/{device_id}")
async def device(request: Request, device_id: str) -> Response:
    """One device."""
    row = await find_device(gateway_of(request), device_id)
    return page(request, "device.html", row.name or row.id, device=row, config={"device": row.id})


@router.get("/jobs/{job_id}")
async def job(request: Request, job_id: str) -> Response:
    """A job's public progress."""
    row = await find_job(gateway_of(request), job_id)
    return page(request, "job.html", row.name or row.id, job=row, config={"job": row.id})


@router.get("/admin")
async def admin(request: Request) -> Response:
    """Login, or the admin's desk."""
    return _admin(request)


@router.post("/admin/login")
async def login(request: Request) -> Response:
    """Opens a session for the right token."""
    gateway = gateway_of(request)
    _check_origin(request, gateway.settings.allowed_origins)
    auth = auth_of(request)
    try:
        right = auth.token_is_right(await _field(request, "token"), address_of(request))
    except HTTPException as error:
        return _admin(request, error.status_code, str(error.detail))
    if not right:
        return _admin(request, 401, "That is not the token. It is in the file `token` of the data directory.")
    response = RedirectResponse("/admin", 303)
    response.set_cookie(
        COOKIE,
        auth.new_session(),
        max_age=int(gateway.settings.session_s_max),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/admin/logout")
async def logout(request: Request) -> Response:
    """Ends the session in this browser."""
    session = session_of(request)
    if session is not None and not auth_of(request).csrf_is_right(session, await _field(request, "csrf")):
        raise HTTPException(403, "the form's csrf field is missing or wrong; reload the page")
    response = RedirectResponse("/admin", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


@router.get("/docs")
async def docs() -> Response:
    """The REST interface, described by Swagger UI."""
    return HTMLResponse(DOCS_HTML)


@router.get("/docs/init.js")
async def docs_script() -> Response:
    """Starts Swagger UI; a file of its own, since the CSP bans inline scripts."""
    return Response(DOCS_JS, media_type="text/javascript")


def _admin(request: Request, status: int = 200, error: str = "") -> Response:
    recipes = [
        {
            "name": recipe.name,
            "title": recipe.title,
            "summary": recipe.summary,
            "steps": recipe.default_steps,
            "schema": recipe.config.model_json_schema(),
        }
        for recipe in RECIPES.values()
        if recipe.name != "gemm"
    ]
    return page(request, "admin.html", "Admin", status, error=error, config={"recipes": recipes})


async def _field(request: Request, name: str) -> str:
    """A field of a urlencoded form."""
    try:
        fields = parse_qs((await request.body()).decode("ascii"), max_num_fields=10)
    except ValueError:
        raise HTTPException(422, "the form is not urlencoded text of at most 10 fields") from None
    return fields.get(name, [""])[0]


def _check_origin(request: Request, allowed: list[str]) -> None:
    """A login form on another site must not log this browser in."""
    if not origin_is_allowed(request.headers.get("origin"), request.headers.get("host"), allowed):
        raise HTTPException(403, "this form was sent by a page of another origin")
