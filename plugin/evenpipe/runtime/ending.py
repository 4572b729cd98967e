"""The end of a process whose groups are gloo's: its threads come to rest while there is an interpreter."""

from __future__ import annotations

import atexit
import time
from pathlib import Path
from typing import Final

__all__ = ["rest_at_exit"]

_TASKS: Final = Path("/proc/self/task")  # of Linux; elsewhere nothing is waited for
_GLOO: Final = "pt_gloo_runloop"  # what torch calls the threads that carry out gloo's collectives
_LOOK_SECONDS: Final = 0.01
_LONGEST_SECONDS: Final = 5.0


def rest_at_exit() -> None:
    """Have this interpreter wait, when it ends, until gloo's threads are idle.

    Such a thread drops a collective's tensors after whoever waited for the collective has gone on, and needs the GIL
    to do so. Python before 3.14 ends a thread that wants the GIL of an interpreter that is being torn down, here within
    a destructor, and so C++ aborts the process: "terminate called without an active exception", SIGABRT.
    """
    atexit.unregister(_rest)
    atexit.register(_rest)


def _rest() -> None:
    """Return once no thread of gloo's ran while this one slept, which is when they can have the GIL."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    seen: list[list[str]] = []
    while (found := _activity()) and time.monotonic() < deadline:
        if found == seen and all("State:\tS (sleeping)" in thread for thread in found):
            return
        seen = found
        time.sleep(_LOOK_SECONDS)


def _activity() -> list[list[str]]:
    """What the kernel says of each of gloo's threads: its state, and how often it has been switched to."""
    found = []
    for task in sorted(_TASKS.glob("*")):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        if lines[0] == f"Name:\t{_GLOO}":
            found.append([line for line in lines if line.startswith(("Pid:", "State:")) or "ctxt_switches:" in line])
    return found
