"""The timeline of an iteration of a script of Megatron-LM."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron.core import parallel_state

from evenpipe.tracing.iteration import IterationTrace, TracedJob
from evenpipe.tracing.row import Place

__all__ = ["trace_of"]


def trace_of(path: Path, iteration: int | None, args: Namespace) -> IterationTrace:
    """A timeline of `iteration`, as Megatron's log counts. `args` are Megatron's: `rank`, and `curr_iteration`, which
    Megatron sets before each iteration::

        PipelineSchedule(name, bpipe, observer=trace_of(config.trace, config.trace_iteration, args))
    """
    return IterationTrace(path, iteration, TracedJob(args.rank, lambda: args.curr_iteration + 1, _place, _say))


def _place() -> Place:
    data, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    tensor, stage = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    shown = f", context {context}" if parallel_state.get_context_parallel_world_size() > 1 else ""
    return Place((data, context, tensor, stage), f"stage {stage}, data {data}{shown}, tensor {tensor}")


def _say(line: str) -> None:
    print(f" [evenpipe] {line}", flush=True)
