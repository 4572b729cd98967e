"""How much of its host's memory a process can still take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["free_bytes"]

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Return bytes that processes can still take on this host and in this container; None where nothing tells."""
    found = []
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            files = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            # What it can let go of: the cache of files, of which shared memory counts as a part (cgroup-v2.rst).
            found.append(int(most) - int(used) + int(files.get("file", 0)) - int(files.get("shmem", 0)))
    except (OSError, ValueError):
        pass
    return min(found, default=None)
