"""The machine itself: shared memory, open files, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen

__all__ = ["clock", "open_files", "shared_memory"]

_SHM: Final = Path("/dev/shm")
_GIB: Final = 1 << 30
#: What torch, Megatron's data and checkpoint writers keep open, whatever the size of the job.
_FILES_ANYHOW: Final = 1024
#: Sockets of a rank of gloo to each other one, in the job's groups together; the store's host has one for each, too.
_FILES_A_RANK: Final = 4
_STA_UNSYNC: Final = 0x0040


def shared_memory() -> Iterator[Finding]:
    """/dev/shm: NCCL's transport within a node and data loaders' batches lie there."""
    if not _SHM.is_dir():
        yield unseen("shared memory", f"this system has no {_SHM}")
        return
    found = os.statvfs(_SHM)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    said = f"{_SHM} has {free / _GIB:.2f} of {total / _GIB:.2f} GiB free"
    if total < _GIB:
        yield problem(
            "shared memory",
            f"{said}; NCCL and data loaders need 1 GiB and more (NCCL's documentation, troubleshooting)",
            "start the container with --shm-size=16g (Kubernetes: an emptyDir with medium Memory at /dev/shm)",
        )
    elif free < _GIB // 2:
        yield problem("shared memory", said, f"see what is left over in {_SHM}, and remove what no process uses")
    else:
        yield fine("shared memory", said)


def open_files(ranks: int) -> Iterator[Finding]:
    """The limit on open files, against what a rank of a job of that many needs; locked memory, for InfiniBand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _FILES_ANYHOW + _FILES_A_RANK * (ranks - 1)
    if soft != resource.RLIM_INFINITY and soft < need:
        raised = "ulimit -n" if hard == resource.RLIM_INFINITY or hard >= need else "the hard limit and ulimit -n"
        yield problem(
            "open files",
            f"ulimit -n is {soft}; a rank among {ranks} opens up to {need} (estimated: {_FILES_ANYHOW} for libraries, "
            f"data and checkpoint writers, {_FILES_A_RANK} sockets to each other rank)",
            f"raise {raised} to {max(need, 65536)} where ranks are started",
        )
    else:
        yield fine("open files", f"ulimit -n is {'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        yield problem(
            "locked memory",
            f"ulimit -l is {locked >> 10} KiB, and InfiniBand registers buffers of NCCL (its documentation)",
            "start the container with --ulimit memlock=-1, or raise it in limits.conf",
        )


class _Timex(ctypes.Structure):
    """The head of Linux' ``struct timex``, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Iterator[Finding]:
    """Whether the kernel holds its wall clock to be synchronised, and whether the monotonic one is."""
    if not time.get_clock_info("monotonic").monotonic:
        yield problem(
            "clock", "time.monotonic can go back here: timeouts and traces would be wrong", "change the system"
        )
    if not sys.platform.startswith("linux"):
        yield unseen("clock", "whether it is synchronised can only be asked of Linux")
        return
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        yield unseen("clock", f"the kernel does not tell whether it is synchronised: {os.strerror(ctypes.get_errno())}")
    elif state.status & _STA_UNSYNC:
        yield noted(
            "clock",
            "the kernel does not hold its wall clock to be synchronised: logs of nodes may not fit together",
            "run chrony or another NTP client on the host",
        )
    else:
        yield fine("clock", f"synchronised, to {state.maxerror / 1e3:.1f} ms at worst")
