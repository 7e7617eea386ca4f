"""An operand of an open GEMM as the script stored it, read as float32 lines.

The idea: a check compares a product with the operands as they were sent. What the wire narrowed is widened here, which
is exact; it is done once for each part, when first asked for, and kept while the GEMM is open. float32 stored by lines
is read where it lies.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tileweave.conversions import panel_floats
from tileweave.protocol.elements import Dtype, panel_bytes

F32 = NDArray[np.float32]


class Operand:
    """`parts`: the bytes of each, one panel of all its rows (protocol/elements.py): by lines, batch x lines rows of k,
    or `by_k`, batch x k rows of lines. Lines are rows of A, or columns of B. Raises ValueError where the bytes are not
    as many."""

    @classmethod
    def of(cls, lines: F32) -> Operand:
        """One part by lines, (batch, lines, k) float32."""
        batch, count, k = lines.shape
        return cls([np.ascontiguousarray(lines).data.cast("B")], batch, count, k)

    def __init__(
        self, parts: Sequence[memoryview], batch: int, lines: int, k: int, by_k: bool = False, dtype: Dtype = "f32"
    ) -> None:
        self.batch, self.lines, self.k = batch, lines, k
        self._by_k, self._dtype = by_k, dtype
        self._rows, self._columns = (batch * k, lines) if by_k else (batch * lines, k)
        expected = panel_bytes(self._rows, self._columns, dtype)
        for part in parts:
            if part.nbytes != expected:
                raise ValueError(
                    f"a part of {part.nbytes} bytes, expected {expected}: {self._rows} x {self._columns} {dtype}"
                )
        self._parts = parts
        self._floats: list[F32 | None] = [None] * len(parts)
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """Length of a full sum."""
        return self.k * len(self._parts)

    def copy_bytes(self, batch: int, lines: int, k: int) -> int:
        """Bytes that `read` of so much takes besides the operand itself."""
        return 4 * batch * lines * k * len(self._parts) if len(self._parts) > 1 else 0

    def read(self, b0: int, b1: int, l0: int, l1: int, k0: int, k1: int) -> F32:
        """Lines [l0, l1) of entries [b0, b1), of each part [k0, k1): (b1 - b0, l1 - l0, depth), the parts one after the
        other along the last axis. A view where there is one part."""
        each = [self._part(part)[b0:b1, l0:l1, k0:k1] for part in range(len(self._parts))]
        return each[0] if len(each) == 1 else np.concatenate(each, axis=2)

    def _part(self, part: int) -> F32:
        """(batch, lines, k)."""
        with self._lock:
            found = self._floats[part]
            if found is None:
                found = panel_floats(self._parts[part], self._rows, self._columns, self._dtype)
                found = self._floats[part] = found.reshape(self.batch, -1, self._columns)
        return found.transpose(0, 2, 1) if self._by_k else found
