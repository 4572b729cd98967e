"""The timeline of an iteration of a DeepSpeed engine."""

from __future__ import annotations

import weakref
from typing import Any

from evenpipe.deepspeed.saying import say
from evenpipe.deepspeed.section import SectionError
from evenpipe.report import check_writable
from evenpipe.tracing.iteration import IterationTrace, TracedJob
from evenpipe.tracing.row import Place

__all__ = ["trace_of"]


def trace_of(engine: Any) -> IterationTrace | None:
    """What the section of `engine` asks for. Raises SectionError on rank 0 where it could not write the file.

    An iteration is the `train_batch` that makes `global_steps` its number.
    """
    path = engine.evenpipe.trace
    if path is None:
        return None
    # The other nodes need not have the folder.
    if engine.global_rank == 0 and (obstacle := check_writable(path)) is not None:
        raise SectionError("trace", f"{path}: {obstacle}")
    # What waits for the end of the process would else keep the engine until then.
    known = weakref.proxy(engine)
    job = TracedJob(engine.global_rank, lambda: known.global_steps + 1, lambda: _place(known), say)
    return IterationTrace(path, engine.evenpipe.trace_iteration, job)


def _place(engine: Any) -> Place:
    data, stage = engine.grid.data_parallel_id, engine.stage_id
    return Place((data, stage), f"stage {stage}, data {data}")
