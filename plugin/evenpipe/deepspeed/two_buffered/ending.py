"""Drains before the processes of a job part: what one stage still owes another would be lost with it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from evenpipe.upstream import ANY, APPLIED, Distribution, Patch, PatchSet

if TYPE_CHECKING:
    from evenpipe.deepspeed.two_buffered.engine import TwoBufferedEngine

__all__ = ["drain_at_the_end", "ending_patches", "let_go"]

_SYMBOL: Final = "torch.distributed.distributed_c10d:destroy_process_group"
# Of a job whose batches are short. The other stages are in their last batch by now, or never come.
_LEAST_SECONDS: Final = 10.0
_STDERR: Final = 2


def drain_at_the_end(engine: TwoBufferedEngine) -> None:
    """Keep `engine`, and drain it when the process groups are destroyed or the process ends, if all went well.

    An accepting stage is done with a batch before its partner, whose activations it holds.
    """
    patches = ending_patches()
    if any(state != APPLIED for _, state in patches.check()):
        patches.apply()
    _engines().append(engine)


def let_go(engine: TwoBufferedEngine) -> None:
    """Forget `engine`, which needs no draining any more."""
    with contextlib.suppress(ValueError):
        _engines().remove(engine)


def ending_patches() -> PatchSet:
    """What `drain_at_the_end` applies, for the rest of the process."""
    destroy = Patch(
        name="ending",
        targets=(_SYMBOL, "torch.distributed:destroy_process_group"),
        distribution=Distribution("torch"),
        versions={ANY: "(group=None)"},
        replacement=_draining_first,
        reason="DeepSpeed has no end of a run, and a script's last call is often this one",
        rebinds=True,
    )
    return PatchSet("deepspeed-2bw", [destroy])


def _engines() -> list[TwoBufferedEngine]:
    engines: list[TwoBufferedEngine] = dist.destroy_process_group.engines  # type: ignore[attr-defined]
    return engines


def _draining_first(original: Callable[..., None]) -> Callable[..., None]:
    engines: list[TwoBufferedEngine] = []

    def drain() -> None:
        failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        while engines:
            engine = engines.pop()
            if not failed:
                with _at_most(max(_LEAST_SECONDS, 2 * engine.last_batch_s)):
                    engine.drain()

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            drain()
        original(group)

    destroy_process_group.engines = engines  # type: ignore[attr-defined]
    atexit.register(drain)
    return destroy_process_group


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End the process if it takes longer: a peer has ended without a word, such as by `sys.exit(1)`."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    yield
    faulthandler.cancel_dump_traceback_later()
