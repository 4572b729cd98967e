"""The order of forwards and backwards that Transformer Engine's CUDA graphs are captured in.

Graphs of different micro-batches share their input buffers, and share them by the order they were captured in: in
another one a forward overwrites what a backward still needs. Megatron's own order is what it captures
(``TECudaGraphHelper._get_cuda_graph_input_data`` in ``megatron.core.transformer.cuda_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.schedules import get_schedule_table

from evenpipe.megatron.unsupported import Refusal, captures, overlaps
from evenpipe.schedule import COMPUTE, Action, Schedule, Unit
from evenpipe.schedule.spec import alternate

__all__ = ["captured_row", "refused_capture"]


def captured_row(stages: int, stage: int, micro_batches: int, chunks: int | None, group: int) -> list[Action]:
    """Return the compute of one stage in the order that Megatron captures; `chunks` is None without virtual stages.

    `group` is its microbatch_group_size_per_vp_stage.
    """
    table = get_schedule_table(micro_batches, chunks or 1, group)
    ahead = stages - stage - 1 if chunks is None else 2 * (stages - stage - 1) + (chunks - 1) * group
    forwards = [Unit(micro_batch, chunk) for micro_batch, chunk in table]
    backwards = [Unit(micro_batch, (chunks or 1) - 1 - chunk) for micro_batch, chunk in table]
    return list(alternate(forwards, backwards, min(ahead, len(table))))


def refused_capture(settings: Any, schedule: Callable[[], Schedule]) -> Refusal | None:
    """Return why graphs that Transformer Engine captures cannot be replayed in a schedule's order; None where they can.

    `settings` are Megatron's, of the model or arguments; `schedule` is asked only where they capture.
    """
    if (setting := captures(settings)) is None:
        return None
    named = setting, "" if setting == "external_cuda_graph" else settings.cuda_graph_impl
    if overlaps(settings):
        return Refusal(
            *named,
            "with --overlap-moe-expert-parallel-comm captures layers of a forward and of a backward in turn, where "
            "EvenPipe does so only if neither waits for the other",
            "turn one of them off",
        )
    order = schedule()
    chunks = order.chunks if order.chunks > 1 else None
    group = getattr(settings, "microbatch_group_size_per_vp_stage", None) or order.stages
    for stage, row in enumerate(order.actions):
        compute = [action for action in row if action.kind in COMPUTE]
        captured = captured_row(order.stages, stage, order.micro_batches, chunks, group)
        at = next((n for n, (ours, theirs) in enumerate(zip(compute, captured, strict=False)) if ours != theirs), None)
        if at is not None:
            return Refusal(
                *named,
                f"captures Megatron's order, in which action {at + 1} of stage {stage} is {captured[at]}, not "
                f"{compute[at]}: in another order forwards overwrite inputs that backwards still need",
                "turn it off, or use 1f1b",
            )
    return None
