"""Interleaved 1F1B with v model chunks a stage, in Megatron's order."""

from __future__ import annotations

from evenpipe.schedule.actions import Action, Unit
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.orders import alternate
from evenpipe.schedule.spec import Drawing, Size, Spec

__all__ = ["SPEC"]


def _check(size: Size) -> None:
    if size.stages < 2:
        raise ScheduleError(f"stages={size.stages}: interleaved needs at least 2 stages")
    if size.micro_batches % size.stages:
        raise ScheduleError(
            f"micro_batches={size.micro_batches}: interleaved needs a multiple of stages={size.stages}, "
            "or the pipeline would stall between groups"
        )


def _warmup(size: Size, stage: int) -> int:
    """Forwards that a stage runs ahead (``get_pp_rank_microbatches`` of megatron-core)."""
    ahead = 2 * (size.stages - stage - 1) + (size.chunks - 1) * size.stages
    return min(ahead, size.micro_batches * size.chunks)


def _order(size: Size) -> list[list[Action]]:
    """Micro-batches go through the chunks in groups of p (``get_schedule_table`` of megatron-core)."""
    p, v = size.stages, size.chunks
    groups = range(0, size.micro_batches, p)
    forwards = [Unit(i, c) for g in groups for c in range(v) for i in range(g, g + p)]
    backwards = [Unit(i, c) for g in groups for c in reversed(range(v)) for i in range(g, g + p)]
    return [list(alternate(forwards, backwards, _warmup(size, s))) for s in range(p)]


SPEC = Spec(
    name="interleaved",
    summary="1f1b with several model chunks a stage",
    order=_order,
    bound=lambda size: min(_warmup(size, 0) + 1, size.micro_batches * size.chunks),
    balanced=lambda size: size.stages * size.chunks + 1,  # BPipe, Appendix A
    chunks=(2, None),
    needs=frozenset(["chunks"]),
    check=_check,
    live=lambda size: [min(_warmup(size, s) + 1, size.micro_batches * size.chunks) for s in range(size.stages)],
    drawings=(
        Drawing(
            Size(2, 4, 2),
            """
            F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3
            F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3
            """,
        ),
    ),
)
