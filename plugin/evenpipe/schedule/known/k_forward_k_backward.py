"""kFkB (Ada-Grouper): 1F1B over groups of k micro-batches; stage s holds min(k(p − s), m) micro-batches."""

from __future__ import annotations

from evenpipe.schedule.actions import Action
from evenpipe.schedule.spec import Drawing, Size, Spec, alternate, units

__all__ = ["SPEC"]


def _order(size: Size) -> list[list[Action]]:
    """k copies of 1F1B, of which copy j has the micro-batches j, j + k, j + 2k .., cross-merged (Ada-Grouper §5.4).

    Where k does not divide m, the last copies have one micro-batch fewer, so that the last group is the small one.
    k = 1 is 1F1B, k ≥ m is GPipe (§4.1).
    """
    k, m = size.group_size, size.micro_batches
    members = [range(first, min(first + k, m)) for first in range(0, m, k)]
    groups = units(len(members))
    return [
        [
            Action(of_group.kind, micro_batch)
            for of_group in alternate(groups, groups, size.stages - s - 1)
            for micro_batch in members[of_group.micro_batch]
        ]
        for s in range(size.stages)
    ]


def _settled(size: Size) -> int:
    """Three 1F1B warm-ups, after which evictions only repeat, and the last group, which may be a smaller one."""
    k, m, enough = size.group_size, size.micro_batches, size.group_size * (3 * size.stages + 2)
    return m if m <= enough else enough + (m - enough) % k


SPEC = Spec(
    name="kfkb",
    summary="1f1b with groups of micro-batches in a row",
    order=_order,
    bound=lambda size: min(size.group_size * size.stages, size.micro_batches),
    # As BPipe §3.3 derives it: stage s holds k(p − s) and its partner k(s + 1), so half of k(p + 1) each, and of a
    # micro-batch that is under way both hold one. k = 1 gives 1F1B's.
    balanced=lambda size: -(-(size.group_size * (size.stages + 1) + 1) // 2),
    needs=frozenset(["groups"]),
    live=lambda size: [min(size.group_size * (size.stages - s), size.micro_batches) for s in range(size.stages)],
    settled=_settled,
    drawings=(
        Drawing(
            Size(3, 7, group_size=2),
            """
            F0 F1 F2 F3 F4 F5 B0 B1 F6 B2 B3 B4 B5 B6
            F0 F1 F2 F3 B0 B1 F4 F5 B2 B3 F6 B4 B5 B6
            F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5 F6 B6
            """,
            "Ada-Grouper Figure 2, here with a smaller group at the end",
        ),
    ),
)
