"""CPU time of a running process (Linux): user plus system, finished threads included."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU used so far (Linux: clock ticks of /proc/pid/stat). Raises FileNotFoundError for a dead one."""
    # The command name may hold spaces and parentheses; fields count from after its last closing one.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
