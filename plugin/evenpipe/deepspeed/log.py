"""Lines for people: what each stage held, moved and waited for, where DeepSpeed logs an iteration, and any other."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from evenpipe.report.log_line import log_line, scalars
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.two_bw.log import StepLog

__all__ = ["log_batch", "print_line", "print_once", "step_log"]


def print_once(line: str) -> None:
    """Print `line` once for the job, from rank 0."""
    if dist.get_rank() == 0:
        print_line(line)


def print_line(line: str) -> None:
    """Print `line` from this rank, on standard error; DeepSpeed's logger hides what is no warning."""
    print(f"evenpipe: {line}", file=sys.stderr, flush=True)


def step_log(engine: Any) -> StepLog:
    """Return what follows the log of an EvenPipeEngine under 2bw, whose stages are not to wait for each other."""
    known: Any = weakref.proxy(engine)  # which has this
    return StepLog(
        engine.two_bw,
        engine.global_steps,
        print_once,
        print_line,
        lambda iteration, stages: _show(known, iteration, stages),
        means=False,
        resumed=False,
    )


@contextmanager
def log_batch(engine: Any) -> Iterator[None]:
    """Within it `engine`, an EvenPipeEngine, trains a batch; if DeepSpeed prints a line after it, another one follows.

    Only these batches are measured, and have all ranks tell each other: the others pay nothing. Under 2bw the figures
    travel in the background, and follow the next batch.
    """
    every, steps, executor = engine.steps_per_print(), engine.step_log, engine.executor
    if not every:
        yield
        return
    # A batch of 2bw begins in the one before.
    begun = [engine.global_steps + 1] if steps is None else [engine.global_steps + 1, engine.global_steps + 2]
    wanted = any(number % every == 0 for number in begun)
    if wanted and not executor.measure:
        executor.counter.reset_peak()
    with executor.measuring(wanted):
        yield
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


def _show(engine: Any, iteration: int, stages: Sequence[StageFigures]) -> None:
    if engine.global_rank != 0:
        return
    print_line(log_line(iteration, stages))
    # Once, when what the first batch warms up is warm.
    if engine.truth is not None and iteration > 1:
        truth, engine.truth = engine.truth, None
        for line in truth.lines(stages):
            print_line(line)
    if engine.monitor.enabled:
        samples = engine.global_samples - (engine.global_steps - iteration) * engine.train_batch_size()
        engine.monitor.write_events([(tag, value, samples) for tag, value in scalars(stages).items()])
