"""The port at which the ranks of a job find each other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from evenpipe.doctor.finding import Finding, fine, noted, problem, unseen

__all__ = ["DEFAULT_PORT", "ports"]

DEFAULT_PORT = 29500
"""torchrun's and DeepSpeed's."""

_CHOOSE = "choose another: torchrun --master-port N, deepspeed --master_port N, MASTER_PORT=N"


def ports(environ: Mapping[str, str], in_job: bool) -> Iterator[Finding]:
    """Whether rank 0 can listen at MASTER_PORT (29500, if it is not set), and MASTER_ADDR leads somewhere.

    ``in_job``: the job's own store listens there by now.
    """
    given = environ.get("MASTER_PORT", str(DEFAULT_PORT))
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
    """The process that listens at ``port``, as far as this one may know."""
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
