"""The document ``evenpipe.plan/1``: what to run, what else there is, and why not."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from evenpipe.planner.run import Placement, Recompute, Run
from evenpipe.planner.search.front import Planned
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.rejected import rejected
from evenpipe.planner.search.search import Found

__all__ = ["Plan", "PlannedRun", "Rejected", "StagePlan", "plan_of"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StagePlan(_Part):
    """One GPU of a stage: bytes at its peak by what they are for, and milliseconds of a micro-batch."""

    bytes: dict[str, int]
    forward_ms: float
    backward_ms: float


class PlannedRun(_Part):
    """A run that fits. ``micro_batches``: of a replica, m; ``accumulation``: m / p, the g of PipeDream-2BW §4.3.

    layout: layers of each part of the pipeline, where they are not even. bubble: share of an iteration in which a stage
    does not compute, on the mean. iterations_to_same_loss: times those of a run without late gradients (2bw), by which
    runs are compared; samples_per_second does not count them. flags: those of ``evenpipe estimate``, beside
    model, cluster and framework.
    """

    tensor_parallel: int
    stages: int
    data_parallel: int
    context_parallel: int = 1
    expert_parallel: int
    chunks: int
    micro_batch_size: int
    micro_batches: int
    accumulation: float
    global_batch_size: int
    recompute: Recompute
    schedule: str
    bpipe: bool
    group_size: int
    layout: tuple[int, ...] | None
    placement: Placement
    mfu: float
    bubble: float
    iteration_ms: float
    samples_per_second: float
    iterations_to_same_loss: float = 1.0
    uncertainty: dict[str, float | str | None]
    memory_gib: float
    each_stage: list[StagePlan]
    warnings: list[str]
    flags: str


class Rejected(_Part):
    """A family of runs, and why none of them is the best."""

    family: str
    reason: str


class Plan(_Part):
    """``plans``: the fastest first. ``front``: the Pareto front of memory against speed, the fastest first.

    runs: how many were weighed, left out by bounds on memory and on time, and simulated.
    """

    format: Literal["evenpipe.plan/1"] = "evenpipe.plan/1"
    model: str
    cluster: str
    framework: str
    engine: str
    global_batch_size: int = Field(ge=1)
    device_gib: float
    plans: list[PlannedRun]
    front: list[PlannedRun]
    rejected: list[Rejected]
    runs: dict[str, int]


def plan_of(question: Question, found: Found) -> Plan:
    """What a search has found, as it is written."""
    return Plan(
        model=question.model.name,
        cluster=question.cluster.name,
        framework=question.of.name,
        engine=question.engine.called,
        global_batch_size=question.samples,
        device_gib=question.cluster.device.memory_gib,
        plans=[_planned(one, question.asked) for one in found.plans],
        front=[_planned(one, question.asked) for one in found.front],
        rejected=[Rejected(family=family, reason=reason) for family, reason in rejected(question, found)],
        runs={
            "weighed": found.considered,
            "too_large": found.too_large,
            "slower": found.slower,
            "simulated": found.simulated,
        },
    )


def _planned(one: Planned, asked: Run) -> PlannedRun:
    run, estimate = one.run, one.estimate
    return PlannedRun(
        tensor_parallel=run.tensor,
        stages=run.stages,
        data_parallel=run.data,
        context_parallel=run.context,
        expert_parallel=run.expert,
        chunks=run.chunks,
        micro_batch_size=run.micro_batch,
        micro_batches=run.micro_batches,
        accumulation=run.micro_batches / run.stages,
        global_batch_size=run.global_batch,
        recompute=run.recompute,
        schedule=run.schedule,
        bpipe=run.bpipe,
        group_size=run.group_size,
        layout=run.layout,
        placement=run.placement,
        mfu=estimate.mfu,
        bubble=one.bubble,
        iteration_ms=estimate.iteration_ms,
        samples_per_second=estimate.samples_per_second,
        iterations_to_same_loss=run.iterations,
        uncertainty=estimate.uncertainty._asdict(),
        memory_gib=one.most_bytes / 2**30,
        each_stage=[StagePlan.model_validate(stage) for stage in estimate.to_json()["stages"]],
        warnings=list(estimate.warnings),
        flags=" ".join(_flags(one.run, asked)),
    )


def _flags(run: Run, asked: Run) -> list[str]:
    words = [f"--tensor-parallel {run.tensor}", f"--stages {run.stages}", f"--micro-batch-size {run.micro_batch}"]
    words += [f"--global-batch-size {run.global_batch}", f"--recompute {run.recompute}", f"--schedule {run.schedule}"]
    words += [f"--context-parallel {run.context}"] * (run.context > 1)
    words += [f"--expert-parallel {run.expert}"] * (run.expert > 1) + [f"--chunks {run.chunks}"] * (run.chunks > 1)
    words += [f"--group-size {run.group_size}"] * (run.group_size > 1) + ["--bpipe"] * run.bpipe
    if run.layout is not None:
        words.append(f"--layout {','.join(map(str, run.layout))}")
    words += [f"--precision {asked.precision}"] * (asked.precision is not None)
    words += [f"--attention {asked.attention}"] * (asked.attention is not None)
    return words + ["--placement pipeline"] * (run.placement == "pipeline")
