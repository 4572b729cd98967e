"""A plan as text, and as what its picture needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evenpipe.planner.run import ITERATIONS_WITH_LATE_GRADIENTS
from evenpipe.planner.search.plan import Plan, PlannedRun, brief
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import Found
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.report.front import Front, Point

__all__ = ["drawn", "show"]

_GIB: Final = 2**30


def show(plan: Plan, command: str) -> None:
    """Print the fastest runs, the ``command`` that says more of the first, and why others are not taken."""
    console = Console()
    console.print(
        f"{plan.model} on {plan.cluster} with {plan.framework}, at most {plan.global_batch_size} samples an iteration",
        style="bold",
        highlight=False,
    )
    late = any(one.iterations_to_same_loss != 1 for one in plan.plans)
    table = Table(
        *("", "t", "p", "d", "b", "schedule", "recompute"),
        *("GiB", "bubble", "MFU", "samples/s", *["to the same loss"] * late),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for number, one in enumerate(plan.plans, 1):
        sizes = (one.tensor_parallel, one.stages, one.data_parallel, one.micro_batch_size)
        row = [
            number,
            *sizes,
            _schedule(one),
            one.recompute,
            f"{one.memory_gib:.1f}",
            f"{one.bubble:.1%}",
            f"{one.mfu:.1%}",
        ]
        to_loss = one.samples_per_second / one.iterations_to_same_loss
        table.add_row(*map(str, row), f"{one.samples_per_second:.2f}", *[f"{to_loss:.2f}"] * late)
    console.print(table)
    if late:
        console.print(
            f"to the same loss: 2bw needs {ITERATIONS_WITH_LATE_GRADIENTS - 1:.0%} more iterations (PipeDream-2BW "
            "§5.1), which the order of plans counts",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"GiB of each stage, of {plan.device_gib:g} (×: so many stages in a row)", style="bold", highlight=False
    )
    for number, one in enumerate(plan.plans, 1):
        console.print(f"  {number}: {_memory(one)}", highlight=False, soft_wrap=True)
    best = plan.plans[0]
    if best.global_batch_size < plan.global_batch_size:
        console.print(
            f"batch: {best.global_batch_size} samples, the most that {best.data_parallel} replicas share alike"
        )
    sure = Uncertainty(**best.uncertainty)  # type: ignore[arg-type]
    console.print(f"an iteration takes {best.iteration_ms:,.0f} ms ({sure}: {sure.meaning})", highlight=False)
    console.print(f"{command} {best.flags}", soft_wrap=True, highlight=False)
    for line in best.warnings:
        console.print(line, highlight=False, soft_wrap=True)
    console.print("not taken", style="bold")
    for one_rejected in plan.rejected:
        console.print(f"  {one_rejected.family}: {one_rejected.reason}", highlight=False, soft_wrap=True)
    runs = plan.runs
    console.print(
        f"{runs['weighed']:,} runs: {runs['too_large']:,} do not fit, {runs['slower']:,} are slower by their bounds, "
        f"{runs['simulated']:,} simulated",
        style="dim",
        highlight=False,
    )


def _schedule(one: PlannedRun) -> str:
    words = [one.schedule] + [f"v={one.chunks}"] * (one.chunks > 1) + [f"k={one.group_size}"] * (one.group_size > 1)
    words += [f"c={one.context_parallel}"] * (one.context_parallel > 1)
    words += [f"e={one.expert_parallel}"] * (one.expert_parallel > 1) + ["BPipe"] * one.bpipe
    words += ["uneven"] * (one.layout is not None)
    return " ".join(words + ["pipeline in one node"] * (one.placement == "pipeline"))


def _memory(one: PlannedRun) -> str:
    """Such as 70.1 69×6 66.2."""
    each = [f"{stage.bytes['total'] / _GIB:.1f}" for stage in one.each_stage]
    return " ".join(_times(gib, len(list(run))) for gib, run in groupby(each))


def _times(gib: str, times: int) -> str:
    return gib if times == 1 else f"{gib}×{times}"


def drawn(plan: Plan, question: Question, found: Found) -> Front:
    """The front, the fastest runs, and the best of each family that fits."""
    front = [Point(one.most_bytes / _GIB, one.estimate.samples_per_second, brief(one)) for one in found.front]
    others: Sequence[Point] = [
        Point(one.most_bytes / _GIB, one.estimate.samples_per_second, family.value)
        for family, one in found.best.items()
        if family.kind == "schedule"
    ]
    title = f"{plan.model} on {plan.cluster}, at most {plan.global_batch_size} samples an iteration"
    return Front(title, question.cluster.device.memory_gib, front, others)
