"""What Megatron-LM reduces over all stages in every iteration although each of them knows it already."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from evenpipe.megatron.supported import MEGATRON_CORE, since
from evenpipe.megatron.training_supported import training_patch
from evenpipe.upstream import Patch

__all__ = ["known_to_all"]

_AND = "logical_and_across_model_parallel_group"
_MAX = "reduce_max_stat_across_model_parallel_group"
_TIMER = "megatron.core.timers:Timer.elapsed"


def known_to_all() -> list[Patch]:
    """Patches under which these are answered at once, by the rank itself.

    The finished step's success, norm and count of zeros come out of one exchange, and the learning rate is the same on
    all stages (a stage without parameters is refused).
    """
    answered = [
        training_patch(
            name,
            f"{module}:{function}",
            _answering,
            f"2bw: {what} of the finished step is known on all stages, and asking joins them",
        )
        # The functions moved when utils became a package.
        for module in ("megatron.training.utils", "megatron.training.utils.common_utils")
        for name, function, what in (("success", _AND, "success"), ("norm", _MAX, "the norm"))
    ]
    timer = Patch(
        "interval",
        (_TIMER,),
        MEGATRON_CORE,
        since({"0.14": "(self, reset=True, barrier=False)"}),
        _without_barrier,
        "2bw: two barriers and a wait for the whole device at each log interval join all stages",
    )
    log = Patch(
        "timers",
        ("megatron.core.timers:Timers.log",),
        MEGATRON_CORE,
        since({"0.14": "(self, names, rank=None, normalizer=1.0, reset=True, barrier=False)"}),
        _of_running_timers,
        "2bw: older releases gather the times of timers that were never started from all ranks, at each log interval",
    )
    return [*answered, timer, log]


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def known(value: Any, group: Any = None) -> Any:
        return value

    return known


def _of_running_timers(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Any, names: Sequence[str], *args: Any, **kwargs: Any) -> None:
        started = [name for name in names if name in self._timers]
        if started:
            original(self, started, *args, **kwargs)

    return log


def _without_barrier(original: Callable[..., float]) -> Callable[..., float]:
    """A reading that is not to be aligned over ranks is Megatron's own."""

    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        if not (barrier and self._started):
            return original(self, reset, barrier)
        import torch

        if torch.cuda.is_available():
            # Not the device: what this stage waits to receive is on streams of its own.
            torch.cuda.current_stream().synchronize()
        now = time.time()
        passed = now - self._start_time
        self._start_time = now
        self._active_time += passed
        total = self._elapsed + passed
        self._elapsed = 0.0 if reset else total
        return float(total)

    return elapsed
