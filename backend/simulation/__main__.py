"""`python -m backend.simulation --seed N --seeds COUNT [--json]`: run scenarios; exit 1 at the first that fails."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from backend.simulation.scenario import Outcome, SimulationError, run_seed

PROGRESS_EVERY = 100


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every scenario held. `argv`: the options, by default the process' own."""
    parser = argparse.ArgumentParser(prog="backend.simulation", description="Seeded simulation of the real core.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args(argv)
    outcomes: list[Outcome] = []
    failure: str | None = None
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            outcomes.append(run_seed(seed))
        except SimulationError as error:
            failure = str(error)
            break
        if len(outcomes) % PROGRESS_EVERY == 0:
            print(f"{len(outcomes)} of {arguments.seeds} seeds", file=sys.stderr)
    totals: dict[str, Any] = {
        "seeds": len(outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "leases_lost": sum(outcome.leases_lost for outcome in outcomes),
        "gemms": sum(outcome.gemms for outcome in outcomes),
        "slowest": asdict(max(outcomes, key=lambda outcome: outcome.seconds)) if outcomes else None,
        "failure": failure,
    }
    if arguments.json:
        print(json.dumps(totals))
    else:
        print(
            f"{totals['seeds']} of {arguments.seeds} seeds from {arguments.seed} on hold: {totals['gemms']:,} GEMMs, "
            f"{totals['events']:,} events, {totals['leases_lost']:,} leases lost"
        )
        if slowest := totals["slowest"]:
            print(f"Slowest: seed {slowest['seed']}, {slowest['seconds']:.1f} s of its virtual clock")
        if failure:
            print(failure, file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
