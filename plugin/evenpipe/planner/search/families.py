"""Families of runs: all with the same schedule, with BPipe, with a scope of recomputation, and so on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from evenpipe.planner.run import Run

__all__ = ["Family", "families_of"]

Kind = Literal["schedule", "bpipe", "recompute", "placement", "layout"]


class Family(NamedTuple):
    """``value`` says which of its kind, in words."""

    kind: Kind
    value: str


def families_of(run: Run, allowed: bool) -> Iterator[Family]:
    """Those that a run belongs to; one whose schedule a plan may not have counts for that schedule only."""
    yield Family("schedule", run.schedule if run.stages > 1 else "no pipeline")
    if not allowed:
        return
    yield Family("bpipe", "with BPipe" if run.bpipe else "without BPipe")
    yield Family("recompute", f"recompute {run.recompute}")
    if run.stages > 1:
        if run.data > 1 and not run.bpipe:  # whose pairs come before replicas, whatever is asked for
            yield Family("placement", f"{run.placement} in one node")
        yield Family("layout", "even stages" if run.layout is None else "uneven stages")
