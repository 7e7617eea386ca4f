"""Builds the volunteers' WASM kernel from `gemm.c`: `python kernels_wasm/build.py [output]`.

The compiler is the clang inside the pinned `ziglang` wheel, so that no system toolchain is needed and two builds give
the same bytes. The memory starts small, is exported, and is grown by its owner (JavaScript, or a test) up to
MEMORY_BYTES_MAX; a declared maximum keeps some browsers from reserving more.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "web" / "static" / "wasm" / "gemm_simd128.wasm"
MEMORY_BYTES_MAX = 1 << 30
STACK_BYTES = 16384
FLAGS = [
    "-target",
    "wasm32-freestanding",
    "-mcpu=baseline+simd128+bulk_memory",
    "-std=c23",
    "-O3",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffreestanding",
    "-nostdlib",
    "-Wl,--no-entry",
    "-Wl,--export=__heap_base",
    f"-Wl,-z,stack-size={STACK_BYTES}",
    f"-Wl,--max-memory={MEMORY_BYTES_MAX}",
    "-s",
]


def build(output: Path = OUTPUT) -> Path:
    """Compile to `output`, replacing it only when the compiler succeeded; raises CalledProcessError otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as temporary:
        made = Path(temporary) / output.name
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "gemm.c", "-o", str(made)]
        subprocess.run(command, check=True, cwd=HERE)
        made.replace(output)
    return output


if __name__ == "__main__":
    path = build(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else build()
    print(f"built {path} ({path.stat().st_size} bytes)")
