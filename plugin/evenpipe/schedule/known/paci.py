"""PACI: 1F1B without flushes and with one weight version, which each stage updates by itself (arXiv 2606.07881).

The abstract has the idea: it "bounds forward/backward version drift without weight stashing, prediction, additional
parameter copies, or global synchronization", since local gradient accumulation "limits the number of optimizer updates
crossed by any micro-batch". The rest of the rule is read from the authors' public code (github.com/ItayElam/PACI): a
stage has at most p − s micro-batches in flight, divides each loss by the accumulation factor a, and steps after every
a-th of its own backwards, in place. A backward thus uses the newest weights, on what its forward saved. Here a is the
number m of micro-batches of a batch, so that all stages' steps have the same batches.
"""

from __future__ import annotations

from evenpipe.schedule.known.two_bw import SPEC as TWO_BW
from evenpipe.schedule.spec import Drawing, Size, Spec

__all__ = ["SPEC"]

SPEC = Spec(
    name="paci",
    summary="no flushes, one weight version: each stage steps after its own backwards of a batch",
    order=TWO_BW.order,
    bound=TWO_BW.bound,
    balanced=TWO_BW.balanced,
    needs=frozenset(["stream", "in_place"]),
    live=TWO_BW.live,
    drawings=(
        Drawing(
            Size(4, 4, batches=2),
            """
            F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 U0 F7 B4 B5 B6 B7 U1
            F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 U0 F6 B4 F7 B5 B6 B7 U1
            F0 F1 B0 F2 B1 F3 B2 F4 B3 U0 F5 B4 F6 B5 F7 B6 B7 U1
            F0 B0 F1 B1 F2 B2 F3 B3 U0 F4 B4 F5 B5 F6 B6 F7 B7 U1
            """,
            "the rule of arXiv 2606.07881, drawn here",
        ),
        Drawing(
            Size(4, 2, batches=3),
            """
            F0 F1 F2 F3 B0 F4 B1 U0 F5 B2 B3 U1 B4 B5 U2
            F0 F1 F2 B0 F3 B1 U0 F4 B2 F5 B3 U1 B4 B5 U2
            F0 F1 B0 F2 B1 U0 F3 B2 F4 B3 U1 F5 B4 B5 U2
            F0 B0 F1 B1 U0 F2 B2 F3 B3 U1 F4 B4 F5 B5 U2
            """,
            "the same with a = 2: up to two updates lie between a forward and its backward",
        ),
    ),
)
