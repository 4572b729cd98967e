"""Why families of runs are not taken: one line each, beside the best run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from evenpipe.planner.search.families import Family, families_of
from evenpipe.planner.search.front import Planned
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import Found
from evenpipe.schedule import find

__all__ = ["brief", "rejected"]

_GIB: Final = 2**30
_FLASH: Final = "flash attention saves no scores, so there is less to make room for: arXiv 2401.02088"
_SAME: Final = 1e-3  # relative: no faster and no slower


def rejected(question: Question, found: Found) -> Iterator[tuple[str, str]]:
    """Every family that the best run is not of, and why; of schedules also what no size divides for.

    Placement and layout are asked about where the best run has them: it has replicas, or stages.
    """
    best = found.plans[0]
    own = set(families_of(best.run, True))
    kinds = {"schedule", "bpipe", "recompute", *(family.kind for family in own)}
    for family in _weighed(question):
        there_is = family.kind == "schedule" or family in found.least_bytes
        if there_is and family.kind in kinds and family not in own:
            yield family.value, _reason(question, found, family, best)


def _weighed(question: Question) -> Iterator[Family]:
    alone = ["no pipeline"] * ("1f1b" in question.schedules and question.stages in (None, 1))
    yield from (Family("schedule", name) for name in (*question.schedules, *alone))
    if question.bpipe:
        yield from (Family("bpipe", one) for one in ("with BPipe", "without BPipe"))
    yield from (Family("recompute", f"recompute {scope}") for scope in question.engine.scopes)
    yield from (Family("placement", f"{one} in one node") for one in question.engine.placements)
    if question.engine.uneven:
        yield from (Family("layout", one) for one in ("even stages", "uneven stages"))


def _reason(question: Question, found: Found, family: Family, best: Planned) -> str:
    refused = ""
    if family.kind == "schedule" and family.value != "no pipeline":
        refused = question.refused(find(family.value))
    one = found.best.get(family)
    if one is None:
        return "; ".join([*([refused] if refused else []), _unfit(question, found, family)])
    faster = best.ms_to_loss / one.ms_to_loss - 1
    if refused:
        to_loss = f" to the same loss ({one.run.iterations - 1:.0%} more iterations)" if one.run.delayed else ""
        way = "faster" if faster > 0 else "slower"
        return f"{refused}; it would be about {abs(faster):.1%} {way}{to_loss}: {brief(one)}"
    if family.value == "with BPipe" and faster >= -_SAME:
        free = (best.most_bytes - one.most_bytes) / _GIB
        return f"not needed, the best run fits without it: it would leave {max(0.0, free):.1f} GiB more, no time less"
    if faster >= -_SAME:
        return f"no faster ({max(0.0, -faster):.2%} slower): {brief(one)}"
    why = f"{-faster:.1%} slower at best, {_why(one, best)}: {brief(one)}"
    if family.value != "with BPipe":
        return why
    flash = f" ({_FLASH})" if one.run.attention == "flash" else ""
    return f"does not pay{flash}, {why}"


def _unfit(question: Question, found: Found, family: Family) -> str:
    """Nothing of the family fits, or there is nothing of it."""
    least = found.least_bytes.get(family)
    if least is None:
        return "no size divides model, batch and cluster"
    have = question.cluster.device.memory_gib
    if least > have * _GIB:
        return f"does not fit, its smallest run needs at least {least / _GIB:.1f} GiB of {have:.1f}"
    return f"does not fit into {have:.1f} GiB at any size"


def _why(one: Planned, best: Planned) -> str:
    """Return the largest part of the difference: further iterations, computing itself, or waiting."""
    computing = one.computing_ms - best.computing_ms
    waiting = (one.ms_a_sample - one.computing_ms) - (best.ms_a_sample - best.computing_ms)
    if one.ms_a_sample < best.ms_a_sample:
        return f"its late gradients need {one.run.iterations - 1:.0%} more iterations for the same loss"
    if waiting > computing:
        return f"stages idle for {one.bubble:.1%} of the time instead of {best.bubble:.1%}"
    return f"computes {one.computing_ms / best.computing_ms - 1:.1%} longer"


def brief(one: Planned) -> str:
    """The run in few words."""
    run = one.run
    words = [f"t={run.tensor} p={run.stages} d={run.data}"]
    words += [f"c={run.context}"] * (run.context > 1)
    words += [f"e={run.expert}"] * (run.expert > 1) + [f"v={run.chunks}"] * (run.chunks > 1)
    words += [f"b={run.micro_batch}", run.schedule]
    words += [f"k={run.group_size}"] * (run.group_size > 1) + ["BPipe"] * run.bpipe
    words += [f"recompute {run.recompute}"] + ["uneven"] * (run.layout is not None)
    words += ["pipeline in one node"] * (run.placement == "pipeline")
    return " ".join(words)
