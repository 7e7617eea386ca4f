"""A script's request for a product, read: what the checks, the assembly and the core need of it, or why it cannot be.

The script is its user's program; nothing it says is believed further than that its own product comes out wrong. So a
region must lie in the job's own files, and what it calls its bytes is a name within the job only: a device that holds
panels of two jobs never takes one for the other.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from backend.coordinator.events import GemmSubmitted, Matrix
from backend.jobs.maps import Maps, RegionError
from backend.jobs.products import Product
from backend.verify.operand import Operand
from tileweave.protocol.elements import Elements, panel_bytes, scales_offset
from tileweave.protocol.messages import DIMENSION_MAX, TERMS_MAX
from tileweave.script.wire import GemmRequest, Part

CONTENT = re.compile(r"[A-Za-z0-9]{1,32}")


class Requested(NamedTuple):
    """A and B to check against, C to write to, and the core's event."""

    a: Operand
    bt: Operand
    c: Product
    event: GemmSubmitted


def read_request(request: GemmRequest, job: str, elements: Elements, operands: Maps, results: Maps) -> Requested:
    """Raises RegionError."""
    batch, m, n, k = request.batch, request.m, request.n, request.k
    if not all(1 <= size <= DIMENSION_MAX for size in (batch, m, n, k)):
        raise RegionError(f"a product of {batch} x {m} x {n} x {k}, expected sizes from 1 to {DIMENSION_MAX:,}")
    count = len(request.a)
    if count != len(request.b) or not 1 <= count <= TERMS_MAX or (count > 1 and batch > 1):
        raise RegionError(
            f"{count} parts of A, {len(request.b)} of B, batch {batch}; expected as many of each, 1 to {TERMS_MAX}, "
            "and batch 1 where there are several"
        )
    a, a_parts = _side(request.a, batch, m, k, request.a_by_k, job, elements, operands)
    bt, b_parts = _side(request.b, batch, n, k, request.b_by_k, job, elements, operands)
    c = results.floats(request.c, batch * m * n).reshape(batch, m, n)
    event = GemmSubmitted(
        gemm=request.id, step=request.step, batch=batch, m=m, n=n, k=k, a=a_parts, b=b_parts, a_by_k=request.a_by_k,
        b_by_k=request.b_by_k, b_uses=max(1, request.b_uses), elements=elements,
    )  # fmt: skip
    return Requested(a, bt, Product(c), event)


def _side(
    parts: list[Part], batch: int, lines: int, k: int, by_k: bool, job: str, elements: Elements, operands: Maps
) -> tuple[Operand, tuple[Matrix, ...]]:
    rows, columns = (batch * k, lines) if by_k else (batch * lines, k)
    size = panel_bytes(rows, columns, elements.panels)
    data: list[memoryview] = []
    matrices: list[Matrix] = []
    for part in parts:
        if not CONTENT.fullmatch(part.content):
            raise RegionError(f"got the content {part.content[:64]!r}, expected 1 to 32 letters and digits")
        if not 0 <= part.stamp_offset < part.region.offset:
            raise RegionError(f"a stamp at {part.stamp_offset}, expected it before the region at {part.region.offset}")
        data.append(operands.bytes(part.region, size))
        path, offset = part.region.path, part.region.offset
        scales = offset + scales_offset(rows, columns) if elements.panels == "i8" else 0
        name = f"{job}.{part.content}"
        matrices.append(Matrix(name, path, offset, rows, columns, part.stamp_offset, part.stamp, scales))
    return Operand(data, batch, lines, k, by_k, elements.panels), tuple(matrices)
