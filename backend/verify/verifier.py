"""Checks the tiles of open GEMMs, and keeps what their checks have in common.

What costs a pass over the operands is done while a tile is in flight (`prepare`), so that a result is answered after
one pass over itself (`check`):

    column panel  -> R, B R, beta       drawn and computed once, whatever the number of its tiles
    tile          -> A (B R), A part    computed once, dropped when the tile is good

and, for a result that may be norm-wise, |B|_F with the one and u P with the other (normwise.py).

R never leaves this process. It is drawn afresh for every column panel of every GEMM, and anew after a bad result, so
that whatever a device may learn from verdicts is about numbers that are used no more.

Thread-safe: the shell calls it from worker threads, each with one BLAS thread. Bounded: beyond `kept_bytes_max` the
least recently used entries go, and are computed again if they are needed after all.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from backend.coordinator.events import Check
from backend.verify.freivalds import (
    F32,
    F64,
    PROBES,
    ExactColumns,
    Verdict,
    columns_norms,
    columns_probe,
    draw,
    exact_columns,
    judge,
    passes,
    rows_part,
    rows_probe,
)
from backend.verify.normwise import columns_size, rows_size, spread
from backend.verify.operand import Operand
from planner.shapes import Rect
from tileweave.protocol.elements import ResultDtype
from tileweave.protocol.messages import Accuracy

Read = Callable[[], F32]

KEPT_BYTES_MAX = 256 << 20
SEED_BYTES = 32


class _Columns:
    """A column panel's secret R and what follows from it. `read` gives B^T (batch, n, k)."""

    def __init__(self, read: Read, shape: tuple[int, int, int], copied: int, seed: bytes, with_norms: bool) -> None:
        batch, n, k = shape
        self._read = read
        self.r = draw(n, seed)
        self._with_norms = with_norms
        self._lock = threading.Lock()
        self._bt: F32 | None = None
        self._probe: tuple[F32, F32 | None] | None = None
        self._size: F64 | None = None
        self._exact: ExactColumns | None = None
        self.nbytes = 4 * n * PROBES + batch * k * (4 * (PROBES + 1) + 8 * (PROBES + 2)) + copied

    @property
    def bt(self) -> F32:
        """B^T (batch, n, k)."""
        if self._bt is None:  # two threads that read it at once read the same
            self._bt = self._read()
        return self._bt

    def probe(self) -> tuple[F32, F32 | None]:
        """B R, and beta where it is wanted."""
        with self._lock:
            if self._probe is None:
                beta = columns_norms(self.bt) if self._with_norms else None
                self._probe = columns_probe(self.bt, self.r), beta
            return self._probe

    def size(self) -> F64:
        """|B|_F."""
        with self._lock:
            if self._size is None:
                self._size = columns_size(self.bt)
            return self._size

    def exact(self) -> ExactColumns:
        """The same in float64, for the rows in doubt."""
        with self._lock:
            if self._exact is None:
                self._exact = exact_columns(self.bt, self.r)
            return self._exact


class _Tile:
    """A tile's A (B R). `read` gives A (batch, m, k)."""

    def __init__(self, read: Read, shape: tuple[int, int], copied: int, columns: _Columns) -> None:
        self._read = read
        self.columns = columns
        self._lock = threading.Lock()
        self._a: F32 | None = None
        self._probe: tuple[F32, F32 | None] | None = None
        self.nbytes = shape[0] * shape[1] * 4 * (PROBES + 1) + copied

    @property
    def a(self) -> F32:
        """A (batch, m, k)."""
        if self._a is None:
            self._a = self._read()
        return self._a

    def probe(self) -> tuple[F32, F32 | None]:
        """A (B R), and the A part of T where that is the smaller half."""
        with self._lock:
            if self._probe is None:
                br, beta = self.columns.probe()
                self._probe = rows_probe(self.a, br), None if beta is None else rows_part(self.a, beta)
            return self._probe

    def spread(self) -> F64:
        """u P."""
        return spread(rows_size(self.a), self.columns.size())


class _Gemm(NamedTuple):
    """The operands, and the type of the results."""

    a: Operand
    bt: Operand
    dtype: ResultDtype


_ColumnsKey = tuple[int, int, int, int, int, int, int]  # gemm, b0, b1, n0, n1, k0, k1
_TileKey = tuple[int, Rect]


