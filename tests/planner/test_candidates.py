"""Which runs a search weighs: their sizes, experts, layouts and contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run
from evenpipe.planner.search.balanced_layout import balanced_layout, settled_layout
from evenpipe.planner.search.candidates import candidates
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import EQUAL
from evenpipe.recipes.megatron import layout_of
from evenpipe.schedule import find
from tests.planner.questions import ALL, MEGATRON, MEGATRON_TODAY, SMALL, asked_as_published


def test_the_batch_is_never_larger_than_is_safe() -> None:
    question = replace(SMALL, model=model("gpt2-355m"), samples=13)
    for one in candidates(question):
        assert one.run.global_batch <= 13
        assert one.run.global_batch % (one.run.micro_batch * one.run.data) == 0


@pytest.mark.parametrize(
    ("name", "asked", "modules"),
    [
        ("llama3-70b", {}, ("layernorm",)),
        ("llama3-70b", {"attention": "unfused"}, ("core_attn",)),
        ("llama3-70b", {"quantized": "tensorwise"}, ("mlp",)),
        ("llama3-70b", {"recomputed_modules": ("layernorm", "mlp")}, ("layernorm", "mlp")),
        ("deepseek-v3", {}, ("layernorm", "moe_act", "mla_up_proj")),
        ("deepseek-v3", {"quantized": "delayed"}, ("mla_up_proj",)),
    ],
)
def test_selective_recomputation_is_of_what_the_run_keeps(
    name: str, asked: dict[str, object], modules: tuple[str, ...]
) -> None:
    """Megatron itself warns of a fused core (`transformer_config.py`)."""
    run = Run(1, **asked)  # type: ignore[arg-type]
    question = Question(model(name), cluster("8x8-h100"), 128, MEGATRON, ("1f1b",), framework("megatron"), run)
    assert question.modules(question.base(4)) == modules
    again = [replace(question.base(4), recompute=scope, recomputed_modules=modules).again for scope in MEGATRON.scopes]
    assert again == [set(), set(modules), set()]


def test_the_ranks_of_a_stage_have_experts_whole_or_divided_as_other_matrices_are() -> None:
    """DeepSeek-V3 of 1,024 H100 has t = 2 and whole experts on 64 ranks (Megatron Bridge 25.09)."""
    question = Question(model("deepseek-v3"), cluster("128x8-h100"), 8192, MEGATRON, ("interleaved",))
    found = question.experts(64, 2)
    assert {(64, 1), (64, 2), (128, 1)} <= set(found)
    assert (128, 2) not in found
    assert question.experts(64, 1) == [(e, 1) for e in (1, 2, 4, 8, 16, 32, 64)]


def test_experts_are_not_shared_out_across_pipelines() -> None:
    """What Megatron numbers replicas first for; with gradients a batch late too, but where the engine has none."""
    question = Question(model("mixtral-8x7b"), cluster("2x8-h100"), 32, MEGATRON, ("1f1b", "2bw"), delayed=True)
    question = replace(question, tensor=2, stages=2, micro_batch=1)
    shared = [one for one in candidates(question) if one.run.expert > 1]
    assert {one.run.placement for one in shared} == {"replicas"}
    assert {one.run.schedule for one in shared if one.allowed} == {"1f1b", "2bw"}
    elsewhere = replace(question, tensor=1, engine=replace(MEGATRON, delayed_sharded=False))
    late = [one.run for one in candidates(elsewhere) if one.allowed and one.run.schedule == "2bw"]
    assert {run.expert for run in late} == {1}


def test_experts_messages_are_hidden_by_orders_that_can_and_hold_a_unit_more() -> None:
    """Megatron asks for several chunks a stage, and runs one forward more ahead (`get_pp_rank_microbatches`)."""
    engine = replace(MEGATRON, offers=MEGATRON.offers | {"vee", "split"})
    asked = Run(1, overlap_experts=True)
    schedules = ("1f1b", "interleaved", "zbv", "dualpipev")
    question = Question(model("mixtral-8x7b"), cluster("2x8-h100"), 32, engine, schedules, asked=asked)
    question = replace(question, tensor=1, stages=4, micro_batch=1)
    assert {one.run.schedule for one in candidates(question)} == {"interleaved", "dualpipev"}
    assert {one.run.chunks > 1 for one in candidates(question)} == {True}
    assert question.refused(find("zbv")) == "has no order in which experts' messages are hidden"
    hidden = replace(asked, global_batch=32, stages=4, data=4, chunks=2, expert=4, attention="flash")
    most = [
        estimate(question.model, question.cluster, run).stages[0].bytes.activations
        for run in (hidden, replace(hidden, overlap_experts=False))
    ]
    assert most[0] > most[1]


def test_a_framework_without_uneven_stages_has_none() -> None:
    assert all(one.run.layout is None for one in candidates(SMALL))
    uneven = replace(SMALL, engine=replace(MEGATRON, uneven=True), model=model("llama3-8b"), stages=8)
    assert any(one.run.layout is not None for one in candidates(uneven))


def test_any_number_of_chunks_has_a_balanced_layout() -> None:
    """61 layers divide by none, and 61 and both ends by 3, 7 and 9 only: DeepSeek-V3 is trained with 4 and 8."""
    of = model("deepseek-v3")
    question = Question(of, cluster("128x8-h100"), 2048, replace(MEGATRON, uneven=True), ("interleaved",))
    question = replace(question, tensor=2, stages=8, micro_batch=1)
    found = {one.run.chunks: one.run.layout for one in candidates(question) if one.run.layout}
    assert set(found) == set(range(2, 8))
    for chunks, layout in found.items():
        assert sum(layout) == of.layers
        assert min(layout[1:-1]) > 0
        each = [sum(layout[stage::8]) for stage in range(8)]
        assert len(layout) == 8 * chunks
        assert max(each) == 8  # the last has a prediction layer and two heads beside its own
        assert each[-1] == min(each) < 8


@pytest.mark.parametrize(("stages", "apart"), [(32, True), (8, False)])
def test_further_tokens_are_predicted_before_the_loss_where_that_is_faster(stages: int, apart: bool) -> None:
    """Beside the loss a further token and its head are three layers of DeepSeek-V3 on a GB200, and a stage has two."""
    of, where = model("deepseek-v3"), cluster("16x64-gb200")
    question = Question(of, where, 4096, MEGATRON_TODAY, ("1f1b",), framework("megatron"), micro_batch=1, context=1)
    question = replace(question, tensor=1, stages=stages, bpipe=False)
    runs = [one.run for one in candidates(question) if one.ms and one.run.layout and one.run.expert == 32]
    assert {one.further_part for one in runs} == {stages - 2 if apart else None}
    if apart:
        beside = replace(runs[0], further_part=None)
        faster, slower = (estimate(of, where, one, question.of).iteration_ms for one in (runs[0], beside))
        assert EQUAL * faster < slower
        assert (layout_of(of, runs[0]) or "").endswith("tm|L")


def test_a_v_is_balanced_by_its_own_stages() -> None:
    """Its first stage has both ends of the model."""
    question = Question(model("llama3-8b"), cluster("2x4-h100"), 24, ALL, ("zbv",), framework("megatron"), stages=4)
    layouts = {one.run.layout for one in candidates(question) if one.run.layout}
    assert layouts
    for layout in layouts:
        each = [layout[stage] + layout[7 - stage] for stage in range(4)]
        assert sum(each) == 32
        assert each[0] == min(each)
        assert max(each[1:]) - min(each[1:]) <= 1


def test_short_sequences_are_divided_too() -> None:
    """As published runs of 4,096 and 8,192 tokens are; by up to eight, as nothing longer asks for more."""
    engine = replace(MEGATRON, context=True)
    question = Question(model("llama3-70b"), cluster("8x8-h100"), 128, engine, ("1f1b", "interleaved"), tensor=4)
    assert {one.run.context for one in candidates(question)} == {1, 2, 4, 8}


def test_without_flushes_parameters_are_not_gathered_beside_the_forward() -> None:
    run = Run(64, stages=8, data=2, schedule="2bw").of(framework("megatron"))
    assert run.overlap_gradients
    assert not run.overlap_parameters
    assert Run(64, stages=8, data=2).of(framework("megatron")).overlap_parameters


@given(st.data())
def test_shorter_layers_count_as_such_in_a_layout(data: st.DataObject) -> None:
    """Never slower than with all layers alike, and the seconds are those of the layout."""
    stages, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    owners = [n % stages for n in range(stages * chunks)]
    times = data.draw(st.lists(st.integers(1, 9), min_size=len(owners), max_size=24))
    usual, ends = max(times), [0.0] * len(owners)
    ends[-1] = float(data.draw(st.integers(0, 12)))

    def saved_of(layout: Sequence[int]) -> list[float]:
        last = list(accumulate(layout))
        return [float(sum(usual - ms for ms in times[end - n : end])) for n, end in zip(layout, last, strict=True)]

    each = [float(usual)] * stages
    slowest, found = settled_layout(len(times), owners, ends, each, None, saved_of)
    alike = balanced_layout(len(times), owners, ends, each)

    def slowest_of(layout: Sequence[int]) -> float:
        of_stage, last = [0.0] * stages, list(accumulate(layout))
        for stage, end, n, bare in zip(owners, last, layout, ends, strict=True):
            of_stage[stage] += sum(times[end - n : end]) + bare
        return max(of_stage)

    assert sum(found) == len(times)
    assert slowest == slowest_of(found) <= slowest_of(alike)


def test_a_first_layer_without_experts_counts_as_such() -> None:
    """Moonlight's takes less time than the others: with all alike, 7, 7, 8 and 5 layers would take 6 % longer."""
    question = asked_as_published("moonlight-16b-a3b", "4x8-h100", 256)
    near = replace(question, tensor=1, stages=4, context=1, micro_batch=1, schedules=("1f1b",), bpipe=False)
    layouts = {
        one.run.layout
        for one in candidates(near)
        if (one.run.expert, one.run.chunks, one.run.recompute) == (8, 1, "full")
    }
    assert layouts == {(8, 7, 7, 5)}


