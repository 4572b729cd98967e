"""A plan as ``evenpipe partition`` shows it: a table, and the same model cut in other ways beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console

from evenpipe.cli.shown import print_prose, print_table
from evenpipe.partition.dawnpiper.balance import Balance
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan, Stage, plan_of
from evenpipe.recipes.surroundings import in_megatron
from evenpipe.report.figures import Division

if TYPE_CHECKING:
    from evenpipe.layouts.given import CheckedLayout

__all__ = ["division", "print_check", "print_front", "print_plan", "ways_to_cut"]

_GIB: Final = 2**30
_MIB: Final = 2**20
_MADE_BY: Final = {
    "exact": "exact search",
    "bipar": "BiPar",
    "quiet": "exact search, cuts that send little",
    "layers": "layers",
    "moved": "boundaries moved by the simulator",
}


def print_plan(console: Console, plan: Plan) -> None:
    """Print a row for each part of the model: its nodes, ms a micro-batch, peak, and nodes that run again or swap."""
    short = " cut short" if plan.binary_whole is False else ""
    binary = "" if plan.binary_ms is None else f", BiPar{short} {plan.binary_ms:,.4g} ms"
    caption = (
        f"slowest {plan.max_stage_ms:,.4g} ms, optimum {plan.optimum_ms:,.4g} ms{binary} "
        f"({plan.nodes_tried} cuts tried); searched {plan.search_ms:,.0f} ms"
    )
    columns = ("#", "nodes", "forward", "backward", "extra", "GiB", "before", "again", "swap")
    rows = []
    for part in plan.stages:
        row = (
            str(part.stage),
            f"{part.first_node}–{part.last_node}",
            *(f"{ms:.4g}" for ms in (part.forward_ms, part.backward_ms, part.extra_ms)),
            *(f"{nbytes / _GIB:.4g}" for nbytes in (part.peak_bytes, part.peak_bytes_before)),
            *(str(len(nodes) or "") for nodes in (part.recompute, part.swap)),
        )
        rows.append(row)
    print_table(console, columns, rows, caption, optional=("extra", "before"))


def _whole(ms: float) -> str:
    """Return milliseconds with four digits at least, and never as a power of ten."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def print_check(console: Console, found: CheckedLayout) -> None:
    """Print a row for each stage, under a layout that is checked and under the best, and what is wrong."""
    each, best = found.estimate.stages, found.best_estimate.stages
    rows = [
        (
            str(number),
            *(
                cell
                for one in pair
                for cell in (f"{one.forward_ms + one.backward_ms:,.4g}", f"{one.bytes.total / _GIB:.4g}")
            ),
        )
        for number, pair in enumerate(zip(each, best, strict=True))
    ]
    caption = (
        f"slowest: stage {found.slowest}; an iteration {_whole(found.estimate.iteration_ms)} ms, by the best layout "
        f"{_whole(found.best_estimate.iteration_ms)} ms"
    )
    print_table(console, ("stage", "ms", "peak GiB", "best: ms", "peak GiB"), rows, caption)
    console.print(f"best: '{found.best}'", soft_wrap=True)
    problem = in_megatron(found.problem) if found.problem else ""
    print_prose(console, problem or f"fits, {max(0.0, found.slower):.1%} slower than the best")


def print_front(console: Console, plan: Plan) -> None:
    """Print a row for each way to cut of which none else has both a shorter longest part and fewer bytes to send."""
    layers = "" if plan.layers_batch_ms is None else f", with the fastest layer cuts {plan.layers_batch_ms:,.4g} ms"
    made_by = "" if plan.algorithm is None else f" ({_MADE_BY[plan.algorithm]})"
    chosen = "" if plan.batch_ms is None else f"chosen{made_by}: {plan.batch_ms:,.4g} ms a batch{layers}"
    columns = ("cut by", "slowest ms", "MiB sent", "batch ms")
    rows = []
    for one in plan.front:
        sent = f"{one.sent_bytes / _MIB:,.4g}"
        rows.append((_MADE_BY[one.algorithm], f"{one.max_stage_ms:,.4g}", sent, f"{one.batch_ms:,.4g}"))
    print_table(console, columns, rows, chosen)


def ways_to_cut(profile: Profile, plan: Plan) -> list[Division]:
    """The plan beside its model cut evenly by layers, for equal times, and for equal peaks, with nothing optimised."""
    problem = Problem.of(profile, plan.workload, plan.stage_count, plan.limit_bytes)
    balance = Balance(problem)
    others = {
        "uniform": balance.layer_cuts(),
        "compute-balanced": balance.compute_cuts(),
        "memory-balanced": balance.memory_cuts(),
    }
    cut = [(name, plan_of(problem, cuts, problem.fits_of(cuts), plan.workload)) for name, cuts in others.items()]
    return [division(name, other.stages) for name, other in [*cut, ("chosen", plan)]]


def division(title: str, parts: Sequence[Stage]) -> Division:
    """Stages with several parts take the time of all of them; their peaks are of the whole stage."""
    of_stage = [[part for part in parts if part.stage == stage] for stage in sorted({part.stage for part in parts})]
    forward_ms, backward_ms, extra_ms = (
        [sum(getattr(part, time) for part in mine) for mine in of_stage]
        for time in ("forward_ms", "backward_ms", "extra_ms")
    )
    peaks, before = ([getattr(mine[0], peak) for mine in of_stage] for peak in ("peak_bytes", "peak_bytes_before"))
    return Division(title, forward_ms, backward_ms, extra_ms, peaks, before)
