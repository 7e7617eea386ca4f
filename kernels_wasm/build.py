"""Builds the volunteers' WASM kernels, three of one source: `python kernels_wasm/build.py [directory]`.

The compiler is the clang inside the pinned `ziglang` wheel, so that no system toolchain is needed and two builds give
the same bytes. The memory starts small, is exported, and is grown by its owner (JavaScript, or a test) up to
MEMORY_BYTES_MAX; a declared maximum keeps some browsers from reserving more. Left out: the ladder and the peaks, which
only benches want (ladder.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIRECTORY = HERE.parent / "web" / "static" / "wasm"
MEMORY_BYTES_MAX = 1 << 30
STACK_BYTES = 16384
CPUS = {
    "relaxed": "baseline+bulk_memory+simd128+relaxed_simd",
    "strict": "baseline+bulk_memory+simd128",
    "scalar": "baseline+bulk_memory",
}
FLAGS = [
    "-target",
    "wasm32-freestanding",
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
SOURCES = ["gemm.c", "fast.c"]


def compile_wasm(sources: list[str], cpu: str, output: Path) -> Path:
    """Compile to `output`, replacing it only when the compiler succeeded; raises CalledProcessError otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as temporary:
        made = Path(temporary) / output.name
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-mcpu={cpu}", *sources, "-o", str(made)]
        subprocess.run(command, check=True, cwd=HERE)
        made.replace(output)
    return output


def build(directory: Path = DIRECTORY) -> list[Path]:
    """The three modules gemm_{relaxed,strict,scalar}.wasm in `directory`."""
    return [compile_wasm(SOURCES, cpu, directory / f"gemm_{name}.wasm") for name, cpu in CPUS.items()]


if __name__ == "__main__":
    for path in build(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else build():
        print(f"built {path} ({path.stat().st_size} bytes)")
