"""What a volunteer's browser multiplies with inside Pyodide: the project's C kernel through ctypes, else pure Python.

web/static/js/engines/pyodide.js loads this package as a wheel and calls `open_kernel`, `alloc` and what a kernel
offers. The C kernel comes in a relaxed and a strict build; the first that this browser loads and that multiplies
rightly is used. Their files end in .wasm: Pyodide itself loads every .so of a wheel at once, and would fail where
relaxed SIMD is missing. Left out: any package but the standard library, and keeping panels, which is JavaScript's part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path

from tileweave_kernel.operand import Operand
from tileweave_kernel.plain import Plain
from tileweave_kernel.side_module import SideModule

BUILDS = ("relaxed", "strict")
SHAPES = ((1, 1, 1), (3, 5, 9), (7, 17, 130), (13, 9, 300))  # m, n, k: edges of register blocks, and two blocks of k
TOLERANCE = 1e-5  # relative to k: entries below are in [-1, 1)
Kernel = SideModule | Plain

__all__ = ["Kernel", "Operand", "alloc", "open_kernel", "open_plain"]


def open_kernel() -> Kernel:
    """The best kernel of this browser; `note` says why it is not the C kernel where it is not."""
    reasons = []
    for build in BUILDS:
        try:
            kernel = SideModule(Path(__file__).parent / f"gemm_{build}.wasm")
        except (OSError, AttributeError) as error:
            reasons.append(f"the {build} kernel cannot be loaded: {error}")
            continue
        wrong = fault(kernel)
        if not wrong:
            return kernel
        reasons.append(f"the {build} kernel is wrong: {wrong}")
    return open_plain("; ".join(reasons))


def open_plain(reason: str) -> Plain:
    """Pure Python, whatever else this browser has."""
    return Plain(f"pure Python ({reason})")


def alloc(size: int) -> bytearray | None:
    """`size` zero bytes, or None where there is no room: an exception would keep its frames and their panels."""
    try:
        return bytearray(size)
    except MemoryError:
        return None


def fault(kernel: Kernel) -> str:
    """The first wrong element of small products of numbers between -1 and 1, or "" where all are right."""
    for m, n, k in SHAPES:
        a, b, c, right = (bytearray(4 * count) for count in (m * k, n * k, m * n, m * n))
        memoryview(a).cast("f")[:] = _numbers(m * k)
        memoryview(b).cast("f")[:] = _numbers(n * k)
        lines = Operand(a, 0, k), Operand(b, 0, k)
        kernel.multiply(m, n, k, *lines, c, n, False, None)
        Plain("").multiply(m, n, k, *lines, right, n, False, None)
        pairs: Iterable[tuple[float, float]] = zip(memoryview(c).cast("f"), memoryview(right).cast("f"), strict=True)
        for at, (got, expected) in enumerate(pairs):
            if not abs(got - expected) <= TOLERANCE * k:
                return f"{m}x{n}x{k} [{at // n},{at % n}]: {got}, expected {expected}"
    return ""


def _numbers(count: int) -> array[float]:
    """Reproducible, spread over [-1, 1)."""
    return array("f", ((at * 7919 + count) % 2003 / 1001.5 - 1 for at in range(count)))
