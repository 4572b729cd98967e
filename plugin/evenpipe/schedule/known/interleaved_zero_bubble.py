"""Interleaved ZB-H1: v model chunks a stage, backwards in two halves (as torch.distributed.pipelining has it)."""

from __future__ import annotations

from evenpipe.schedule.actions import Action
from evenpipe.schedule.known.interleaved import check, group, units_in_groups
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, halved

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    """Stage s runs p − s − 1 forwards ahead beside those of v − 1 chunks; weight gradients follow s later.

    Megatron's order of whole backwards runs twice as many ahead, since a backward takes two forwards.
    """
    forwards, backwards = units_in_groups(size)
    ahead = (size.chunks - 1) * group(size)
    return [list(halved(alternate(forwards, backwards, ahead + size.stages - s - 1), s)) for s in range(size.stages)]


def _most(size: Size) -> int:
    return min((size.chunks - 1) * group(size) + size.stages, size.micro_batches * size.chunks)


SPEC = Spec(
    name="interleaved-zb",
    summary="interleaved with backwards in two halves: a third of its bubble, less memory",
    order=_order,
    bound=_most,
    chunks=(2, None),
    needs=frozenset(["chunks", "split"]),
    needs_at_some=frozenset(["groups"]),
    check=check,
    live=lambda size: [_most(size)] * size.stages,
    drawings=(
        Drawing(
            Size(2, 4, 2),
            """
            F0 F1 F0.1 F1.1 D0.1 W0.1 F2 D1.1 W1.1 F3 D0 W0 F2.1 D1 W1 F3.1 D2.1 W2.1 D3.1 W3.1 D2 W2 D3 W3
            F0 F1 F0.1 D0.1 F1.1 D1.1 W0.1 F2 D0 W1.1 F3 D1 W0 F2.1 D2.1 W1 F3.1 D3.1 W2.1 D2 W3.1 D3 W2 W3
            """,
            "as torch.distributed.pipelining's ScheduleInterleavedZeroBubble orders it",
        ),
    ),
)
