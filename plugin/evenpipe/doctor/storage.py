"""The file system that checkpoints go to."""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen

__all__ = ["storage"]

_NETWORK: Final = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "wekafs",
    "glusterfs",
    "afs",
    "fuse.",
)
_GB: Final = 1e9
_LEAST_FREE_BYTES: Final = 10 * _GB


def storage(folder: Path | None, several_nodes: bool, checkpoint_bytes: float | None = None) -> Iterator[Finding]:
    """Whether checkpoints of that size can be written to ``folder``: writes a file, and renames it over another."""
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
