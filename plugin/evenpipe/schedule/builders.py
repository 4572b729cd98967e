"""Compute orders of the known synchronous schedules, one short function each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from evenpipe.schedule.actions import BACKWARD, FORWARD, Action, Unit
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.schedule import Schedule

__all__ = ["BUILDERS", "gpipe", "interleaved", "k_forward_k_backward", "one_forward_one_backward"]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe; PipeDream-2BW Figure 3(a)). Every stage holds m micro-batches."""
    _single_chunk("gpipe", chunks)
    row = tuple(Action(kind, i) for kind in (FORWARD, BACKWARD) for i in range(micro_batches))
    return Schedule("gpipe", stages, micro_batches, 1, micro_batches, (row,) * stages)


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B, which is PipeDream-Flush (PipeDream-2BW §3.2): stage s holds min(p − s, m) micro-batches.

    ::

        p=4, m=8, stage 0   F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4 ..
                  stage 3            F0 B0 F1 B1 F2 B2 F3 B3 ..
    """
    _single_chunk("1f1b", chunks)
    units = [Unit(i) for i in range(micro_batches)]
    rows = tuple(tuple(_alternate(units, units, min(stages - s - 1, micro_batches))) for s in range(stages))
    return Schedule("1f1b", stages, micro_batches, 1, min(stages, micro_batches), rows)


def k_forward_k_backward(stages: int, micro_batches: int, group_size: int) -> Schedule:
    """kFkB: 1F1B over groups of k micro-batches; stage s holds min(k(p − s), m) micro-batches.

    k copies of 1F1B, of which copy j has the micro-batches j, j + k, j + 2k .., cross-merged (Ada-Grouper §5.4). Where
    k does not divide m, the last copies have one micro-batch fewer, so that the last group is the small one. k = 1 is
    1F1B, k ≥ m is GPipe (§4.1).

    ::

        p=2, m=8, k=2, stage 0   F0 F1 F2 F3     B0 B1 F4 F5 B2 B3 F6 F7 ..
                       stage 1         F0 F1 B0 B1 F2 F3 B2 B3 ..
    """
    groups = [range(first, min(first + group_size, micro_batches)) for first in range(0, micro_batches, group_size)]
    units = [Unit(number) for number in range(len(groups))]
    rows = tuple(
        tuple(
            Action(of_group.kind, micro_batch)
            for of_group in _alternate(units, units, min(stages - s - 1, len(groups)))
            for micro_batch in groups[of_group.micro_batch]
        )
        for s in range(stages)
    )
    bound = min(group_size * stages, micro_batches)
    return Schedule("kfkb", stages, micro_batches, 1, bound, rows, group_size=group_size)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with v model chunks a stage, in Megatron's order.

    Micro-batches go through the chunks in groups of p; stage s runs 2(p − s − 1) + (v − 1)p forwards ahead
    (``get_schedule_table`` and ``get_pp_rank_microbatches`` of megatron-core), so that it holds one more than that
    (BPipe, Appendix A).
    """
    if chunks < 2:
        raise ScheduleError(f"chunks={chunks}: interleaved needs at least 2 model chunks a stage")
    if stages < 2:
        raise ScheduleError(f"stages={stages}: interleaved needs at least 2 stages")
    if micro_batches % stages:
        raise ScheduleError(
            f"micro_batches={micro_batches}: interleaved needs a multiple of stages={stages}, "
            "or the pipeline would stall between groups"
        )
    groups = range(0, micro_batches, stages)
    forwards = [Unit(i, c) for g in groups for c in range(chunks) for i in range(g, g + stages)]
    backwards = [Unit(i, c) for g in groups for c in reversed(range(chunks)) for i in range(g, g + stages)]
    warmups = [min(2 * (stages - s - 1) + (chunks - 1) * stages, len(forwards)) for s in range(stages)]
    rows = tuple(tuple(_alternate(forwards, backwards, warmup)) for warmup in warmups)
    peak = min(warmups[0] + 1, len(forwards))
    return Schedule("interleaved", stages, micro_batches, chunks, peak, rows)


def _alternate(forwards: list[Unit], backwards: list[Unit], warmup: int) -> Iterator[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    for unit in forwards[:warmup]:
        yield Action(FORWARD, *unit)
    for ahead, unit in zip(forwards[warmup:], backwards, strict=False):
        yield Action(FORWARD, *ahead)
        yield Action(BACKWARD, *unit)
    for unit in backwards[len(forwards) - warmup :]:
        yield Action(BACKWARD, *unit)


def _single_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ScheduleError(f"chunks={chunks}: {name} has one model chunk a stage; only interleaved has more")


#: Schedule name to ``builder(stages, micro_batches, chunks)``.
BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}
