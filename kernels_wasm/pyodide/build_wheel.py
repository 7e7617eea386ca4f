"""Builds the wheel that Pyodide loads: `python kernels_wasm/pyodide/build_wheel.py [directory]`.

The wheel holds the Python package beside this file and two side modules of ../gemm.c, made by the clang and the linker
inside the pinned `ziglang` wheel, without Emscripten's SDK: all that they import is Pyodide's memory, table and stack.
It is stored uncompressed with fixed dates, so that two builds give the same bytes. Where npm has brought Pyodide, its
lock file is written beside the wheel: it names this wheel and nothing else, so that there is nothing a page could fetch
elsewhere. `build_wheel` is also the hook by which `pyodide build` makes the same wheel (pyproject.toml). Left out: the
scalar build; a browser without SIMD has the WASM engine's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import runpy
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "tileweave_kernel"
DIRECTORY = ROOT / "web" / "static" / "vendor" / "pyodide"
PYODIDE_LOCK = ROOT / "node_modules" / "pyodide" / "pyodide-lock.json"
KERNEL = runpy.run_path(str(HERE.parent / "build.py"))  # what the other builds of the kernel are made of, and for
BUILDS = ("relaxed", "strict")
COMPILE = [
    "-target", "wasm32-emscripten", "-fPIC", "-c", "-std=c23", "-O3", "-ffp-contract=off", "-ffreestanding",
    "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
]  # fmt: skip
LINK = ["-shared", "--experimental-pic", "--no-entry", "--strip-all", "--unresolved-symbols=import-dynamic"]
DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say
WHEEL = f"Wheel-Version: 1.0\nGenerator: {PACKAGE}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def version() -> str:
    """The project's."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def side_module(build: str) -> bytes:
    """The kernel as a shared library; raises CalledProcessError where it does not compile."""
    zig = [sys.executable, "-m", "ziglang"]
    with tempfile.TemporaryDirectory(prefix="tileweave-side-") as temporary:
        objects = []
        for source in KERNEL["SOURCES"]:
            objects.append(str(Path(temporary, source).with_suffix(".o")))
            compile_one = [*zig, "cc", *COMPILE, f"-mcpu={KERNEL['CPUS'][build]}", source, "-o", objects[-1]]
            subprocess.run(compile_one, check=True, cwd=HERE.parent)
        made = Path(temporary, "kernel.wasm")
        subprocess.run([*zig, "wasm-ld", *LINK, *objects, "-o", str(made)], check=True)
        return made.read_bytes()


def contents() -> dict[str, bytes]:
    """Every file of the wheel by its name in it, RECORD last."""
    sources = sorted((HERE / PACKAGE).glob("*.py"))
    files = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sources}
    files |= {f"{PACKAGE}/gemm_{build}.wasm": side_module(build) for build in BUILDS}
    info = f"{PACKAGE}-{version()}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {version()}\n"
    files |= {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": WHEEL.encode()}
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    return files


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Writes the wheel and returns its file name (PEP 517)."""
    path = Path(wheel_directory, f"{PACKAGE}-{version()}-py3-none-any.whl")
    path.parent.mkdir(parents=True, exist_ok=True)
    files = contents()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return path.name


def lock(wheel: Path, pyodide_lock: Path) -> Path:
    """pyodide-lock.json beside the wheel, for the Pyodide that npm has brought: this wheel is all that it offers."""
    package = {
        "name": PACKAGE.replace("_", "-"),
        "version": version(),
        "file_name": wheel.name,
        "install_dir": "site",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "package_type": "package",
        "imports": [PACKAGE],
        "depends": [],
        "unvendored_tests": False,
    }
    info = json.loads(pyodide_lock.read_text())["info"]
    path = wheel.with_name("pyodide-lock.json")
    path.write_text(json.dumps({"info": info, "packages": {package["name"]: package}}, indent=1) + "\n")
    return path


def clear(directory: Path) -> None:
    """No wheel of an older version stays to be served."""
    for old in directory.glob(f"{PACKAGE}-*.whl"):
        old.unlink()


def finish(directory: Path) -> None:
    """The lock, where there is a Pyodide for it; says what is there now."""
    (wheel,) = directory.glob(f"{PACKAGE}-*.whl")
    print(f"built {wheel} ({wheel.stat().st_size} bytes)")
    if PYODIDE_LOCK.exists():
        print(f"wrote {lock(wheel, PYODIDE_LOCK)}")
    else:
        print("npm has not brought Pyodide: no lock file, and browsers will not be offered Pyodide")


def main(directory: Path) -> None:
    """Wheel and lock into `directory`."""
    clear(directory)
    build_wheel(str(directory))
    finish(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DIRECTORY)