def test_no_two_candidates_are_alike_in_their_order() -> None:
    """The queue of the search would compare their runs, which have no order."""
    question = asked_as_published("llama3-8b", "1x8-h100", 32)
    found = [one.order for one in candidates(replace(question, tensor=1))]
    assert len(found) == len(set(found)) > 500


def groups_of(nodes: str) -> dict[int, list[int]]:
    """By the size of a micro-batch, the groups of kFkB that are weighed of 13B in 32 stages, and fit."""
    named = framework("megatron")
    question = Question(model("gpt3-13b"), cluster(nodes), 64, MEGATRON_TODAY, ("kfkb",), named, tensor=1, context=1)
    found: dict[int, list[int]] = {}
    for one in candidates(replace(question, stages=32, bpipe=False)):
        if one.ms and one.run.recompute == "none":
            found.setdefault(one.run.micro_batch, []).append(one.run.group_size)
    return found


def test_groups_grow_until_a_message_is_hidden_or_memory_is_full() -> None:
    """Ada-Grouper's memory-limit curve (§4.2): the larger micro-batches are, the smaller their largest group."""
    fast, slow = groups_of("4x8-a100-80gb"), groups_of("4x8-a100-80gb-25gbit")
    # A message over InfiniBand is shorter than a forward, but uneven stages wait less for each other up to 4.
    assert max(groups[-1] for groups in fast.values()) == 4
    assert all(groups == list(range(2, 2 + len(groups))) for groups in fast.values())
    assert all(groups == list(range(2, 2 + len(groups))) for groups in slow.values())
    most = [groups[-1] for _, groups in sorted(slow.items())]
    assert most == sorted(most, reverse=True)
    assert most[0] > 4 > most[-1]
