"""Check this machine: shared memory, open files, and the folder of checkpoints."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen

__all__ = ["open_files", "shared_memory", "storage"]

_SHM: Final = Path("/dev/shm")
_GIB: Final = 1 << 30
#: What torch, Megatron's data and checkpoint writers keep open, whatever the size of the job.
_FILES_ANYHOW: Final = 1024
#: Sockets of a rank of gloo to each other one, in the job's groups together; the store's host has one for each, too.
_FILES_A_RANK: Final = 4
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


def storage(folder: Path | None, several_nodes: bool, checkpoint_bytes: float | None = None) -> Iterator[Finding]:
    """Yield whether checkpoints of ``checkpoint_bytes`` can be written to ``folder``, into which a file is written."""
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
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".evenpipe-doctor-") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield problem(
            "checkpoints",
            f"{folder} cannot be written: {error.strerror or error}",
            "give the job's user the right to write there, or name another folder",
        )
        return
    kind, at = _mount_of(folder)
    yield from _space(folder, checkpoint_bytes)
    shared = kind.startswith(_NETWORK)
    where = f"{folder} ({kind or 'unknown file system'}{f' at {at}' if at else ''}): can be written"
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
