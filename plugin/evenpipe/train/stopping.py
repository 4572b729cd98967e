"""SIGTERM, SIGINT and SIGHUP as a wish to stop after the iteration under way, on which all processes of a run agree."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from evenpipe.runtime.exchange import Exchange

__all__ = ["STOPPING", "Agreement", "StopRequest"]

#: What ends a run politely: a scheduler, Ctrl-C, a terminal that is closed.
STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS: Final = 0.1


class StopRequest:
    """From now on signals of STOPPING do not end this process, the first only sets `made`; needs the main thread.

    The agent also sends SIGTERM to the processes that are left when one has failed, which then may wait for it in a
    collective operation for ever. So once asked, a thread ends this process as soon as `peer_gone()`.
    """

    def __init__(self, peer_gone: Callable[[], bool]) -> None:
        self._made = threading.Event()
        self.number = signal.SIGTERM
        self._peer_gone = peer_gone
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The descriptor is written to even while the main thread waits in foreign code, where no handler runs.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="evenpipe-stop", daemon=True).start()

    @property
    def made(self) -> bool:
        """Whether one has come, which then is `number`."""
        return self._made.is_set()

    def _watch(self) -> None:
        while not (come := [number for number in os.read(self._reader, 16) if number in STOPPING]):
            pass
        self.number = signal.Signals(come[0])
        self._made.set()
        while not self._peer_gone():
            time.sleep(_POLL_SECONDS)
        os._exit(1)


class Agreement:
    """All processes learn that one of them has been asked to stop, at the same iteration, and none waits for it.

    What a process says after an iteration is read by all after the next one: by then everybody has said it.
    """

    def __init__(self, request: StopRequest, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange

    def to_stop(self) -> bool:
        """Called by all processes after each iteration: whether this one is the last."""
        agreed = self.end()
        if not agreed:
            self._exchange.start([float(self._request.made)])
        return agreed

    def end(self) -> bool:
        """Leave nothing under way; whether somebody had been asked to stop before the last iteration but one ended."""
        return self._exchange.under_way and any(asked for (asked,) in self._exchange.finish())
