"""The Pyodide engine beyond the common suite: it asks our server only, keeps to the page's headers and to its memory,
and falls back build by build down to pure Python. The wheel is swapped under way for what a test needs of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Route

ROOT = Path(__file__).resolve().parents[2]
VENDOR = ROOT / "web" / "static" / "vendor" / "pyodide"
LOCK = "**/vendor/pyodide/pyodide-lock.json"
BYTES_MAX = 128 << 20
MIB = 1 << 20
TILE = {"batch": 2, "m": 7, "n": 9, "k": 33, "seed": 5}
# A kernel with every name in place that computes nothing: what a miscompiled module may look like.
IDLE = """
unsigned gemm_scratch_bytes(void) { return 16; }
void gemm(unsigned m, unsigned n, unsigned k,
          unsigned a, unsigned a_across, unsigned a_along, unsigned a_type, unsigned a_scales,
          unsigned b, unsigned b_across, unsigned b_along, unsigned b_type, unsigned b_scales,
          unsigned c, unsigned c_row, unsigned accumulate, unsigned bias, unsigned scratch) {}
unsigned gemm_fast_scratch_bytes(unsigned m, unsigned n, unsigned k) { return 0; }
void gemm_fast(unsigned m, unsigned n, unsigned k, unsigned a, unsigned ar, unsigned b, unsigned br, unsigned c,
               unsigned cr, unsigned scratch) {}
"""


@pytest.fixture
def context(chromium) -> Iterator[BrowserContext]:
    made = chromium.new_context()
    yield made
    made.close()


@pytest.fixture
def page(context, site) -> Page:
    made: Page = context.new_page()
    made.goto(f"{site.suite}?worker")
    return made


def ask(page: Page, do: str, **values: Any) -> Any:
    return page.evaluate("order => window.suite(order)", {"do": do, **values})


def open_engine(page: Page, kernel: str = "pyodide", bytes_max: int = BYTES_MAX) -> dict[str, Any]:
    opened: dict[str, Any] = ask(page, "open", kernel=kernel, bytes_max=bytes_max)
    return opened


@pytest.fixture
def swap(context) -> Callable[[dict[str, bytes]], None]:
    """Serves the wheel with these files in place of its own, and the lock that names it so."""

    def swapped(changes: dict[str, bytes]) -> None:
        (wheel,) = VENDOR.glob("*.whl")
        packed = io.BytesIO()
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w") as new:
            for name in old.namelist():
                new.writestr(name, changes.get(name.rpartition("/")[2], old.read(name)))
        lock = json.loads((VENDOR / "pyodide-lock.json").read_text())
        lock["packages"]["tileweave-kernel"]["sha256"] = hashlib.sha256(packed.getvalue()).hexdigest()
        context.route(LOCK, lambda route: route.fulfill(json=lock))
        context.route("**/*.whl", lambda route: route.fulfill(body=packed.getvalue()))

    return swapped


@pytest.fixture(scope="module")
def idle_module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("idle")
    (folder / "idle.c").write_text(IDLE)
    zig = [sys.executable, "-m", "ziglang"]
    flags = ["-target", "wasm32-emscripten", "-fPIC", "-O1", "-c"]
    subprocess.run([*zig, "cc", *flags, "idle.c", "-o", "idle.o"], check=True, cwd=folder, timeout=120)
    exports = [f"--export={name}" for name in ("gemm", "gemm_scratch_bytes", "gemm_fast", "gemm_fast_scratch_bytes")]
    link = ["-shared", "--experimental-pic", "--no-entry", *exports, "idle.o", "-o", "idle.wasm"]
    subprocess.run([*zig, "wasm-ld", *link], check=True, cwd=folder, timeout=120)
    return (folder / "idle.wasm").read_bytes()


def test_every_request_goes_to_our_own_server(context, page, site) -> None:
    requests: list[str] = []
    context.on("request", lambda request: requests.append(request.url))
    assert open_engine(page)["kernel"] == "pyodide"
    assert ask(page, "tile", **TILE) == ""
    loaded = {urlsplit(url).path.rpartition("/")[2] for url in requests}
    assert {"pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"} <= loaded, "the Worker's requests are seen"
    assert any(name.endswith(".whl") for name in loaded)
    assert {urlsplit(url).netloc for url in requests} == {urlsplit(site.url).netloc}


def test_it_runs_under_headers_that_forbid_eval(page) -> None:
    """The page and its Worker come with the product's policy, whose 'wasm-unsafe-eval' is enough."""
    policy = page.evaluate(
        "async () => (await fetch('/static/js/engines/pyodide.js')).headers.get('Content-Security-Policy')"
    )
    assert "'wasm-unsafe-eval'" in policy and "'unsafe-eval'" not in policy
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    assert open_engine(page)["kernel"] == "pyodide"
    assert ask(page, "tile", **TILE) == ""
    assert complaints == []


