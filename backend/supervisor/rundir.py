"""The run directory: arenas, upload slots and sockets of work in flight, emptied before and after a server's life.

The idea: nothing in it means anything to a fresh start, and in shared memory an orphan would hold real memory. Left
out: what is written there, which is the script's (arenas) and the gateway's (slots).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sweep(run_dir: Path) -> int:
    """Empties the run directory, made where it is missing. Returns the bytes that orphans held. Raises OSError where
    the directory is another user's (shared memory is open to all)."""
    held = 0
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if run_dir.is_symlink() or run_dir.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{run_dir} is a link or belongs to another user; expected a directory of ours: remove it"
        )
    run_dir.chmod(0o700)
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            held += sum(found.lstat().st_size for found in path.rglob("*") if found.is_file())
            shutil.rmtree(path)
        else:
            held += path.lstat().st_size
            path.unlink()
    return held
