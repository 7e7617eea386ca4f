"""The planner's nouns: a GEMM, a rectangle of it, a device, and a plan. Numbers only, no I/O.

A GEMM here is `batch` independent products C_i[m,n] = A_i[m,k] B_i[k,n], or one that is the sum of `parts` of them.
A rectangle is a run of batch entries by a run of rows by a run of columns of C, with the full k or a run of each part's
k, which makes a partial sum. It spans more than one batch entry only where it spans all rows and columns of each, with
the full k, so that its rows of A, and of B^T, are one contiguous run of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Gemm:
    """Shape of the work. `parts` products of length k are added up (1: an ordinary GEMM; more only where batch is 1).
    An operand lies by lines (rows of A, columns of B, k along each) or `by_k` (a row for each k). `element_bytes` of
    the operands and `result_bytes` of C are the wire's. `b_uses`: products that B is expected to be part of."""

    batch: int
    m: int
    n: int
    k: int
    element_bytes: float = 4
    result_bytes: int = 4
    parts: int = 1
    a_by_k: bool = False
    b_by_k: bool = False
    b_uses: int = 1

    @property
    def flop(self) -> int:
        """Floating-point operations, 2mnk for each batch entry and part."""
        return 2 * self.batch * self.m * self.n * self.depth

    @property
    def depth(self) -> int:
        """Terms of each element's sum."""
        return self.k * self.parts

    @property
    def whole(self) -> Rect:
        """The rectangle that is all of C."""
        return Rect(0, self.batch, 0, self.m, 0, self.n)


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Batch entries [b0, b1), rows [m0, m1), columns [n0, n1) of C; of each part's k [k0, k1), or all where k1 is 0."""

    b0: int
    b1: int
    m0: int
    m1: int
    n0: int
    n1: int
    k0: int = 0
    k1: int = 0

    @property
    def batch(self) -> int:
        """Batch entries."""
        return self.b1 - self.b0

    @property
    def m(self) -> int:
        """Rows in each batch entry."""
        return self.m1 - self.m0

    @property
    def n(self) -> int:
        """Columns in each batch entry."""
        return self.n1 - self.n0

    @property
    def elements(self) -> int:
        """Elements of C."""
        return self.batch * self.m * self.n

    @property
    def partial(self) -> bool:
        """Is it only a part of the sums?"""
        return self.k1 > 0

    def k_run(self, gemm: Gemm) -> tuple[int, int]:
        """[k0, k1) within each part."""
        return (self.k0, self.k1) if self.partial else (0, gemm.k)

    def flop(self, gemm: Gemm) -> int:
        """2 batch m n times the length of its sums, exact."""
        k0, k1 = self.k_run(gemm)
        return 2 * self.elements * (k1 - k0) * gemm.parts


class Grain(NamedTuple):
    """How the stored rows [first, last) of an operand are cut into panels: at multiples of `step`."""

    first: int
    last: int
    step: int


class Grains(NamedTuple):
    """Of both operands; None: a tile's panel is exactly what that tile needs."""

    a: Grain | None = None
    b: Grain | None = None


EXACT = Grains()


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner knows of a device: FLOP/s of its kernel, bytes it may hold (panels and results), link rates in
    bytes per second, and round trip in seconds."""

    device: str
    flops: float
    memory_bytes: int
    down_bps: float
    up_bps: float
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Share:
    """A device's part of C, cut into tiles in the order in which they should go out (few new panel bytes first)."""

    device: str
    tiles: tuple[Rect, ...]
    predicted_s: float
    grains: Grains = EXACT


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares that cover C exactly once, the predicted makespan, and for each device left out the reason."""

    shares: tuple[Share, ...]
    predicted_s: float
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a tile may be: the wire's and the settings' ceilings, and the cost of one lease whatever its size.
    `lease_seconds` passes from a lease's sending to the next in addition to transfers and kernel; `server_seconds` of
    it are the server's own work, which all devices of the fleet wait for in turn. `tiles_per_share_max` bounds a
    share's tiles unless memory asks for smaller ones. `server_bps`: what the server's own link is taken to carry, where
    two plans differ in bytes."""

    panel_bytes_max: int = 64 << 20
    result_bytes_max: int = 64 << 20
    tiles_per_share_max: int = 1024
    lease_seconds: float = 0.002
    server_seconds: float = 0.0005
    server_bps: float = 1.25e8
    terms_max: int = 256
