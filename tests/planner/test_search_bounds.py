"""No run is faster or smaller than its lower bounds."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.bounds import edges_of, least_live, ordered_ms
from evenpipe.planner.search.candidates import Candidate, Group, candidates, candidates_of, groups
from evenpipe.planner.search.question import Engine, Question
from evenpipe.planner.stage_nodes import positions_of
from evenpipe.schedule import Programs, Size, find, own
from evenpipe.simulate import Costs, Wire, simulate

ALL = Engine("all", frozenset(["chunks", "groups", "stream", "split", "vee"]))
KINDS = cluster("1x4-h100"), cluster("1x4-a100-40gb"), cluster("1x4-h100").model_copy(update={"slowness": 1.5})
UNLIKE = KINDS[0].model_copy(update={"nodes": 3, "node_gbps": 3.0, "groups": KINDS})
QUESTIONS = {
    "gpt3-13b": Question(model("gpt3-13b"), cluster("2x8-a100-80gb"), 32, ALL, own()),
    "llama3-8b": Question(model("llama3-8b"), cluster("2x4-h100"), 24, ALL, own(), framework("megatron")),
    "llama3-8b, muon": Question(
        model("llama3-8b"), cluster("2x4-h100"), 24, ALL, own(), asked=Run(1, optimizer="muon", moment_bytes=2)
    ),
    "llama3-8b, adapters": Question(
        model("llama3-8b"), cluster("2x4-h100"), 24, ALL, own(), asked=Run(1, lora_rank=16, optimizer_offload=0.5)
    ),
    "llama3-8b, unlike nodes": Question(model("llama3-8b"), UNLIKE, 24, ALL, own(), framework("megatron")),
    "llama3-8b, eight layers and a further token": Question(
        model("llama3-8b").model_copy(update={"layers": 8, "mtp_layers": 1}), cluster("2x4-h100"), 24, ALL, own()
    ),
    "mixtral-8x7b": Question(model("mixtral-8x7b"), cluster("2x8-h100"), 16, ALL, own()),
}


@cache
def runs(name: str) -> list[Candidate]:
    """Bounds of time are only made of what may fit."""
    return [one for one in candidates(QUESTIONS[name]) if one.ms]


@cache
def estimator(name: str) -> Estimator:
    return Estimator(QUESTIONS[name].model, QUESTIONS[name].cluster, QUESTIONS[name].framework)


def test_bounds_are_of_runs_with_and_without_a_stage_for_a_further_token() -> None:
    parts = {(one.run.stages, one.run.further_part) for one in runs("llama3-8b, eight layers and a further token")}
    assert {(2, None), (8, 6)} <= parts


@given(st.sampled_from(list(QUESTIONS)), st.integers(0, 10**6))
@example("gpt3-13b", 6083)  # whose layers share a mask
@example("gpt3-13b", 364)  # whose units lie between their gradients
@example("llama3-8b, adapters", 748780)  # paci, of one weight version
def test_no_run_is_faster_or_smaller_than_its_bounds(name: str, number: int) -> None:
    one = runs(name)[number % len(runs(name))]
    try:
        found = estimator(name)(one.run)
    except EstimateError:
        return
    assert one.ms <= found.iteration_ms / one.run.global_batch * one.run.iterations * (1 + 1e-9)
    assert one.nbytes <= max(stage.bytes.total + stage.lacking for stage in found.stages)


def test_of_an_even_pipeline_the_bound_is_the_time_itself() -> None:
    """Messages that are waited for are in it, and beside a stage's work there are only fill and drain."""
    run = next(
        one for one in runs("gpt3-13b") if (one.run.schedule, one.run.stages, one.run.bpipe) == ("1f1b", 4, False)
    )
    found = estimator("gpt3-13b")(run.run)
    assert run.ms == pytest.approx(found.iteration_ms / run.run.global_batch, rel=0.02)


@given(st.sampled_from(own()), st.integers(2, 6), st.integers(1, 12), st.integers(2, 3), st.booleans())
def test_stages_hold_no_less_than_is_taken_for_sure(name: str, p: int, m: int, v: int, bpipe: bool) -> None:
    spec = find(name)
    m = -(-m // p) * p if name in ("interleaved", "interleaved-zb", "2bw") else m
    least, most = spec.chunks
    size = spec.fitted(Size(p, m, least if least == most else v, 2 if "groups" in spec.needs and m > 1 else 1))
    bpipe = bpipe and spec.balanced is not None
    sure = least_live(spec, size, bpipe)
    batches = 3 if "stream" in spec.needs else 1
    held = Programs(spec, bpipe)(size._replace(batches=batches)).schedule.peak_live
    assert all(one <= other for one, other in zip(sure, held, strict=True))


@given(
    st.sampled_from(["v-half", "zbv", "v-min", "dualpipev"]),
    st.lists(st.tuples(*[st.integers(1, 30)] * 3), min_size=2, max_size=6),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_a_batch_is_no_shorter_than_its_order_s_ends_make_it(
    name: str, times: list[tuple[int, int, int]], more: int, lag: int
) -> None:
    """The ends are taken from a batch of two rounds, whatever the length of this one."""
    spec, stages = find(name), len(times)
    size = spec.fitted(Size(stages, 2 * stages + more, 2))
    each = [(one[0] / 2, one[1] / 2, one[2] / 2) for one in times]
    edges = edges_of(spec, size)
    assert edges is not None
    bound = ordered_ms(edges, positions_of(spec.places(size)), size.micro_batches, each, lag)
    costs = Costs(
        tuple(float(f) for f, _, _ in times),
        tuple(float(d + w) for _, d, w in times),
        wires={"forward": Wire(lag, 0.0), "backward": Wire(lag, 0.0)},
        weight_gradient_ms=tuple(float(w) for _, _, w in times),
    )
    assert bound <= simulate(Programs(spec)(size), costs).makespan_ms * (1 + 1e-9)


@given(st.sampled_from(list(QUESTIONS)), st.integers(0, 10**6))
def test_no_run_of_a_group_is_faster_or_smaller_than_the_group_s_bounds(name: str, number: int) -> None:
    every = all_groups(name)
    group = every[number % len(every)]
    for one in candidates_of(QUESTIONS[name], group):
        assert one.nbytes >= group.nbytes
        assert not one.ms or one.ms >= group.ms * (1 - 1e-9)


@cache
def all_groups(name: str) -> list[Group]:
    return list(groups(QUESTIONS[name]))
