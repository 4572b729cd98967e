"""The document ``evenpipe.plan/1``: the runs to choose, their alternatives, and why families of runs are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from evenpipe.planner.features import flags_of
from evenpipe.planner.quantized import Quantized
from evenpipe.planner.run import Dispatcher, Placement, Recompute, Run
from evenpipe.planner.search.candidates import Family, families_of, products_of
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import Found, Planned, preference
from evenpipe.schedule import find

__all__ = ["Plan", "PlannedRun", "Rejected", "StagePlan", "brief", "plan_of", "rejected"]

_GIB: Final = 2**30
_FLASH: Final = "flash attention saves no scores, so there is less to make room for: arXiv 2401.02088"
_SAME: Final = 1e-3  # relative: no faster and no slower


def rejected(question: Question, found: Found) -> Iterator[tuple[str, str]]:
    """Every family that the best run is not of, and why; of schedules also what no size divides for.

    Placement and layout are asked about where the best run has them: it has replicas, or stages.
    """
    best = found.plans[0]
    own = set(families_of(question, best.run, True))
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
    yield from (Family("recompute", f"recompute {scope}") for scope in question.scopes)
    yield from (Family("placement", f"{one} in one node") for one in question.engine.placements)
    yield from dict.fromkeys(family for base in question.bases(1) for family in products_of(question, base))
    if question.engine.uneven:
        yield from (Family("layout", one) for one in ("even stages", "uneven stages"))


def _reason(question: Question, found: Found, family: Family, best: Planned) -> str:
    refused = ""
    if family.kind == "schedule" and family.value != "no pipeline":
        refused = question.refused(find(family.value))
    one = found.best.get(family)
    if one is None and refused and question.asked.overlap_experts:  # no run of it was tried
        return refused
    if one is None:
        return "; ".join([*([refused] if refused else []), _unfit(question, found, family)])
    faster = best.ms_to_loss / one.ms_to_loss - 1
    if refused:
        to_loss = f" to the same loss ({one.run.iterations - 1:.0%} more iterations)" if one.run.iterations > 1 else ""
        way = "faster" if faster > 0 else "slower"
        which = "an iteration" if "in_place" in one.run.spec.needs else "it"  # of which a loss may take more
        return f"{refused}; {which} would be about {abs(faster):.1%} {way}{to_loss}: {brief(one)}"
    if faster > _SAME:
        have = question.cluster.device.memory_gib * _GIB
        full = preference(one.run, one.most_bytes, have)[0]
        less = "it leaves less memory free" if full else "the schedule that is taken is no less simple"
        return f"{faster:.1%} faster, which counts as equal, and {less}: {brief(one)}"
    if family.value == "with BPipe" and faster >= -_SAME:
        free = (best.most_bytes - one.most_bytes) / _GIB
        return f"not needed, the best run fits without it: it would leave {max(0.0, free):.1f} GiB more, no time less"
    if faster >= -_SAME:
        return f"no faster ({max(0.0, -faster):.2%} slower): {brief(one)}"
    why = f"about {-faster:.1%} slower, {_why(one, best)}: {brief(one)}"
    if family.value != "with BPipe":
        return why
    flash = f" ({_FLASH})" if one.run.attention == "flash" else ""
    return f"does not pay{flash}, {why}"


def _unfit(question: Question, found: Found, family: Family) -> str:
    """Nothing of the family fits, or there is nothing of it."""
    have = question.cluster.device.memory_gib
    least = found.least_bytes.get(family)
    if found.left_out:
        return f"does not fit into {have:.1f} GiB, or takes twice as long as the best"
    if least is None:
        return "no size divides model, batch and cluster"
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
    """Return the run in few words."""
    run = one.run
    words = [f"t={run.tensor} p={run.stages} d={run.data}"]
    words += [f"c={run.context}"] * (run.context > 1)
    words += [f"e={run.expert}"] * (run.expert > 1) + [f"et={run.expert_ways}"] * (run.expert_ways != run.tensor)
    words += [f"v={run.chunks}"] * (run.chunks > 1)
    words += [f"b={run.micro_batch}", run.schedule]
    words += [f"k={run.group_size}"] * (run.group_size > 1) + ["BPipe"] * run.bpipe
    words += [f"recompute {run.recomputing}"] + ["uneven"] * (run.layout is not None)
    words += ["further token apart"] * (run.further_part is not None)
    words += ["pipeline in one node"] * (run.placement == "pipeline")
    words += [run.quantized] if run.quantized else []
    words += ["half gradients"] * (run.precision == "bf16" and not run.gradients_in_fp32)
    words += [run.dispatcher] * (run.dispatcher != "alltoall")
    return " ".join(words)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StagePlan(_Part):
    """One GPU of a stage: bytes at its peak by what they are for, and milliseconds of a micro-batch.

    nodes: those that the stage is on, where a cluster has unlike ones.
    """

    bytes: dict[str, int]
    forward_ms: float
    backward_ms: float
    nodes: str = ""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        return {key: value for key, value in found.items() if key != "nodes" or value}


class PlannedRun(_Part):
    """A run that fits. ``micro_batches``: of a replica, m; ``accumulation``: m / p, the g of PipeDream-2BW §4.3.

    layout: layers of each part of the pipeline, where they are not even; further_part: the one that predicts further
    tokens, if that is not the last. bubble: share of an iteration in which a stage
    does not compute, on the mean. iterations_to_same_loss: times those of a run without late gradients (2bw), by which
    runs are compared; samples_per_second does not count them. recompute_modules: of "selective", where these are not
    Megatron's default. quantized: how operands of linear layers' products are, in 8 or 4 bits. logged_tflops_per_gpu:
    10^12 operations/s as Megatron-LM logs them. flags: those of ``evenpipe estimate``, beside model, cluster and
    framework.
    """

    tensor_parallel: int
    stages: int
    data_parallel: int
    context_parallel: int = 1
    expert_parallel: int
    expert_tensor_parallel: int
    chunks: int
    micro_batch_size: int
    micro_batches: int
    accumulation: float
    global_batch_size: int
    recompute: Recompute
    recompute_modules: tuple[str, ...]
    schedule: str
    bpipe: bool
    group_size: int
    layout: tuple[int, ...] | None
    further_part: int | None = None
    placement: Placement
    quantized: Quantized | None = None
    dispatcher: Dispatcher = "alltoall"
    mfu: float
    logged_tflops_per_gpu: float
    bubble: float
    iteration_ms: float
    samples_per_second: float
    tokens_per_second_per_gpu: float
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

    runs: how many were weighed, left out by bounds on memory and on time, and simulated. commands: of the fastest run,
    to be copied: one estimates it, one writes it as files where a recipe does that.
    """

    format: Literal["evenpipe.plan/1"] = "evenpipe.plan/1"
    model: str
    seq_length: int
    cluster: str
    framework: str
    engine: str
    global_batch_size: int = Field(ge=1)
    device_gib: float
    plans: list[PlannedRun]
    front: list[PlannedRun]
    rejected: list[Rejected]
    runs: dict[str, int]
    commands: tuple[str, ...] = ()


