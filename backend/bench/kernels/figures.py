"""From rounds to figures: what the kernel bench's page measured, turned into rows, ratios and top-level numbers.

Contestants of one section and size took turns, so each round is one comparison under the same conditions: a ratio is
the median of the rounds' own ratios, a speed the median of the rounds' speeds. (A ratio of two rows' speeds may
therefore differ a little from the ratio shown.) Speeds are effective: 2 n^3 over the time, whatever a kernel does.
"""

from __future__ import annotations

import statistics
from typing import Any

PEAK = "peak/fused"
ENGINES = ("wasm", "webgpu", "pyodide")  # ours; the rest of a section are peers, peaks and yardsticks


def ratio(measured: dict[str, Any], above: str, below: str) -> float | None:
    """Median over the rounds of one contestant's speed over another's; None where either was not timed."""
    gflops = measured["gflops"]
    if not gflops.get(above) or not gflops.get(below):
        return None
    return float(statistics.median(x / y for x, y in zip(gflops[above], gflops[below], strict=True)))


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a kernel of ours: {engine, kernel, n, gflops, ratios, peak_fraction}."""
    rows = []
    peers = [name for name in measured["gflops"] if name.startswith("peer/")]
    for name, rounds in measured["gflops"].items():
        engine, kernel = name.split("/", 1)
        if engine not in ENGINES:
            continue
        row = {
            "engine": engine,
            "kernel": measured["notes"].get(name, kernel),
            "n": measured["n"],
            "gflops": statistics.median(rounds),
            "ratios": {peer.removeprefix("peer/"): ratio(measured, name, peer) for peer in peers},
            "peak_fraction": ratio(measured, name, PEAK),
        }
        rows.append(row)
    return rows


def peers_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a peer: {peer, n, gflops}."""
    return [
        {"peer": name.removeprefix("peer/"), "n": measured["n"], "gflops": statistics.median(rounds)}
        for name, rounds in measured["gflops"].items()
        if name.startswith("peer/")
    ]


def sizes(page: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """What a section measured, one entry a size; empty where it failed or was not asked for."""
    found: list[dict[str, Any]] = page["sections"].get(section, {}).get("measured", [])
    return found


def figures(page: dict[str, Any], native: dict[str, Any]) -> dict[str, Any]:
    """Everything but `holds`. `native` as native.py prints it."""
    wasm, webgpu, pyodide = (sizes(page, name) for name in ("wasm", "webgpu", "pyodide"))
    measured = [*wasm, *webgpu, *pyodide]
    return {
        "rows": [row for one in measured for row in rows_of(one)] + native["rows"],
        "peers": [row for one in [*wasm, *webgpu] for row in peers_of(one)],
        "peaks": {
            "wasm_fma_128": _pooled(wasm, PEAK),
            "wasm_mul_add_128": _pooled(wasm, "peak/separate"),
            "native_fma_128": native["fma_128"],
        },
        "two_workers_over_one": _pair(page),
        "bf16_over_f32": _least(wasm, "wasm/relaxed-bf16", "wasm/relaxed"),
        "int8_over_f32": _least(wasm, "wasm/relaxed-int8", "wasm/relaxed"),
        "pyodide_over_strict": _least(pyodide, "pyodide/side module", "engine/wasm-strict"),
        "pyodide_join_s": page["sections"].get("pyodide", {}).get("join_s"),
        "error_growth": [
            {"n": one["n"], "plain": one["errors"].get("wasm/relaxed"), "fast": one["errors"].get("wasm/fast")}
            for one in wasm
            if "wasm/fast" in one["errors"]
        ],
        "webgpu_error": {str(one["n"]): one["errors"].get("webgpu/tuned") for one in webgpu},
        "webgpu_with_transfers_gflops": {str(one["n"]): _speed(one, "transfers/tuned") for one in webgpu},
        "refused": [{"n": one["n"], **refused} for one in measured for refused in one["refused"]],
        "failed": {name: one["failed"] for name, one in page["sections"].items() if "failed" in one},
        "adapter": page["sections"].get("webgpu", {}).get("adapter"),
        "browser": page["browser"],
    }


def _speed(measured: dict[str, Any], name: str) -> float | None:
    rounds = measured["gflops"].get(name)
    return statistics.median(rounds) if rounds else None


def _pooled(measured: list[dict[str, Any]], name: str) -> float | None:
    """Median of all rounds of all sizes: a peak has no size."""
    rounds = [speed for one in measured for speed in one["gflops"].get(name, [])]
    return statistics.median(rounds) if rounds else None


def _least(measured: list[dict[str, Any]], above: str, below: str) -> float | None:
    """The ratio at the size where it is least."""
    found = [value for one in measured if (value := ratio(one, above, below)) is not None]
    return min(found, default=None)


def _pair(page: dict[str, Any]) -> float | None:
    rounds = page["sections"].get("pair", {}).get("rounds", [])
    return statistics.median(one["together"] / one["alone"] for one in rounds) if rounds else None
