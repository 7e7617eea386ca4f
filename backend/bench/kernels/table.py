"""The kernel bench's figures for people: one table a question."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the rows, the peers, the named figures and what holds."""
    console.print(f"{figures['cpu']}, {figures['browser']}")
    for engine in dict.fromkeys(row["engine"] for row in figures["rows"]):
        console.print(_rows(engine, [row for row in figures["rows"] if row["engine"] == engine]))
    console.print(_peers(figures))
    console.print(_errors(figures))
    console.print(_targets(figures))
    for name, reason in figures["failed"].items():
        console.print(f"{name} could not be measured: {reason}")
    for one in figures["refused"]:
        console.print(f"{one['name']} at {one['n']} was refused: {one['reason']}")


def _rows(engine: str, rows: list[dict[str, Any]]) -> Table:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratios"]))
    title = f"{engine}: and how many times as fast as each peer" if peers else engine
    table = Table("kernel", "n", "GFLOP/s", "of peak", title=title)
    for peer in peers:
        table.add_column(peer, overflow="fold")
    for row in rows:
        figures = [_number(row["gflops"]), _number(row["peak_fraction"])]
        table.add_row(row["kernel"], str(row["n"]), *figures, *(_number(row["ratios"].get(peer)) for peer in peers))
    return table


def _peers(figures: dict[str, Any]) -> Table:
    table = Table("peer", "n", "GFLOP/s", title="Peers, and what one core can do at most")
    for row in figures["peers"]:
        table.add_row(row["peer"], str(row["n"]), _number(row["gflops"]))
    for name, gflops in figures["peaks"].items():
        table.add_row(name, "peak", _number(gflops))
    return table


def _errors(figures: dict[str, Any]) -> Table:
    table = Table("n", "plain", "fast", title="Largest error over largest element, relaxed WASM")
    for row in figures["error_growth"]:
        table.add_row(str(row["n"]), _number(row["plain"]), _number(row["fast"]))
    return table


def _targets(figures: dict[str, Any]) -> Table:
    table = Table("target", "wanted", "measured", "", title="What it must show")
    for name, one in figures["holds"].items():
        table.add_row(name, one["wanted"], _number(one["measured"]), "holds" if one["holds"] else "does not hold")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.2f}"
