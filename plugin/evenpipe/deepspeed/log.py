"""What each stage held, moved and waited for, where DeepSpeed logs an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evenpipe.deepspeed.saying import say, tell
from evenpipe.delayed import StepLog
from evenpipe.report.log_line import log_line, scalars
from evenpipe.runtime.figures import StageFigures, per_stage

if TYPE_CHECKING:
    from evenpipe.deepspeed.engine import EvenPipeEngine

__all__ = ["log_batch", "step_log"]


def step_log(engine: EvenPipeEngine) -> StepLog:
    """What follows the log of an `engine` under 2bw, whose stages are not to wait for each other."""
    known: Any = weakref.proxy(engine)  # which has this
    return StepLog(tell, say, lambda iteration, stages: _show(known, iteration, stages), means=False)


@contextmanager
def log_batch(engine: EvenPipeEngine) -> Iterator[None]:
    """Within it `engine` trains a batch; if DeepSpeed prints a line after it, another one follows.

    Only these batches are measured, and have all ranks tell each other: the others pay nothing. Under 2bw the figures
    travel in the background, and follow the next batch.
    """
    every, steps, executor = engine.steps_per_print(), engine.step_log, engine.executor
    if not every:
        yield
        return
    # A batch of 2bw begins in the one before.
    begun = [engine.global_steps + 1] if steps is None else [engine.global_steps + 1, engine.global_steps + 2]
    measured, wanted = executor.measure, any(number % every == 0 for number in begun)
    if wanted and not measured:
        executor.measure = True
        executor.counter.reset_peak()
    try:
        yield
    finally:
        executor.measure = measured
    iteration, stage, stages = engine.global_steps, engine.stage_id, engine.num_stages
    if steps is not None:
        steps.iteration_ended(iteration, stage)
    if iteration % every:
        return
    figures = StageFigures.of(executor)
    if steps is None:
        _show(engine, iteration, per_stage(figures, stage, stages, executor.device))
    else:
        steps.gather(iteration, figures, stage, stages, executor.device)
        steps.logged(iteration)


def _show(engine: EvenPipeEngine, iteration: int, stages: Sequence[StageFigures]) -> None:
    if engine.global_rank != 0:
        return
    say(log_line(iteration, stages))
    if engine.monitor.enabled:
        samples = engine.global_samples - (engine.global_steps - iteration) * engine.train_batch_size()
        engine.monitor.write_events([(tag, value, samples) for tag, value in scalars(stages).items()])
