"""1F1B, which is PipeDream-Flush (PipeDream-2BW §3.2): stage s holds min(p − s, m) micro-batches."""

from __future__ import annotations

from evenpipe.schedule.actions import Action
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, units

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    """Stage s runs p − s − 1 forwards ahead of its backwards."""
    every = units(size.micro_batches)
    return [list(alternate(every, every, size.stages - s - 1)) for s in range(size.stages)]


SPEC = Spec(
    name="1f1b",
    summary="one forward and one backward in turn",
    order=_order,
    bound=lambda size: min(size.stages, size.micro_batches),
    balanced=lambda size: -(-(size.stages + 2) // 2),  # μ_opt (BPipe §3.3)
    chunked="interleaved",
    live=lambda size: [min(size.stages - s, size.micro_batches) for s in range(size.stages)],
    drawings=(
        Drawing(
            Size(4, 8),
            """
            F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
            F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
            F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
            """,
            "PipeDream-2BW Figure 3(b)",
        ),
        Drawing(Size(4, 2), "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1"),
    ),
)
