"""Drains engines before the processes of a job part: a stage may still have to send what another one waits for."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from evenpipe.upstream import ANY, Distribution, Patch, PatchSet

__all__ = ["drain_at_the_end", "ending_patches", "let_go"]

_SYMBOL: Final = "torch.distributed.distributed_c10d:destroy_process_group"


def drain_at_the_end(engine: Any) -> None:
    """Keep a TwoBWEngine: drain it when process groups are destroyed, or break it off when the process ends before.

    Draining is for all ranks together; breaking off settles with stages that may be elsewhere by now. An accepting
    stage is done with a batch before its partner, whose activations it holds. Nothing is done in a process that fails,
    which ends at once.
    """
    ending_patches().apply_once()
    _engines().append(engine)


def let_go(engine: Any) -> None:
    """Forget `engine`, which needs no draining any more."""
    if engine in _engines():
        _engines().remove(engine)


def ending_patches() -> PatchSet:
    """Return the patch that `drain_at_the_end` applies, for the rest of the process."""
    destroy = Patch(
        name="ending",
        targets=(_SYMBOL, "torch.distributed:destroy_process_group"),
        distribution=Distribution("torch"),
        versions={ANY: "(group=None)"},
        replacement=_draining_first,
        reason="a framework may have no end of a run, and a script's last call is often this one",
        rebinds=True,
    )
    return PatchSet("2bw-ending", [destroy])


def _engines() -> list[Any]:
    return getattr(dist.destroy_process_group, "engines", [])


def _draining_first(original: Callable[..., None]) -> Callable[..., None]:
    engines: list[Any] = []

    def end(each: Callable[[Any], None]) -> None:
        failed = _has_failed()
        while engines:
            engine = engines.pop()
            if not failed:
                each(engine)

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            end(lambda engine: engine.drain())
        original(group)

    destroy_process_group.engines = engines  # type: ignore[attr-defined]
    # Other ranks may be busy with something else: what takes all of them is left out, and nobody sees it any more.
    atexit.register(end, lambda engine: engine.break_off())
    return destroy_process_group


def _has_failed() -> bool:
    """Return whether an error is on its way, or has ended the script; the end of the data is none."""
    error = sys.exc_info()[0]
    on_its_way = error is not None and not issubclass(error, StopIteration)
    return on_its_way or getattr(sys, "last_value", None) is not None
