"""2BW: 1F1B without flushes; the step of a batch is finished while the next one runs (PipeDream-2BW §3.1)."""

from __future__ import annotations

from evenpipe.schedule.actions import Action, ScheduleError
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, units

__all__ = ["SPEC"]


def _check(size: Size) -> None:
    if size.micro_batches < size.stages:
        raise ScheduleError(
            f"micro_batches={size.micro_batches}: 2bw needs at least as many as there are stages ({size.stages}), or a "
            f"batch would start before the weights that it needs are there: use {size.stages} or more, or schedule 1f1b"
        )


def _order(size: Size) -> list[list[Action]]:
    """Stage s runs p − s − 1 forwards ahead of its backwards, from one batch into the next (Figure 2)."""
    every = units(size.micro_batches * size.batches)
    return [list(alternate(every, every, size.stages - s - 1)) for s in range(size.stages)]


def _update_follows(size: Size, batch: int) -> int:
    """Return the first micro-batch that stage 0 forwards after its last backward of ``batch``, the last of all stages.

    So once it is there, whatever the update needs of other stages is under way: no stage waits for another. It comes
    before the first forward on the new weights if m ≥ p; on stage 0 it comes before the next batch's first backward.
    """
    return (batch + 1) * size.micro_batches + size.stages - 1


SPEC = Spec(
    name="2bw",
    summary="no flushes: two weight versions, each step finished while the next batch runs",
    order=_order,
    bound=lambda size: min(size.stages, size.micro_batches * size.batches),
    balanced=lambda size: -(-(size.stages + 2) // 2),  # a stream of batches has the compute order of one long 1F1B
    needs=frozenset(["stream"]),
    update_follows=_update_follows,
    check=_check,
    live=lambda size: [min(size.stages - s, size.micro_batches * size.batches) for s in range(size.stages)],
    drawings=(
        Drawing(
            Size(4, 4, batches=3),
            """
            F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 U0 B4 F8 B5 F9 B6 F10 B7 F11 U1 B8 B9 B10 B11 U2
            F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 U0 B5 F8 B6 F9 B7 F10 B8 F11 U1 B9 B10 B11 U2
            F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 U0 B6 F8 B7 F9 B8 F10 B9 F11 U1 B10 B11 U2
            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 U0 B7 F8 B8 F9 B9 F10 B10 F11 U1 B11 U2
            """,
            "PipeDream-2BW Figure 2, with the updates where they are finished",
        ),
    ),
)
