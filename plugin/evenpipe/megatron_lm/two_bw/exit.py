"""2BW in Megatron-LM's scripts: whether to stop, asked of all ranks without a wait."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from evenpipe.megatron_lm.hooks import with_values

if TYPE_CHECKING:
    from evenpipe.runtime.exchange import Exchange
    from evenpipe.two_bw.stream import TwoBW

__all__ = ["ExitDecision"]


class ExitDecision:
    """Stands around Megatron's `checkpoint_and_decide_exit`, which gathers two answers from all ranks, and waits.

    Each iteration, every rank gives whether it got a signal (`--exit-signal-handler`) or its time is up
    (`--exit-duration-in-mins`), and takes what the others gave an iteration before. Only when one of them would stop
    does Megatron see its flag: it gathers again, saves, and stops, one iteration later than it would have. `ending` is
    called before the training loop is left. Answers travel with the figures of the steps of `two_bw`.
    """

    def __init__(self, args: Namespace, two_bw: TwoBW, ending: Callable[[], None]) -> None:
        self._args = args
        self._two_bw = two_bw
        self._ending = ending
        self._handles_signal = bool(args.exit_signal_handler)
        self._minutes: float | None = args.exit_duration_in_mins
        self._exchange: Exchange | None = None

    def made_by(self, decide: Callable[[], bool]) -> bool:
        """Return the answer of `decide`, Megatron's function; all ranks call it in every iteration."""
        signalled, expired = self._gathered()
        if signalled or expired:
            self._ending()
        with with_values(
            self._args,
            exit_signal_handler=self._handles_signal and signalled,
            exit_duration_in_mins=self._minutes if expired else None,
        ):
            stops = decide()
        if stops:
            self._ending()
        return stops

    def with_users_flags(self) -> AbstractContextManager[Any]:
        """Inside, Megatron's arguments are the user's: what is saved of them is."""
        return with_values(self._args, exit_signal_handler=self._handles_signal, exit_duration_in_mins=self._minutes)

    def _gathered(self) -> tuple[bool, bool]:
        """Return whether any rank had got a signal an iteration before, and whether any rank's time was up."""
        if not self._handles_signal and not self._minutes:
            return False, False
        if self._exchange is None:
            import torch

            from evenpipe.runtime.exchange import Exchange

            self._exchange = Exchange.among_all(2, torch.device(torch.cuda.current_device()))
        self._two_bw.start_waiting(self)
        rows = self._exchange.finish() if self._exchange.under_way else []
        answers = [self._got_signal(), self._time_is_up()]
        self._two_bw.start_with_figures(self, functools.partial(self._exchange.start, answers))
        return any(row[0] for row in rows), any(row[1] for row in rows)

    def _got_signal(self) -> bool:
        if not self._handles_signal:
            return False
        from megatron.training import get_signal_handler

        return bool(get_signal_handler()._signal_received)

    def _time_is_up(self) -> bool:
        if not self._minutes:
            return False
        from megatron.training import training

        return bool((time.time() - training._TRAIN_START_TIME) / 60.0 > self._minutes)
