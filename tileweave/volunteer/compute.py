"""The kernels of a native volunteer: the matrix product of NumPy or, where it is installed, torch: the faster one here.

A tile is `batch` products C_i[m,n] = A_i[m,k] (B^T_i[n,k])^T in float32. Parallelism comes from several tiles at a
time, one thread each: BLAS must be told to use one thread before NumPy is imported (main.py does). Left out: GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tileweave.volunteer.session import Task

Floats = NDArray[np.float32]
Multiply = Callable[[Floats, Floats], Floats]  # (batch, m, k), (batch, n, k) -> (batch, m, n)

MEASURE_S = 0.15  # for each kernel
MEASURE_SHAPE = (1, 384, 512)  # batch, rows of A and of B^T, k: 0.15 GFLOP, larger than the caches of one core


@dataclass(frozen=True, slots=True)
class Kernel:
    """A matrix product and its speed on one thread, in FLOP/s."""

    name: str
    multiply: Multiply
    flops: float


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
    return 2 * lease.batch * lease.m * lease.n * lease.k


def fastest_kernel() -> Kernel:
    """Measures the kernels there are, in under half a second, and takes the fastest."""
    candidates = {"numpy": multiply_numpy, "torch": _torch_multiply()}
    kernels = [Kernel(name, multiply, _measure(multiply)) for name, multiply in candidates.items() if multiply]
    return max(kernels, key=lambda kernel: kernel.flops)


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
    """The product of a tile, (batch, m, n) and contiguous, and the seconds it took."""
    lease = task.lease
    a = np.frombuffer(task.a.data, np.float32).reshape(lease.batch, lease.m, lease.k)
    bt = np.frombuffer(task.b.data, np.float32).reshape(lease.batch, lease.n, lease.k)
    started_s = time.perf_counter()
    product = np.ascontiguousarray(kernel.multiply(a, bt))
    return product, time.perf_counter() - started_s
