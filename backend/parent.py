"""How a child process learns that its supervisor is gone, however that died.

The idea: the supervisor keeps the write end of a pipe for its whole life and lets each child inherit the read end
(its number in TILEWEAVE_PARENT_FD). The kernel closes the write end when the supervisor dies, kill -9 included, and
the child's watching thread sees the end of file at once. A thread and not a task: it works while the event loop is
busy. Foreign binaries (Valkey) cannot watch a pipe; on Linux the kernel sends them a signal
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PARENT_FD = "TILEWEAVE_PARENT_FD"
GRACE_S = 2.0  # how long a child may take to end in order before it ends at once
ORPHAN_EXIT = 70
_PR_SET_PDEATHSIG = 1


def watch_parent(grace_s: float = GRACE_S) -> None:
    """Starts the watch, if this process was started by a supervisor. At the supervisor's death the process gets
    SIGTERM (its own handler may end it in order), and `grace_s` seconds later it ends whatever it is doing."""
    number = os.environ.get(PARENT_FD)
    if number is None:
        return
    threading.Thread(target=_wait_for_end, args=(int(number), grace_s), name="watch-parent", daemon=True).start()


def _wait_for_end(fd: int, grace_s: float) -> None:
    try:
        while os.read(fd, 1):
            pass  # nothing is ever written; only the end matters
    except OSError:
        pass  # the pipe is not ours to read: treat it as gone
    timer = threading.Timer(grace_s, os._exit, args=(ORPHAN_EXIT,))
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent(parent_pid: int, death_signal: signal.Signals) -> Callable[[], None] | None:
    """For `preexec_fn`: the started process gets `death_signal` when its parent (`parent_pid`) dies. None where the
    system cannot do that (macOS): a stale server is then found and stopped at the next start, and a script ends when
    its coordinator's socket closes."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: the child only makes the call

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died between fork and prctl
            os._exit(ORPHAN_EXIT)

    return ask
