"""The planner's nouns: a GEMM, a rectangle of it, a device, and a plan. Numbers only, no I/O.

A GEMM here is `batch` independent products C_i[m,n] = A_i[m,k] B_i[k,n]. A rectangle is a run of batch entries by a run
of rows by a run of columns, always with the full k. It spans more than one batch entry only where it spans all rows and
columns of each, so that its rows of A, and of B^T, are one contiguous run of bytes: a panel.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gemm:
    """Shape of the work; `element_bytes` is the wire's (4 for float32)."""

    batch: int
    m: int
    n: int
    k: int
    element_bytes: int = 4

    @property
    def flop(self) -> int:
        """Floating-point operations, 2mnk for each batch entry."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def whole(self) -> Rect:
        """The rectangle that is all of C."""
        return Rect(0, self.batch, 0, self.m, 0, self.n)


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Batch entries [b0, b1), rows [m0, m1), columns [n0, n1) of C."""

    b0: int
    b1: int
    m0: int
    m1: int
    n0: int
    n1: int

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

    def flop(self, k: int) -> int:
        """2 batch m n k, exact."""
        return 2 * self.elements * k


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
    share's tiles unless memory asks for smaller ones."""

    panel_bytes_max: int = 64 << 20
    result_bytes_max: int = 64 << 20
    tiles_per_share_max: int = 1024
    lease_seconds: float = 0.002
    server_seconds: float = 0.0005
