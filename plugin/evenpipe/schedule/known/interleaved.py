"""Interleaved 1F1B with v model chunks a stage, in Megatron's order."""

from __future__ import annotations

from dataclasses import replace

from evenpipe.schedule.actions import Action, ScheduleError, Unit
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate

__all__ = ["SPEC", "check", "group", "units_in_groups"]


def check(size: Size) -> None:
    """Raise ScheduleError for a size with which interleaved stages would stall."""
    if size.stages < 2:
        raise ScheduleError(f"stages={size.stages}: interleaved needs at least 2 stages")
    p, m, k = size.stages, size.micro_batches, group(size)
    if k < p:
        raise ScheduleError(f"group_size={k}: interleaved needs groups of at least as many as there are stages ({p})")
    if 0 < m % k < p:
        needs = "a multiple of" if k == p else f"groups of {k} micro-batches, and in the last no fewer than"
        raise ScheduleError(f"micro_batches={m}: interleaved needs {needs} the {p} stages, or it would stall")


def group(size: Size) -> int:
    """Return the number of micro-batches that go through a chunk in a row."""
    return size.stages if size.group_size == 1 else size.group_size


def _warmup(size: Size, stage: int, more: int = 0) -> int:
    """Forwards that a stage runs ahead, and some ``more`` (``get_pp_rank_microbatches`` of megatron-core)."""
    ahead = 2 * (size.stages - stage - 1) + (size.chunks - 1) * group(size) + more
    return min(ahead, size.micro_batches * size.chunks)


def units_in_groups(size: Size) -> tuple[list[Unit], list[Unit]]:
    """Return forwards and backwards in the order of every stage (``get_schedule_table`` of megatron-core).

    Micro-batches go through the chunks in groups, of p if not told.
    """
    m, v, k = size.micro_batches, size.chunks, group(size)
    groups = [range(first, min(first + k, m)) for first in range(0, m, k)]
    forwards = [Unit(i, c) for group in groups for c in range(v) for i in group]
    backwards = [Unit(i, c) for group in groups for c in reversed(range(v)) for i in group]
    return forwards, backwards


def _order(size: Size, more: int = 0) -> list[list[Action]]:
    forwards, backwards = units_in_groups(size)
    return [list(alternate(forwards, backwards, _warmup(size, s, more))) for s in range(size.stages)]


def _balanced(size: Size) -> int:
    """Return the bound under BPipe (Appendix A, where k = p)."""
    return size.stages + (size.chunks - 1) * group(size) + 1


def _most(size: Size, more: int = 0) -> list[int]:
    return [min(_warmup(size, s, more) + 1, size.micro_batches * size.chunks) for s in range(size.stages)]


_SPEC = Spec(
    name="interleaved",
    summary="1f1b with several model chunks a stage",
    order=_order,
    bound=lambda size: _most(size)[0],
    balanced=_balanced,
    chunks=(2, None),
    needs=frozenset(["chunks"]),
    needs_at_some=frozenset(["groups"]),
    check=check,
    live=_most,
    drawings=(
        Drawing(
            Size(2, 4, 2),
            "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3\n"
            "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
        ),
    ),
)

#: One forward more ahead, so that every backward has its gradient before the forward that it is computed with begins.
SPEC = replace(
    _SPEC,
    fused_form=replace(
        _SPEC,
        order=lambda size: _order(size, 1),
        bound=lambda size: _most(size, 1)[0],
        balanced=lambda size: _balanced(size) + 1,
        live=lambda size: _most(size, 1),
        drawings=(),
        fused=True,
    ),
)
