"""Writes the ladder's table into kernels_wasm/README.md: `python -m backend.bench.kernels.ladder`.

Each rung of kernels_wasm/ladder/ adds one idea to the one before; the table says what each is worth, as times the
speed of tfjs-backend-wasm in the same Chromium, turn by turn. The last rows are the kernel that ships.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.bench.kernels.bench import PAGE_S_MAX, Plan, browser_version, build_yardsticks, cpu_model
from backend.bench.kernels.figures import ratio, sizes
from backend.bench.kernels.page import ROOT, KernelsPage

README = ROOT / "kernels_wasm" / "README.md"
RUNGS = ROOT / "kernels_wasm" / "ladder"
BEGIN, END = "<!-- ladder: made by python -m backend.bench.kernels.ladder -->", "<!-- end of ladder -->"
SHIPPED = {"strict": "what ships where there is no relaxed SIMD", "relaxed": "what ships"}
PEER = "peer/tfjs-wasm"


def measure() -> list[dict[str, Any]]:
    """One entry a size, with every rung and the shipped builds."""
    build_yardsticks()
    plan = Plan(sections=("ladder",), ladder=(512, 1024), rungs=tuple(path.stem for path in rungs()), rounds=9)
    with KernelsPage() as page:
        return sizes(page.measure(asdict(plan), PAGE_S_MAX), "ladder")


def rungs() -> list[Path]:
    """In their order: 1_naive.c, 2_…"""
    return sorted(RUNGS.glob("[0-9]*.c"), key=lambda path: int(path.stem.partition("_")[0]))


def idea(path: Path) -> str:
    """The first sentence of a rung's opening comment."""
    opening = re.search(r"/\*(.*?)\*/", path.read_text(encoding="utf-8"), re.DOTALL)
    if opening is None:
        raise ValueError(f"{path} does not open with a comment that says its idea")
    return re.split(r"[.:;](?:\s|$)", " ".join(opening[1].replace("\n *", " ").split()))[0]


def table(measured: list[dict[str, Any]], ideas: dict[str, str]) -> str:
    """Markdown, a row a kernel; `ideas` by its name in the ladder."""
    heads = [f"{one['n']}: GFLOP/s | times tfjs" for one in measured]
    lines = [f"| kernel | idea | {' | '.join(heads)} |", "|---" * (2 + 2 * len(measured)) + "|"]
    for name, text in ideas.items():
        cells = []
        for one in measured:
            rounds, times = one["gflops"].get(f"ladder/{name}"), ratio(one, f"ladder/{name}", PEER)
            cells += [f"{statistics.median(rounds):.1f}", f"{times:.2f}"] if rounds and times else ["", ""]
        lines.append(f"| {name} | {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rewrite(text: str, made: str) -> str:
    """`text` with `made` between the markers. Raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in {README.name}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Measure and write."""
    ideas = {path.stem: idea(path) for path in rungs()} | SHIPPED
    made = f"{table(measure(), ideas)}\n\nOne run on {cpu_model()}, {browser_version()}, one thread."
    README.write_text(rewrite(README.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
