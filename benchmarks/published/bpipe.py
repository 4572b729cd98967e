"""What BPipe's paper measured, beside the planner's estimates of the same runs."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, get_args

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import Estimate
from evenpipe.planner.run import Recompute, Run
from evenpipe.planner.search.question import Engine, Question
from evenpipe.planner.search.search import Planned, search

from .tables import GPUS, Row, estimators, rows, table

__all__ = ["Verdict", "best", "breakdown", "figure_3_gib", "figure_8_gib", "verdicts"]

_SCOPES: Final[tuple[Recompute, ...]] = get_args(Recompute)
_GIB: Final = 2**30


class Verdict(NamedTuple):
    """Whether a run fits: as the paper has it, and GiB of its fullest stage."""

    row: Row
    run: Run
    fits: bool
    gib: float


def verdicts(estimate: estimators) -> list[Verdict]:
    """The rows of Table 7, which ran, and what §4.2's early stopping implies.

    What recomputes less was tried before, and ran out of memory; so did Megatron-LM, where a row is BPipe's.
    """
    found = []
    for row in rows():
        less: list[dict[str, Any]] = [{"recompute": scope} for scope in _SCOPES[: _SCOPES.index(row.recompute)]]
        for changed in [{}, *less, *([{"bpipe": False}] if row.bpipe else [])]:
            shown = estimate(row, **changed)
            found.append(Verdict(row, shown.run, not changed, most_gib(shown)))
    return found


def most_gib(shown: Estimate) -> float:
    """Of the fullest stage."""
    return max(stage.bytes.total for stage in shown.stages) / _GIB


def best(name: str, bpipe: bool) -> Planned:
    """The fastest run of §4.2's whole grid that fits: 1F1B, with BPipe where it does not fit without."""
    gpus, samples = GPUS[name]
    engine = Engine("Megatron-LM v3", frozenset(), placements=("replicas",), uneven=False, context=False)
    question = Question(model(name), cluster(f"{gpus // 8}x8-a100-80gb"), samples, engine, ("1f1b",), bpipe=bpipe)
    return search(question).plans[0]


def breakdown(estimate: estimators) -> list[dict[str, object]]:
    """Tables 3 and 4: relative errors of forward, backward and transfer."""
    found = []
    for one in table("breakdown"):
        row = Row(one["model"], 0, one["t"], one["p"], one["b"], one["recompute"], 0.0, True, one["line"])
        shown = estimate(row)
        stage = shown.stages[1]
        found.append(
            {
                "model": one["model"],
                "recompute": one["recompute"],
                "forward": stage.forward_ms / one["forward"] - 1,
                "backward": stage.backward_ms / one["backward"] - 1,
                "transfer": stage.eviction_ms / one["transfer"] - 1,
            }
        )
    return found


def figure_3_gib(estimate: estimators) -> float:
    """How much more the first stage of 13B has allocated than the last: 37 in the paper."""
    shown = estimate(Row("gpt3-13b", 0, 1, 8, 1, "none", 0.0, False, 173))
    first, last = (allocated_gib(shown, stage) for stage in (0, -1))
    return first - last


def allocated_gib(shown: Estimate, stage: int) -> float:
    """What stays and what is saved: without what comes and goes, and what the allocator keeps."""
    held = shown.stages[stage].bytes
    return (held.weights + held.gradients + held.optimizer + held.activations) / _GIB


def figure_8_gib(estimate: estimators, bpipe: bool) -> float:
    """How far stages of 134B in configuration (4)-mb2 are apart: more than 25 without BPipe, 10 with it."""
    totals = [stage.bytes.total / _GIB for stage in estimate(_FIGURE_8, bpipe=bpipe).stages]
    return max(totals) - min(totals)


_FIGURE_8: Final = Row("gpt3-134b", 4, 4, 12, 2, "selective", 0.0, True, 247)