def test_relaxed_build_is_taken_where_the_browser_has_it(page) -> None:
    assert open_engine(page)["note"] == "relaxed side module"


def test_a_build_that_does_not_load_gives_way_to_the_next(page, swap) -> None:
    """A browser without relaxed SIMD refuses the module as it refuses these bytes."""
    swap({"gemm_relaxed.wasm": b"\0asm\1\0\0\0 not a module"})
    opened = open_engine(page)
    assert (opened["kernel"], opened["note"]) == ("pyodide", "strict side module")
    assert ask(page, "tile", **TILE) == ""


def test_a_build_that_multiplies_wrongly_gives_way_to_the_next(page, swap, idle_module) -> None:
    swap({"gemm_relaxed.wasm": idle_module})
    opened = open_engine(page)
    assert (opened["kernel"], opened["note"]) == ("pyodide", "strict side module")
    assert ask(page, "tile", **TILE) == ""


def test_pure_python_is_what_is_left_and_says_why(page, swap, idle_module) -> None:
    swap({"gemm_relaxed.wasm": b"nothing", "gemm_strict.wasm": idle_module})
    opened = open_engine(page)
    assert opened["kernel"] == "python"
    assert "the relaxed kernel cannot be loaded" in opened["note"]
    assert "the strict kernel is wrong: 1x1x1 [0,0]: 0.0, expected" in opened["note"]
    assert ask(page, "tile", **TILE) == ""


def test_pure_python_can_be_asked_for(page) -> None:
    assert open_engine(page, "python") == {"kernel": "python", "depth": 1, "note": "pure Python (asked for)"}


@pytest.mark.parametrize(
    "address", ["**/pyodide.mjs", "**/pyodide.asm.mjs", "**/pyodide.asm.wasm", "**/python_stdlib.zip", LOCK, "**/*.whl"]
)
def test_without_its_files_it_is_not_available_and_says_why(context, page, address: str) -> None:
    """As on a server without npm, whose static files lack it."""

    def missing(route: Route) -> None:
        route.fulfill(status=404, body="")

    context.route(address, missing)
    with pytest.raises(Exception, match=r"this server has no Pyodide"):
        open_engine(page)


def test_memory_never_grows_beyond_what_is_lent(page) -> None:
    """Places fill it in all sizes, until nothing fits, and Python still has room to go on."""
    open_engine(page, bytes_max=64 * MIB)
    before = ask(page, "memory")
    assert ask(page, "noRoom", **TILE, bytes_max=64 * MIB) == ""
    after = ask(page, "memory")
    assert before["bytes"] < after["bytes"] <= 64 * MIB
    assert after["used"] == before["used"]


def test_less_memory_than_pyodide_takes_is_refused(page) -> None:
    with pytest.raises(Exception, match=r"Pyodide alone has \d+ bytes, may use 16777216"):
        open_engine(page, bytes_max=16 * MIB)
