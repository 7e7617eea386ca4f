"""Builds what only benches want, the ladder's rungs and the CPU's peaks: `python kernels_wasm/ladder.py [directory]`.

The rungs (ladder/1_naive.c and on, one idea each) become build/ladder/*.wasm with the exports of the shipped kernel.
peak.c becomes build/bench/peak.wasm and, for this machine's own CPU, the program build/bench/peak, which prints
GFLOP/s. With a directory they go there instead of build/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build import CPUS, HERE, compile_wasm

OUTPUT = HERE.parent / "build"


def cpu_of(rung: Path) -> str:
    """The least that its source asks for: a rung without vectors must not get them from the compiler."""
    source = rung.read_text(encoding="utf-8")
    return CPUS["relaxed" if "relaxed" in source else "strict" if "wasm_simd128.h" in source else "scalar"]


def build_ladder(directory: Path = OUTPUT) -> list[Path]:
    """Every rung, in order of its number. Raises CalledProcessError."""
    rungs = sorted((HERE / "ladder").glob("[0-9]*.c"))
    return [compile_wasm([str(rung)], cpu_of(rung), directory / "ladder" / f"{rung.stem}.wasm") for rung in rungs]


def build_peaks(directory: Path = OUTPUT) -> list[Path]:
    """The peaks as a WASM module and as a program for this CPU. Raises CalledProcessError."""
    module = compile_wasm(["peak.c"], CPUS["relaxed"], directory / "bench" / "peak.wasm")
    program = module.with_suffix("")
    command = [sys.executable, "-m", "ziglang", "cc", "-O3", "-std=gnu23", "-mcpu=native", "peak.c", "-o", str(program)]
    subprocess.run(command, check=True, cwd=HERE)
    return [module, program]


if __name__ == "__main__":
    output = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUTPUT
    for path in (*build_ladder(output), *build_peaks(output)):
        print(f"built {path}")
