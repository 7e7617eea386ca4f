"""The C kernel as a side module of Pyodide: a shared library of WebAssembly that works on Pyodide's own memory.

kernels_wasm/gemm.c says what the arguments mean. A bytearray's bytes do not move while nobody changes its length, so
their address is all that the kernel needs. Left out: growing or keeping anything; the scratch is made once.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tileweave_kernel.operand import Operand

u32 = ctypes.c_uint32


class SideModule:
    """One build of the kernel."""

    name = "pyodide"

    def __init__(self, path: Path) -> None:
        """Raises OSError where the browser cannot load it, AttributeError where it is another module."""
        library = ctypes.CDLL(str(path))
        self.note = f"{path.stem.removeprefix('gemm_')} side module"
        self._gemm = _declared(library.gemm, 18, None)
        self._fast = _declared(library.gemm_fast, 10, None)
        self._fast_scratch_bytes = _declared(library.gemm_fast_scratch_bytes, 3, u32)
        self._scratch = bytearray(_declared(library.gemm_scratch_bytes, 0, u32)())

    def fast_scratch_bytes(self, m: int, n: int, k: int) -> int:
        """What `tile` wants as its scratch for a norm-wise product; 0: there is no faster way at this size."""
        return int(self._fast_scratch_bytes(m, n, k))

    def tile(
        self,
        batch: int,
        m: int,
        n: int,
        k: int,
        a: Operand,
        a_entry: int,
        b: Operand,
        b_entry: int,
        c: bytearray,
        accumulate: bool,
        scratch: bytearray | None,
    ) -> None:
        """C[i] (+)= A[i] B[i], the operands of each entry so many bytes behind those before; norm-wise where there is a
        scratch, for float32 by lines."""
        at_a, at_b, at_c = _address(a.buffer) + a.offset, _address(b.buffer) + b.offset, _address(c)
        at_scratch = _address(scratch or self._scratch)
        for _ in range(batch):
            if scratch:
                self._fast(m, n, k, at_a, a.across, at_b, b.across, at_c, n, at_scratch)
            else:
                left, right = (at_a, a.across, a.along, a.type, 0), (at_b, b.across, b.along, b.type, 0)
                self._gemm(m, n, k, *left, *right, at_c, n, accumulate, 0, at_scratch)
            at_a, at_b, at_c = at_a + a_entry, at_b + b_entry, at_c + 4 * m * n

    def multiply(
        self,
        m: int,
        n: int,
        k: int,
        a: Operand,
        b: Operand,
        c: bytearray,
        c_row: int,
        accumulate: bool,
        bias: bytearray | None,
    ) -> None:
        """One product of any types and layouts."""
        operands = [
            value
            for x in (a, b)
            for value in (_address(x.buffer) + x.offset, x.across, x.along, x.type, _address(x.scales))
        ]
        self._gemm(m, n, k, *operands, _address(c), c_row, accumulate, _address(bias), _address(self._scratch))


def _declared(function: Any, arguments: int, result: type[ctypes.c_uint32] | None) -> Any:
    function.argtypes = [u32] * arguments
    function.restype = result
    return function


def _address(buffer: bytearray | None) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
