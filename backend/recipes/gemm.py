"""The script of a gemm job: C = A B of two uploaded matrices, saved as .npy.

The idea: the rows of A go out in blocks, so that the operand arena holds one block of A and C at a time however large
the matrices are; within a block the coordinator cuts the tiles. The result has its name only when it is complete.
Left out: other types than float32 (a silent conversion would lose digits), and batches of matrices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from safetensors.numpy import load_file

from backend.recipes import RECIPES, GemmConfig
from tileweave.script.run import Run, attach

BLOCK_BYTES_MAX = 1 << 30
"""Of A's rows and C's rows in one GEMM; B^T is held besides."""


def read_matrix(path: Path) -> NDArray[np.float32]:
    """A float32 matrix, memory-mapped where it is an .npy file. Raises ValueError with what was found instead."""
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        if len(tensors) != 1:
            raise ValueError(f"{path.name} holds {len(tensors)} tensors, expected was one: {sorted(tensors)[:10]}")
        matrix: NDArray[Any] = next(iter(tensors.values()))
    else:
        matrix = np.load(path, mmap_mode="c", allow_pickle=False)
    if matrix.ndim != 2 or matrix.dtype != np.float32 or 0 in matrix.shape:
        raise ValueError(
            f"{path.name} is {matrix.dtype} of shape {matrix.shape}, expected was a float32 matrix that is not empty: "
            "convert it with array.astype('float32')"
        )
    return matrix


def multiply(run: Run, a: NDArray[np.float32], b: NDArray[np.float32], path: Path) -> None:
    """a: (m, k), b: (k, n); the product, (m, n), goes to `path`, atomically. Raises ValueError where k differs."""
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        raise ValueError(f"A is {a.shape}, B is {b.shape}: A needs as many columns as B has rows")
    temporary = path.with_suffix(".tmp.npy")
    product = open_memmap(temporary, mode="w+", dtype=np.float32, shape=(m, n))
    c = torch.from_numpy(product)
    bt = torch.from_numpy(np.asarray(b)).t()[None]  # (1, n, k)
    rows = max(1, BLOCK_BYTES_MAX // (4 * (k + n)))
    for first in range(0, m, rows):
        part, into = torch.from_numpy(np.asarray(a[first : first + rows]))[None], c[None, first : first + rows]

        def read(found: torch.Tensor, into: torch.Tensor = into) -> None:
            into.copy_(found)

        run.multiplier.start([part], [bt]).read(read)
        print(f"rows {first + into.shape[1]:,} of {m:,}", flush=True)
    product.flush()
    temporary.replace(path)


def main() -> None:
    """Runs under a job: the config names the two files."""
    run = attach(RECIPES["gemm"].default_steps)
    config = GemmConfig(**run.config)
    a, b = read_matrix(Path(config.a)), read_matrix(Path(config.b))
    print(f"A: {a.shape}, B: {b.shape}", flush=True)
    path = run.result_path(".npy")
    multiply(run, a, b, path)
    run.step(1, None, samples=a.shape[0], unit="rows")
    run.finish(path)


if __name__ == "__main__":
    main()
