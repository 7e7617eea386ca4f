"""`make pyodide-wheel`: the wheel through `pyodide build`, where its cross-build environment can be had, else without.

`pyodide build` (PyPI: pyodide-build, Python >= 3.12) wants a download of some hundred MB and Emscripten; it then asks
the same build_wheel.py for the wheel, inside an environment of its own. Where any of that is missing, build_wheel.py is
asked directly: the wheel's side modules need nothing of Emscripten. Which way it went is printed.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import build_wheel

PYODIDE = Path(sys.executable).with_name("pyodide")
TIMEOUT_S = 900


def through_pyodide_build(directory: Path) -> str:
    """Makes the wheel in `directory` and returns "", or why that is not possible here."""
    if importlib.util.find_spec("pyodide_build") is None:
        return f"pyodide-build is not installed (it needs Python >= 3.12, this is {platform.python_version()})"
    for arguments in (["xbuildenv", "install"], ["build", "--outdir", str(directory), "."]):
        try:
            subprocess.run(
                [str(PYODIDE), *arguments],
                check=True,
                cwd=build_wheel.HERE,
                timeout=TIMEOUT_S,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"`pyodide {arguments[0]}` did not end in {TIMEOUT_S} s"
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip() or error.stdout.strip() or f"exit {error.returncode}").splitlines()[-1]
            return f"`pyodide {arguments[0]}` failed: {last}"
    return ""


def main(directory: Path) -> None:
    """The wheel and its lock into `directory`, by the first way that works."""
    build_wheel.clear(directory)
    reason = through_pyodide_build(directory)
    if reason:
        print(f"not through `pyodide build`: {reason}; by ziglang alone")
        build_wheel.build_wheel(str(directory))
    else:
        print("through `pyodide build`")
    build_wheel.finish(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else build_wheel.DIRECTORY)