def plan_of(question: Question, found: Found) -> Plan:
    """Return what a search has found, as it is written."""
    return Plan(
        model=question.model.name,
        seq_length=question.model.sequence,
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
    run, written = one.run, one.estimate.to_json()
    said = {name: written[name] for name in PlannedRun.model_fields if name in written}
    said |= {name: getattr(run, name) for name in PlannedRun.model_fields if hasattr(run, name)}
    return PlannedRun(
        **said,
        tensor_parallel=run.tensor,
        data_parallel=run.data,
        context_parallel=run.context,
        expert_parallel=run.expert,
        expert_tensor_parallel=run.expert_ways,
        micro_batch_size=run.micro_batch,
        accumulation=run.micro_batches / run.stages,
        global_batch_size=run.global_batch,
        recompute_modules=() if run.recomputing == run.recompute else run.recomputed_modules,
        bubble=one.bubble,
        iterations_to_same_loss=run.iterations,
        memory_gib=one.estimate.fullest.bytes.total / _GIB,
        each_stage=written["stages"],
        flags=" ".join(_flags(run, asked)),
    )


def _flags(run: Run, asked: Run) -> list[str]:
    words = [f"--tensor-parallel {run.tensor}", f"--stages {run.stages}", f"--micro-batch-size {run.micro_batch}"]
    words += [f"--global-batch-size {run.global_batch}", f"--recompute {run.recompute}", f"--schedule {run.schedule}"]
    words += [f"--context-parallel {run.context}"] * (run.context > 1)
    words += [f"--expert-parallel {run.expert}"] * (run.expert > 1)
    words += [f"--expert-tensor-parallel {run.expert_ways}"] * (run.expert_ways != run.tensor)
    words += [f"--chunks {run.chunks}"] * (run.chunks > 1)
    words += [f"--group-size {run.group_size}"] * (run.group_size > 1) + ["--bpipe"] * run.bpipe
    if run.layout is not None:
        parts = [f"{layers}{'m' * (n == run.further_part)}" for n, layers in enumerate(run.layout)]
        words.append(f"--layout {','.join(parts)}")
    words += [f"--precision {run.precision}"] * (asked.precision is not None)
    words += [f"--attention {asked.attention}"] * (asked.attention is not None)
    if asked.gradients_in_fp32 is not None:
        words.append("--gradients-in-fp32" if run.gradients_in_fp32 else "--no-gradients-in-fp32")
    words += [f"--routing-imbalance {run.routing_imbalance:g}"] * (run.routing_imbalance > 1)
    words += [" ".join(flag) for flag in flags_of(run)]
    return words + ["--placement pipeline"] * (run.placement == "pipeline")
