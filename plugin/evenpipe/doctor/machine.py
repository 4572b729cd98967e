"""Check this machine: shared memory, files, clock, the port where ranks meet, and the folder of checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shlex
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen

__all__ = ["clock", "open_files", "ports", "shared_memory", "storage"]

_SHM: Final = Path("/dev/shm")
_GIB: Final = 1 << 30
#: What torch, Megatron's data and checkpoint writers keep open, whatever the size of the job.
_FILES_ANYHOW: Final = 1024
#: Sockets of a rank of gloo to each other one, in the job's groups together; the store's host has one for each, too.
_FILES_A_RANK: Final = 4
_STA_UNSYNC: Final = 0x0040
#: torchrun's and DeepSpeed's.
_DEFAULT_PORT: Final = 29500
_CHOOSE: Final = "choose another: torchrun --master-port N, deepspeed --master_port N, MASTER_PORT=N"
_NETWORK: Final = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs"),
    *("ceph", "9p", "wekafs", "glusterfs", "afs", "fuse."),
)
_GB: Final = 1e9
_LEAST_FREE_BYTES: Final = 10 * _GB


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
    """Yield whether the kernel holds its wall clock to be synchronised."""
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


def ports(environ: Mapping[str, str], in_job: bool) -> Iterator[Finding]:
    """Yield whether rank 0 can listen at MASTER_PORT (29500, if it is not set), and MASTER_ADDR leads somewhere.

    ``in_job``: the job's own store listens there by now.
    """
    given = environ.get("MASTER_PORT", str(_DEFAULT_PORT))
    if not given.isdecimal() or not 0 < int(given) < 1 << 16:
        yield problem("ports", f"MASTER_PORT={given} is no port", "use a number from 1024 to 65535")
        return
    port, name = int(given), "MASTER_PORT" if "MASTER_PORT" in environ else "port"
    host = environ.get("MASTER_ADDR")
    if host is not None:
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError as error:
            yield problem(
                "ports", f"MASTER_ADDR={host} has no address: {error.strerror}", "name a host that every node knows"
            )
            return
    if in_job:
        yield fine("ports", f"{name} {port}: this job's ranks meet there")
        return
    if host is not None and not any(_is_ours(address) for address in addresses):
        yield unseen("ports", f"MASTER_ADDR={host} is another machine, where {name} {port} has to be free")
        return
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield problem("ports", f"{name} {port} is taken{_by_whom(port)}", _CHOOSE)
        else:
            yield problem("ports", f"{name} {port} cannot be listened at: {os.strerror(error.errno or 0)}", _CHOOSE)
        return
    low, high = _outgoing()
    if low <= port <= high:
        yield noted(
            "ports",
            f"{name} {port} is free, but within {low} to {high}, of which outgoing connections are given one",
            "choose one below, or reserve it: sysctl net.ipv4.ip_local_reserved_ports",
        )
    else:
        yield fine("ports", f"{name} {port} is free")


def _is_ours(address: str) -> bool:
    """Only what an interface of this machine has can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def _outgoing() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 1 << 16, 0
    return int(low), int(high)


def _by_whom(port: int) -> str:
    """Return the process that listens at ``port``, as far as this one may know."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(_leads_to(file) in sockets for file in (folder / "fd").iterdir()):
                return f" by process {folder.name} ({(folder / 'comm').read_text().strip()})"
    return ""


def _leads_to(file: Path) -> str:
    """Empty where it has been closed by now."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def storage(folder: Path | None, several_nodes: bool, checkpoint_bytes: float | None = None) -> Iterator[Finding]:
    """Yield whether checkpoints of ``checkpoint_bytes`` can be written to ``folder``.

    The check writes a file, and renames it over another.
    """
    if folder is None:
        yield unseen("checkpoints", "no --checkpoint-dir DIR is given")
        return
    if not folder.exists():
        made = shlex.join(["mkdir", "-p", "--", str(folder)])
        yield problem("checkpoints", f"{folder} does not exist", f"{made}, where every node sees it")
        return
    if not folder.is_dir():
        yield problem("checkpoints", f"{folder} is no folder", "name one that every node sees")
        return
    try:
        _write_and_rename(folder)
    except OSError as error:
        yield problem(
            "checkpoints",
            f"{folder} cannot be written: {error.strerror or error}",
            "give the job's user the right to write there, or name another folder",
        )
        return
    except _NotAtomic:
        yield problem(
            "checkpoints",
            f"{folder}: a file that was renamed over another does not have its content",
            "name a folder of a file system with atomic renames: an interrupted save would leave half a checkpoint",
        )
        return
    kind, at = _mount_of(folder)
    yield from _space(folder, checkpoint_bytes)
    shared = kind.startswith(_NETWORK)
    where = (
        f"{folder} ({kind or 'unknown file system'}{f' at {at}' if at else ''}): can be written, renames take effect"
    )
    if several_nodes and not shared:
        yield problem(
            "checkpoints",
            f"{where}; it is each node's own, so that no node has a whole checkpoint",
            "name a folder that all nodes share",
        )
    elif kind in ("tmpfs", "ramfs"):
        yield noted("checkpoints", f"{where}; it lies in memory and is gone with the machine", "name one on a disk")
    elif shared:
        yield noted("checkpoints", f"{where}; other nodes see it when their caches let them")
    else:
        yield fine("checkpoints", where)


class _NotAtomic(Exception):
    """A rename did not put the new content in the old one's place."""


def _write_and_rename(folder: Path) -> None:
    name = f".evenpipe-doctor-{uuid.uuid4().hex}"
    old, new = folder / f"{name}.old", folder / f"{name}.new"
    try:
        old.write_bytes(b"old")
        with new.open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, old)
        if old.read_bytes() != b"new" or new.exists():
            raise _NotAtomic
    finally:
        for path in (old, new):
            path.unlink(missing_ok=True)


def _space(folder: Path, checkpoint_bytes: float | None) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    need = _LEAST_FREE_BYTES if checkpoint_bytes is None else 2 * checkpoint_bytes
    what = "for any model" if checkpoint_bytes is None else "two checkpoints: one is kept while the next is written"
    said = f"{folder} has {free / _GB:,.1f} GB free"
    if free < need:
        yield problem(
            "free space", f"{said}, less than {need / _GB:,.1f} GB ({what})", "free some, or name another folder"
        )
    else:
        yield fine("free space", f"{said}; {need / _GB:,.1f} GB are asked for ({what})")


def _mount_of(folder: Path) -> tuple[str, str]:
    """Type and mount point of the file system that ``folder`` lies on, as Linux tells; empty where it does not."""
    path, found = os.path.realpath(folder), ("", "")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, at, kind, *_ = line.split()
        at = at.encode().decode("unicode_escape")
        if len(at) >= len(found[1]) and (path == at or path.startswith(f"{at.rstrip('/')}/")):
            found = kind, at
    return found
