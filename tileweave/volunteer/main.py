"""The command `tileweave volunteer`: options in, one status line, an exit code.

Imported before NumPy is, so that BLAS can be told to use one thread: several tiles at a time use the cores better than
one tile over all of them, and leave the event loop its share.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tileweave.volunteer.emulate import Emulation, parse_emulation
from tileweave.volunteer.errors import OptionError, VolunteerEnded
from tileweave.volunteer.identity import identity_path

if TYPE_CHECKING:
    from tileweave.volunteer.net import VolunteerOptions, VolunteerState

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
LINE_EVERY_S = 0.25  # on a terminal


def volunteer_main(
    url: str,
    name: str = "",
    workers: int | None = None,
    emulate: str | None = None,
    identity: str | None = None,
    as_json: bool = False,
) -> int:
    """Volunteers until SIGINT or SIGTERM; returns the exit code: 0 when asked to stop, 1 when it had to, 2 for bad
    options.

    `workers`: tiles at a time, by default one for each CPU this process may use. `identity`: the file to keep the
    device's identity in, "none" for a throw-away device. Progress goes to standard error; with `as_json` the last state
    goes to standard output.
    """
    for variable in BLAS_THREADS:
        os.environ.setdefault(variable, "1")
    from tileweave.volunteer.net import VolunteerOptions

    line = _StatusLine(sys.stderr)
    try:
        path = None if identity == "none" else Path(identity) if identity else identity_path(url)
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options = VolunteerOptions(
            url=url,
            name=name,
            workers=workers or count,
            emulation=parse_emulation(emulate) if emulate else Emulation(),
            identity=path,
        )
        asyncio.run(_until_signal(options, line))
    except (OptionError, VolunteerEnded) as error:
        line.close()
        print(f"tileweave volunteer: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    line.close()
    if as_json and line.state is not None:
        print(json.dumps(asdict(line.state)))
    return 0


async def _until_signal(options: VolunteerOptions, line: _StatusLine) -> None:
    from tileweave.volunteer.net import run_volunteer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await run_volunteer(options, line, stop=stop)


class _StatusLine:
    """One line, rewritten in place on a terminal; elsewhere printed when the phase changes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._printed_s = 0.0
        self._printed_phase = ""
        self.state: VolunteerState | None = None

    def __call__(self, state: VolunteerState) -> None:
        self.state = state
        now_s = time.monotonic()
        changed = state.phase != self._printed_phase
        if not changed and not (self._terminal and now_s - self._printed_s >= LINE_EVERY_S):
            return
        self._printed_s, self._printed_phase = now_s, state.phase
        if self._terminal:
            self._rewrite(state)
        else:
            print(status_text(state), file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the line as it is and goes to the next."""
        if self._terminal and self.state is not None:
            self._rewrite(self.state)
            print(file=self._stream, flush=True)

    def _rewrite(self, state: VolunteerState) -> None:
        # A line as wide as the terminal would wrap, and then every rewrite would scroll.
        width = max(os.get_terminal_size(self._stream.fileno()).columns - 1, 1)
        print(f"\r{status_text(state)[:width]:<{width}}", end="", file=self._stream, flush=True)


def status_text(state: VolunteerState) -> str:
    """The status line."""
    accepted = state.verdicts.get("accepted", 0)
    rejected = state.verdicts.get("rejected", 0)
    parts = [
        f"{state.name or 'new device'} ({state.kernel}): {state.phase}" + (f", {state.detail}" if state.detail else ""),
        f"{state.waiting + state.computing} in hand",
        f"{accepted} accepted" + (f", {rejected} rejected" if rejected else ""),
        f"{state.flop / 1e9:,.1f} GFLOP",
        f"{state.bytes_down / 2**20:,.1f} MiB down, {state.bytes_up / 2**20:,.1f} MiB up",
    ]
    if state.note:
        parts.append(state.note)
    return " | ".join(parts)
