"""`tileweave bench kernels`: how fast our kernels are on this machine, beside every library that a browser offers.

One bare headless Chromium measures ours and the peers turn by turn in Workers (web/bench/kernels/page.js and what it
starts); torch and NumPy are measured natively on one thread. Every product is compared with float64 before its maker is
timed.

What a timing includes, ours and peers alike: operands where the kernel wants them (WASM heap, GPU), the product left
there. Ours packs both operands anew in each call; tfjs keeps its packed B. On WebGPU ours counts the copy of the
product to a readable buffer, the peers do not make it, and A and B are packed once, when they arrive. onnxruntime-web's
WASM provider cannot leave anything in its heap: see web/bench/kernels/peers.js. Speeds are 2 n^3 over the time. The
peak is that of 128-bit fused multiply-adds on one core, in WASM in the same run (kernels_wasm/peak.c); a product's
error is the largest one over the largest element.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.bench.kernels.figures import figures
from backend.bench.kernels.native import native
from backend.bench.kernels.page import ROOT, KernelsPage
from backend.bench.kernels.targets import holds
from backend.chromium import find

PAGE_S_MAX = 240.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the page measures; its fields are those of Plan in web/bench/kernels/page.js."""

    sections: tuple[str, ...] = ("wasm", "pyodide", "pair", "webgpu")
    wasm: tuple[int, ...] = (512, 1024)
    fast: tuple[int, ...] = (512, 1024, 2048)
    gpu: tuple[int, ...] = (512, 1024)
    ladder: tuple[int, ...] = ()
    rungs: tuple[str, ...] = ()
    rounds: int = 31
    roundMs: int = 30


def kernels(plan: Plan | None = None, overrides: dict[str, bytes] | None = None) -> dict[str, Any]:
    """Measure. Returns rows, peers, peaks, the named ratios, errors and `holds`. Raises RuntimeError where the page
    cannot measure at all; what fails alone is in `failed` and `refused`. `overrides`: see KernelsPage."""
    plan = plan or Plan()
    build_yardsticks()
    with KernelsPage(overrides) as page:
        measured = page.measure(asdict(plan), PAGE_S_MAX)
        page.progress("native: torch and numpy")
        found = figures(measured, native(sorted({*plan.wasm, *plan.fast})))
    found |= {"cpu": cpu_model(), "browser": browser_version() or found["browser"]}
    return found | {"holds": holds(found)}


def cpu_model() -> str:
    """As Linux calls it, else as Python does."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def browser_version() -> str:
    """What the browser says of itself, or "" where it does not."""
    done = subprocess.run([find() or "chromium", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def build_yardsticks() -> None:
    """Build kernels_wasm/peak.c and the ladder, which nothing but benches want. Raises RuntimeError."""
    command = [sys.executable, str(ROOT / "kernels_wasm" / "ladder.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kernels_wasm/ladder.py failed: {done.stderr[-1000:]}")
