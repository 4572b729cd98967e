"""Traffic of others: TCP flows between nodes of an emulated network that send as much as they can."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from emulated_network import EmulatedNetwork

__all__ = ["Flow", "Traffic"]

_CHUNK: Final = 65_536
_IDLE_S: Final = 0.01
_PR_SET_PDEATHSIG: Final = 1


class Flow(NamedTuple):
    """From one node to another; sends for `on_s` seconds, is silent for `off_s`, and so on. Never silent: 0."""

    source: int
    target: int
    on_s: float = 1.0
    off_s: float = 0.0


class Traffic:
    """Flows that one process carries while the `with` block runs, as long as they are switched on.

    May be switched by any process that has been forked meanwhile.
    """

    def __init__(self, network: EmulatedNetwork, flows: Sequence[Flow]) -> None:
        self._on = mp.get_context("fork").Value("b", 0)
        ends = [network.connection(flow.source, flow.target) for flow in flows]
        self._ends = [end for pair in ends for end in pair]
        arguments = (self._on, list(zip(flows, ends, strict=True)))
        self._process = mp.get_context("fork").Process(target=_carry, args=arguments, daemon=True)

    def __enter__(self) -> Traffic:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        for end in self._ends:
            end.close()

    def switch(self, on: bool) -> None:
        """Let the flows send, or be silent."""
        self._on.value = on


def _carry(on: Any, flows: list[tuple[Flow, tuple[socket.socket, socket.socket]]]) -> None:
    # It ends when it is told to, and does not outlive the process that started it, however that ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    chunk, read = bytearray(_CHUNK), bytearray(1 << 20)
    targets = {target: None for _, (_, target) in flows}
    for end in [end for _, ends in flows for end in ends]:
        end.setblocking(False)
    while True:
        phase_s = time.monotonic()
        sending = [source for flow, (source, _) in flows if on.value and phase_s % (flow.on_s + flow.off_s) < flow.on_s]
        readable, writable, _ = select.select(list(targets), sending, [], _IDLE_S)
        for target in readable:
            target.recv_into(read)
        for source in writable:
            source.send(chunk)
