"""Nodes on one switch, as network namespaces: veth pairs, a bridge, and a rate (HTB) from every node to every other."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["INTERFACE", "EmulatedNetwork", "NetworkError"]

INTERFACE: Final = "eth0"
"""What a node's one interface is called."""

_NAMESPACES: Final = Path("/run/netns")
# The process that made it is part of its name, so that another run finds what a killed one left behind.
_NAME: Final = re.compile(r"evenpipe-(\d+)-\w+")
_CLONE_NEWNET: Final = 0x40000000
# As much of a message as the switch takes at once: small beside a message, large beside what a packet costs the host.
_BURST_BYTES: Final = 16_384
# Flows over one link share it evenly as long as nothing is dropped, each with its window in the queue. Where the queue
# overflows, who gets how much is a matter of chance for seconds. So windows are small, the queue holds many of them,
# and a flow that was silent goes on with the window it had.
_QUEUE_BYTES: Final = 1_048_576
_TCP: Final = (
    "tcp_congestion_control=reno",
    "tcp_slow_start_after_idle=0",
    "tcp_no_metrics_save=1",
    "tcp_rmem=4096 32768 32768",
)


class NetworkError(Exception):
    """The network cannot be made; the message is one line."""


class EmulatedNetwork:
    """`nodes` nodes on a switch; gone, with all that was made for it, when the `with` block is left.

    Nothing is made outside its namespaces, so removing these removes everything. Raises NetworkError without root or
    without `ip` and `tc`, and where they are refused something.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._switch = f"evenpipe-{os.getpid()}-switch"
        self._names = [f"evenpipe-{os.getpid()}-{node}" for node in range(nodes)]

    def __enter__(self) -> EmulatedNetwork:
        _check_rights()
        _sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def set_rate(self, mbit: int) -> None:
        """From every node to every other, in 10^6 bits a second, headers included."""
        for node, name in enumerate(self._names):
            changes = [
                f"class replace dev {INTERFACE} parent 1: classid 1:{10 + other} htb "
                f"rate {mbit}mbit burst {_BURST_BYTES} cburst {_BURST_BYTES} quantum {_BURST_BYTES}"
                for other in self._others(node)
            ]
            _call("tc", "-n", name, "-batch", "-", text="\n".join(changes))

    def enter(self, node: int) -> None:
        """Let the calling thread, and threads and sockets that it makes, live on `node`."""
        _enter(_NAMESPACES / self._names[node])

    @contextmanager
    def on(self, node: int) -> Iterator[None]:
        """Let sockets that are made meanwhile live on `node`."""
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.enter(node)
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{back}"))
            os.close(back)

    def connection(self, source: int, target: int) -> tuple[socket.socket, socket.socket]:
        """The two ends of a TCP connection between two nodes."""
        with self.on(target):
            listener = socket.create_server((_address(target), 0))
        with listener, self.on(source):
            out = socket.create_connection(listener.getsockname())
            return out, listener.accept()[0]

    def _make(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            _call("ip", "netns", "add", name)
            inside = [
                f"link add {INTERFACE} gso_max_size {_BURST_BYTES} type veth peer name port{node} netns {self._switch}",
                f"addr add {_address(node)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            ]
            _call("ip", "-n", name, "-batch", "-", text="\n".join(inside))
            _call("ip", "-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
            _call("ip", "netns", "exec", name, "sysctl", "-qw", *(f"net.ipv4.{setting}" for setting in _TCP))
            _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb")
        self.set_rate(10_000)
        for node, name in enumerate(self._names):
            rules = [
                rule
                for other in self._others(node)
                for rule in (
                    f"qdisc add dev {INTERFACE} parent 1:{10 + other} bfifo limit {_QUEUE_BYTES}",
                    f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 "
                    f"u32 match ip dst {_address(other)}/32 flowid 1:{10 + other}",
                )
            ]
            _call("tc", "-n", name, "-batch", "-", text="\n".join(rules))

    def _remove(self) -> None:
        for name in (self._switch, *self._names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _others(self, node: int) -> list[int]:
        return [other for other in range(self.nodes) if other != node]


def _address(node: int) -> str:
    return f"10.78.0.{node + 1}"


def _check_rights() -> None:
    missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{', '.join(missing)} not found: install iproute2 (and procps) to emulate a network")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces can only be made by root: run it as root, on a machine of your own")


def _sweep() -> None:
    """Remove what runs left that were killed."""
    for name in os.listdir(_NAMESPACES) if _NAMESPACES.is_dir() else ():
        made = _NAME.fullmatch(name)
        if made is not None and not Path("/proc", made[1]).exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _call(*command: str, text: str | None = None) -> None:
    finished = subprocess.run(command, input=text, capture_output=True, text=True)
    if finished.returncode:
        said = finished.stderr.strip().partition("\n")[0]
        raise NetworkError(f"{' '.join(command)}: {said}: the kernel must allow network namespaces, veth and HTB")


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    opened = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(opened, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(opened)
