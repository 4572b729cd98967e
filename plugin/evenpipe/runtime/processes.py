"""This process and its host: free memory, a child that answers a question, an end with gloo's threads at rest."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

__all__ = ["ChildFailed", "answer_of", "free_bytes", "rest_at_exit"]

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Return bytes that processes can still take on this host and in this container; None where nothing tells."""
    limits = []
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        limits.append(int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            files = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            # What it can let go of: the cache of files, of which shared memory counts as a part (cgroup-v2.rst).
            limits.append(int(most) - int(used) + int(files.get("file", 0)) - int(files.get("shmem", 0)))
    except (OSError, ValueError):
        pass
    return min(limits, default=None)


_WITHOUT_GPU: Final = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class ChildFailed(RuntimeError):
    """The child has failed: the message is the last line of its standard error, `details` is all of it."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


def answer_of(module: str, question: object) -> Any:
    """Return the JSON on the last line that `python -m module` prints, with `question` as JSON on its standard input.

    It sees no GPU. Raises ChildFailed if it ends with an error.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps(question),
        env={**os.environ, **_WITHOUT_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildFailed(lines[-1], done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


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
    while (threads := _activity()) and time.monotonic() < deadline:
        if threads == seen and all("State:\tS (sleeping)" in thread for thread in threads):
            return
        seen = threads
        time.sleep(_LOOK_SECONDS)


def _activity() -> list[list[str]]:
    """Return what the kernel knows of each of gloo's threads: its state, and how often it has been switched to."""
    threads = []
    for task in sorted(_TASKS.glob("*")):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        if lines[0] == f"Name:\t{_GLOO}":
            threads.append([line for line in lines if line.startswith(("Pid:", "State:")) or "ctxt_switches:" in line])
    return threads