class Verifier:
    """One for each coordinator. `entropy(n)` gives n secret random bytes."""

    def __init__(
        self,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        kept_bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        self._entropy = entropy
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._gemms: dict[int, _Gemm] = {}
        self._kept: OrderedDict[_ColumnsKey | _TileKey, _Columns | _Tile] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept between calls, operands not counted."""
        return self._kept_bytes

    def open_gemm(self, gemm_id: int, a: Operand, bt: Operand, dtype: ResultDtype = "f32") -> None:
        """C_i = A_i B_i for i < batch, or the sum of the products of their parts; B's lines are its columns. Results
        are rounded to `dtype`. The operands stay unchanged until `close_gemm`. Raises ValueError where they do not go
        together, or the id is open.
        """
        if (a.batch, a.k, a.depth) != (bt.batch, bt.k, bt.depth):
            raise ValueError(f"gemm {gemm_id}: A has batch, k {a.batch, a.depth}, B {bt.batch, bt.depth}")
        with self._lock:
            if gemm_id in self._gemms:
                raise ValueError(f"gemm {gemm_id} is open already; close it first")
            self._gemms[gemm_id] = _Gemm(a, bt, dtype)

    def prepare(self, gemm_id: int, rect: Rect) -> None:
        """A lease for `rect` went out: compute what its check needs besides the result. Of a closed GEMM: nothing."""
        with self._lock:
            tile = self._tile(gemm_id, rect) if gemm_id in self._gemms else None
        if tile is not None:
            tile.probe()

    def check(self, gemm_id: int, rect: Rect, c: F32, accuracy: Accuracy = "rowwise") -> Verdict:
        """Is `c` (batch, m, n of the rectangle, float32) the product over the rectangle's run of k, to this accuracy?
        Raises LookupError for a GEMM that is not open and ValueError for a `c` of another shape.
        """
        if c.shape != (rect.batch, rect.m, rect.n) or c.dtype.str != "<f4":
            raise ValueError(f"gemm {gemm_id}, {rect}: the product is {c.dtype} {c.shape}, expected float32 of {rect}")
        with self._lock:
            if gemm_id not in self._gemms:
                raise LookupError(f"gemm {gemm_id} is not open")
            tile = self._tile(gemm_id, rect)
            dtype = self._gemms[gemm_id].dtype
        columns = tile.columns
        abr, part = tile.probe()
        wide = tile.spread() if accuracy == "normwise" else None
        good = passes(abr, part, c, columns.r, tile.a.shape[2], wide, dtype)
        verdict = Verdict(Check.GOOD)
        if not good.all():
            verdict = judge(tile.a, columns.bt, c, columns.r, columns.exact(), ~good, accuracy, dtype)
        with self._lock:
            if verdict.kind is Check.GOOD:
                self._drop([(gemm_id, rect)])
            elif verdict.kind is Check.BAD:  # this R has been used against a liar
                self._retire(columns)
        return verdict

    def close_gemm(self, gemm_id: int) -> None:
        """Let go of the operands and all that was kept for them."""
        with self._lock:
            self._gemms.pop(gemm_id, None)
            self._drop([key for key in self._kept if key[0] == gemm_id])

    def _tile(self, gemm_id: int, rect: Rect) -> _Tile:
        """The tile's entry, made where it is missing. Called with the lock."""
        key = (gemm_id, rect)
        kept = self._kept.get(key)
        if isinstance(kept, _Tile):
            self._kept.move_to_end(key)
            return kept
        gemm = self._gemms[gemm_id]
        k0, k1 = (rect.k0, rect.k1) if rect.partial else (0, gemm.a.k)
        read = partial(gemm.a.read, rect.b0, rect.b1, rect.m0, rect.m1, k0, k1)
        copied = gemm.a.copy_bytes(rect.batch, rect.m, k1 - k0)
        tile = _Tile(read, (rect.batch, rect.m), copied, self._columns(gemm_id, gemm, rect, k0, k1))
        self._keep(key, tile)
        return tile

    def _columns(self, gemm_id: int, gemm: _Gemm, rect: Rect, k0: int, k1: int) -> _Columns:
        key = (gemm_id, rect.b0, rect.b1, rect.n0, rect.n1, k0, k1)
        kept = self._kept.get(key)
        if isinstance(kept, _Columns):
            self._kept.move_to_end(key)
            return kept
        depth = (k1 - k0) * gemm.bt.depth // gemm.bt.k
        read = partial(gemm.bt.read, rect.b0, rect.b1, rect.n0, rect.n1, k0, k1)
        # T has an A part of m x k terms and a C part of m x n: the first stage uses the smaller one.
        shape = (rect.batch, rect.n, depth)
        copied = gemm.bt.copy_bytes(rect.batch, rect.n, k1 - k0)
        columns = _Columns(read, shape, copied, self._entropy(SEED_BYTES), with_norms=depth < rect.n)
        self._keep(key, columns)
        return columns

    def _keep(self, key: _ColumnsKey | _TileKey, entry: _Columns | _Tile) -> None:
        self._kept[key] = entry
        self._kept_bytes += entry.nbytes
        while self._kept_bytes > self._kept_bytes_max:
            oldest, kept = next(iter(self._kept.items()))
            if isinstance(kept, _Columns):
                self._retire(kept)
            else:
                self._drop([oldest])

    def _retire(self, columns: _Columns) -> None:
        """Drop a column panel's entry and its tiles', which hold on to its R."""
        self._drop(
            [k for k, kept in self._kept.items() if kept is columns or getattr(kept, "columns", None) is columns]
        )

    def _drop(self, keys: list[_ColumnsKey | _TileKey]) -> None:
        for key in keys:
            entry = self._kept.pop(key, None)
            if entry is not None:
                self._kept_bytes -= entry.nbytes
