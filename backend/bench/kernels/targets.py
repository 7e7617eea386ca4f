"""What the kernels are meant to reach, and whether one run of the bench reached it.

Each target has a name, a bound and the figure it is about. A figure that was not measured does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CPU_SIZES = (512, 1024)


def holds(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the target's name: {wanted, measured, holds}."""
    found = {}
    for name, sign, bound, measured in _targets(figures):
        reached = measured is not None and (measured >= bound if sign == ">=" else measured <= bound)
        found[name] = {"wanted": f"{sign} {bound:g}", "measured": measured, "holds": reached}
    return found


def _targets(figures: dict[str, Any]) -> Iterator[tuple[str, str, float, float | None]]:
    for n in CPU_SIZES:
        relaxed, strict = _row(figures, "wasm", "relaxed", n), _row(figures, "wasm", "strict", n)
        yield f"relaxed_over_tfjs_wasm_{n}", ">=", 1.6, relaxed["ratios"].get("tfjs-wasm")
        yield f"relaxed_over_onnxruntime_web_wasm_{n}", ">=", 1.85, relaxed["ratios"].get("onnxruntime-web-wasm")
        yield f"relaxed_peak_fraction_{n}", ">=", 0.92, relaxed["peak_fraction"]
        yield f"strict_over_tfjs_wasm_{n}", ">=", 1.3, strict["ratios"].get("tfjs-wasm")
    for n, peak in ((1024, 1.05), (2048, 1.12)):
        fast = _row(figures, "wasm", "fast", n)
        yield f"fast_peak_fraction_{n}", ">=", peak, fast["peak_fraction"]
        yield f"fast_over_tfjs_wasm_{n}", ">=", 1.8, fast["ratios"].get("tfjs-wasm")
    yield "two_workers_over_one", ">=", 1.85, figures["two_workers_over_one"]
    yield "bf16_over_f32", ">=", 0.97, figures["bf16_over_f32"]
    yield "int8_over_f32", ">=", 1.5, figures["int8_over_f32"]
    for n in CPU_SIZES:
        webgpu = _row(figures, "webgpu", None, n)
        for peer, bound in (("jax-js-webgpu", 1.3), ("tfjs-webgpu", 4.5), ("onnxruntime-web-webgpu", 4.5)):
            yield f"webgpu_over_{peer.replace('-', '_')}_{n}", ">=", bound, webgpu["ratios"].get(peer)
    yield "webgpu_error_1024", "<=", 2e-6, figures["webgpu_error"].get("1024")
    yield "pyodide_over_strict", ">=", 0.85, figures["pyodide_over_strict"]
    yield "pyodide_join_s", "<=", 4.0, figures["pyodide_join_s"]


def _row(figures: dict[str, Any], engine: str, kernel: str | None, n: int) -> dict[str, Any]:
    """The row of that engine, kernel (None: any) and size; one without figures where there is none."""
    found = [
        row
        for row in figures["rows"]
        if (row["engine"], row["n"]) == (engine, n) and (kernel is None or row["kernel"] == kernel)
    ]
    return found[0] if found else {"ratios": {}, "peak_fraction": None}
