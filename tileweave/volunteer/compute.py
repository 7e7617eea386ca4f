"""The kernels of a native volunteer: the matrix product of NumPy or, where it is installed, torch: the faster one here.

Each is proved (prove.py) and measured at joining; one that is wrong is not used, and the volunteer's status says why.

A tile is a sum of terms, each `batch` products C_i[m,n] = A_i[m,k] (B^T_i[n,k])^T in float32; what the wire narrowed is
widened first. Parallelism comes from several tiles at a
time, one thread each: BLAS must be told to use one thread before NumPy is imported (main.py does). Left out: GPUs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tileweave.conversions import part_floats
from tileweave.volunteer.errors import VolunteerEnded
from tileweave.volunteer.panels import Held
from tileweave.volunteer.prove import Floats, Multiply, first_fault
from tileweave.volunteer.session import Task

MEASURE_S = 0.15  # for each kernel
MEASURE_SHAPE = (1, 384, 512)  # batch, rows of A and of B^T, k: 0.15 GFLOP, larger than the caches of one core


@dataclass(frozen=True, slots=True)
class Kernel:
    """A matrix product and its speed on one thread, in FLOP/s. `note`: which kernels were found wrong, and how."""

    name: str
    multiply: Multiply
    flops: float
    note: str = ""


def multiply_numpy(a: Floats, bt: Floats) -> Floats:
    """(batch, m, k), (batch, n, k) -> (batch, m, n)."""
    product: Floats = np.matmul(a, bt.transpose(0, 2, 1))
    return product


def _torch_multiply() -> Multiply | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)

    def multiply(a: Floats, bt: Floats) -> Floats:
        product: Floats = torch.matmul(torch.from_numpy(a), torch.from_numpy(bt).transpose(1, 2)).numpy()
        return product

    return multiply


def flop(task: Task) -> int:
    """FLOP of a tile: 2 batch m n k."""
    lease = task.lease
    return 2 * lease.batch * lease.m * lease.n * sum(term.k for term in lease.terms)


def installed_kernels() -> dict[str, Multiply]:
    """The products there are on this machine, by their names in a profile."""
    torch = _torch_multiply()
    return {"native-numpy": multiply_numpy} | ({"native-torch": torch} if torch else {})


def fastest_kernel(kernels: dict[str, Multiply]) -> Kernel:
    """Proves and measures them, in under a second for each, and takes the fastest that is right. Raises VolunteerEnded
    where none is."""
    faults = {name: fault for name, multiply in kernels.items() if (fault := first_fault(multiply))}
    note = "; ".join(f"{name} not used: wrong product {fault}" for name, fault in faults.items())
    right = {name: multiply for name, multiply in kernels.items() if name not in faults}
    if not right:
        raise VolunteerEnded(f"no kernel here multiplies right: {note}")
    measured = [Kernel(name, multiply, _measure(multiply), note) for name, multiply in right.items()]
    return max(measured, key=lambda kernel: kernel.flops)


def _measure(multiply: Multiply) -> float:
    """FLOP/s of one thread, best of the runs that fit in MEASURE_S."""
    batch, rows, k = MEASURE_SHAPE
    a = np.random.default_rng(0).random((batch, rows, k), dtype=np.float32)
    multiply(a, a)
    best_s, started_s = float("inf"), time.perf_counter()
    while time.perf_counter() - started_s < MEASURE_S:
        run_started_s = time.perf_counter()
        multiply(a, a)
        best_s = min(best_s, time.perf_counter() - run_started_s)
    return 2 * batch * rows * rows * k / best_s


def compute(kernel: Kernel, task: Task) -> tuple[Floats, float]:
    """The sum of a tile's products, (batch, m, n) float32 and contiguous, and the seconds it took."""
    lease = task.lease
    started_s = time.perf_counter()
    product: Floats | None = None
    for term in lease.terms:
        a = _operand(task.panels[term.a], lease.batch, lease.m, term.k, lease.a_by_k, term.a_row, term.a_column)
        bt = _operand(task.panels[term.b], lease.batch, lease.n, term.k, lease.b_by_k, term.b_row, term.b_column)
        part = np.ascontiguousarray(kernel.multiply(a, bt))
        product = part if product is None else np.add(product, part, out=product)
    assert product is not None  # the protocol has no lease without a term
    return product, time.perf_counter() - started_s


def _operand(panel: Held, batch: int, lines: int, k: int, by_k: bool, row: int, column: int) -> Floats:
    """(batch, lines, k) out of a panel; of float32 a view."""
    height, width = (k, lines) if by_k else (lines, k)
    part = part_floats(panel.data, panel.rows, panel.columns, panel.dtype, row, batch * height, column, width)
    block = part.reshape(batch, height, width) if batch > 1 else part[None]
    return block.transpose(0, 2, 1) if by_k else block
