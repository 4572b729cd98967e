"""What each stage held, moved and waited for, where DeepSpeed tells of an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evenpipe.deepspeed.saying import say
from evenpipe.report.log_line import log_line, scalars
from evenpipe.runtime.figures import StageFigures, per_stage

if TYPE_CHECKING:
    from evenpipe.deepspeed.engine import EvenPipeEngine

__all__ = ["told_of"]


@contextmanager
def told_of(engine: EvenPipeEngine) -> Iterator[None]:
    """Within it `engine` trains a batch; if DeepSpeed prints a line after it, another one follows.

    Only these batches are measured, and have all ranks tell each other: the others pay nothing. Under 2bw, whose stages
    are not to wait for each other, nothing is told.
    """
    every = engine.steps_per_print()
    if not every or (engine.global_steps + 1) % every or engine.evenpipe.streams:
        yield
        return
    executor = engine.executor
    measured, executor.measure = executor.measure, True
    if not measured:
        executor.counter.reset_peak()
    try:
        yield
    finally:
        executor.measure = measured
    stages = per_stage(StageFigures.of(executor), engine.stage_id, engine.num_stages, executor.device)
    if engine.global_rank == 0:
        say(log_line(engine.global_steps, stages))
        if engine.monitor.enabled:
            engine.monitor.write_events([(tag, value, engine.global_samples) for tag, value in scalars(stages).items()])
