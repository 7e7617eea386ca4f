"""Copies the browser libraries that pages load from `node_modules` to `static/vendor`: `python web/vendor.py`.

They are served by us and never from a CDN: uPlot draws the loss curve, Swagger UI the REST interface's page, Pyodide
computes where no other engine runs (the lock file beside it is ours: kernels_wasm/pyodide/build_wheel.py). Versions are
pinned by package-lock.json; run `npm ci` first. The copies are build outputs: git ignores them, the wheel has them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

WEB = Path(__file__).resolve().parent
MODULES = WEB.parent / "node_modules"
VENDOR = WEB / "static" / "vendor"
FILES = {
    "uplot": ("uplot", ["dist/uPlot.esm.js", "dist/uPlot.min.css", "LICENSE"]),
    "pyodide": (
        "pyodide",
        ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "README.md", "package.json"],
    ),
    "swagger": ("swagger-ui-dist", ["swagger-ui.css", "swagger-ui-bundle.js", "LICENSE"]),
}


def vendor() -> list[Path]:
    """Copy every file; returns where they went. Raises FileNotFoundError when `npm ci` has not run."""
    written = []
    for folder, (package, names) in FILES.items():
        for name in names:
            target = VENDOR / folder / Path(name).name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(MODULES / package / name, target)
            written.append(target)
    return written


if __name__ == "__main__":
    try:
        print(f"copied {len(vendor())} files to {VENDOR}")
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is missing: run `npm ci` in {WEB.parent} first")
