"""Clusters of several kinds of nodes: where stages are, what they take there, and which layers they get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.descriptions import Cluster, DescriptionError, cluster, device, framework, model
from evenpipe.planner.estimate import Estimate, estimate
from evenpipe.planner.kernels import FITTED
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.candidates import candidates
from evenpipe.planner.search.plan import plan_of
from evenpipe.planner.search.question import Engine, Question
from evenpipe.planner.search.search import search
from evenpipe.planner.stage_nodes import Placed, StageNodes

MODEL, MEGATRON = model("llama3-8b"), framework("megatron")
LINKS = {"gpus_per_node": 8, "node_gbps": 25.0, "latency_us": 25.0, "node_latency_us": 25.0}
MIXED = [{"device": "h100", "count": 2, "node_gbps": 50.0}, {"device": "a100-80gb", "count": 2}]


def listed(folder: Path, nodes: Any, **more: Any) -> Cluster:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"clusters": {"own": {**LINKS, "nodes": nodes, **more}}}))
    return cluster(str(path))


def estimated(on: Cluster, **sizes: Any) -> Estimate:
    return estimate(MODEL, on, Run(**{"global_batch": 64, "stages": 4, "data": 8, **sizes}), MEGATRON)


def test_each_stage_takes_the_time_and_the_memory_of_its_own_device(tmp_path: Path) -> None:
    mixed = estimated(listed(tmp_path, MIXED))
    assert [one.nodes for one in mixed.stages] == ["nodes 0-1 (h100)"] * 2 + ["nodes 2-3 (a100-80gb)"] * 2
    for stage, name in ((1, "h100"), (2, "a100-80gb")):
        plain = estimated(cluster(f"4x8-{name}")).stages[stage]
        assert (mixed.stages[stage].forward_ms, mixed.stages[stage].bytes) == (plain.forward_ms, plain.bytes)
    assert mixed.uncertainty.low is None, "no published iteration is of such a cluster"


def test_a_list_of_equal_nodes_is_the_plain_cluster(tmp_path: Path) -> None:
    own = listed(tmp_path, [{"count": 1}, {"device": "h100", "count": 3, "slowness": 1.0}], device="h100")
    assert own.groups == ()
    same = {"name", "sources"}
    plain = cluster("4x8-h100").model_copy(update={"node_gbps": 25.0})
    assert own.model_dump(exclude=same) == plain.model_dump(exclude=same)
    assert estimated(own) == estimated(plain)


def test_a_stage_with_a_member_on_each_kind_counts_as_its_slowest(tmp_path: Path) -> None:
    """Replicas of a stage are in one group where stages divide so; a pipeline in each node has one on both."""
    own = listed(tmp_path, MIXED)
    for run in (Run(64, stages=1, data=32), Run(64, stages=4, data=8, placement="pipeline")):
        found = estimate(MODEL, own, run, MEGATRON)
        assert {one.nodes for one in found.stages} == {"nodes 0-1 (h100) and nodes 2-3 (a100-80gb)"}
        slow = estimate(MODEL, cluster("4x8-a100-80gb"), run, MEGATRON)
        assert [one.forward_ms for one in found.stages] == [one.forward_ms for one in slow.stages]


def test_a_message_takes_the_link_between_its_two_groups(tmp_path: Path) -> None:
    run = Run(64, stages=4, data=8).of(MEGATRON)
    placed = Placed(run, StageNodes(listed(tmp_path, MIXED, node_gbps=3.0)), FITTED)
    near, far, slower = (placed.hand_over(MODEL, run, stage, stage + 1) for stage in range(3))
    assert near.wait_ms < slower.wait_ms == far.wait_ms, "the second group has no other link than that between both"


def test_partner_stages_of_bpipe_are_next_to_each_other(tmp_path: Path) -> None:
    """A pipeline's stages lie as 0, 3, 1, 2, two in a node: 0 and 3 on the first, 1 and 2 on the second."""
    own = listed(tmp_path, [{"device": "h100", "count": 1}, {"device": "a100-80gb", "count": 1}], gpus_per_node=2)
    groups = StageNodes(own).of_stages(Run(64, stages=4, bpipe=True))
    assert groups == [{0}, {1}, {1}, {0}]


def test_layers_go_to_the_stages_on_faster_nodes(tmp_path: Path) -> None:
    def layers(nodes: list[dict[str, Any]]) -> tuple[int, ...]:
        own = listed(tmp_path, nodes)
        question = Question(
            MODEL, own, 64, Engine("all", frozenset()), ("1f1b",), MEGATRON, tensor=1, stages=4, bpipe=False
        )
        plan = plan_of(question, search(question))
        layout = plan.plans[0].layout
        assert layout is not None
        assert all(stage.nodes for stage in plan.plans[0].each_stage)
        assert plan.plans[0].flags.endswith(",".join(map(str, layout)))
        return layout

    first, second, third, fourth = layers(MIXED)
    assert min(first, second) > 2 * max(third, fourth)
    h100 = {"device": "h100", "count": 1}
    _, second, third, _ = layers([h100, h100, {**h100, "slowness": 1.5}, h100])
    assert third < second
    _, second, third, _ = layers([h100, {**h100, "slowness": 1.5}, h100, h100])
    assert second < third


def test_a_plan_of_equal_nodes_does_not_name_them() -> None:
    question = Question(MODEL, cluster("2x8-h100"), 32, Engine("all", frozenset()), ("1f1b",), MEGATRON, stages=2)
    assert all(
        "nodes" not in stage for stage in plan_of(question, search(question)).model_dump()["plans"][0]["each_stage"]
    )


def test_what_is_too_much_for_the_smaller_device_does_not_fit(tmp_path: Path) -> None:
    small, large = {"device": "a100-40gb", "count": 2}, {"device": "h100", "count": 2}
    lower = {"layout": (3, 3, 4, 22), "recompute": "full"}
    assert estimated(listed(tmp_path, [small, large]), **lower).fits
    found = estimated(listed(tmp_path, [large, small]), **lower)
    assert not found.fits
    assert found.reason is not None
    assert found.reason.startswith("stage 3 needs")
    assert f"and has {device('a100-40gb').memory_gib:.1f}" in found.reason


def test_a_smaller_device_has_no_more_layers_than_fit(tmp_path: Path) -> None:
    """Both kinds are equally fast, so that layers of equal times would not fit on the smaller one."""
    small = device("h100").model_dump(mode="json", exclude_defaults=True, exclude={"name"}) | {"memory_gib": 40.0}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"devices": {"small": small}}))
    own = listed(tmp_path, [{"device": "h100", "count": 1}, {"device": f"{path}:small", "count": 1}])
    engine = Engine("all", frozenset(), scopes=("none",))
    question = Question(MODEL, own, 32, engine, ("1f1b",), MEGATRON, tensor=1, stages=2, bpipe=False)
    found = [search(replace(question, cluster=each)).plans[0] for each in (cluster("2x8-h100"), own)]
    assert [one.run.layout for one in found] == [(17, 15), (18, 14)]
    large, fitting = (one.estimate.stages[1].bytes.total / 2**30 for one in found)
    assert fitting < 40 < large


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved", 2), ("interleaved", 5), ("zbv", 2), ("v-half", 2), ("zb-h1", 1)]
)
def test_stages_of_several_chunks_have_the_memory_of_their_own_device(
    tmp_path: Path, schedule: str, chunks: int
) -> None:
    """Layers of equal times do not fit on the smaller device, which comes first and so holds the most."""
    small = device("h100").model_dump(mode="json", exclude_defaults=True, exclude={"name"}) | {"memory_gib": 52.0}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"devices": {"small": small}}))
    own = listed(tmp_path, [{"device": f"{path}:small", "count": 1}, {"device": "h100", "count": 1}])
    engine = Engine("all", frozenset(["chunks", "vee", "split"]), scopes=("none",), placements=("replicas",))
    question = Question(MODEL, own, 32, engine, (schedule,), MEGATRON, tensor=1, stages=4, micro_batch=1, bpipe=False)

    def laid_out(where: Cluster) -> Run:
        found = (one.run for one in candidates(replace(question, cluster=where)) if one.run.layout)
        (run,) = (run for run in found if (run.context, run.chunks) == (1, chunks))
        return run

    assert estimate(MODEL, own, laid_out(own), MEGATRON).fits
    assert not estimate(MODEL, own, laid_out(cluster("2x8-h100")), MEGATRON).fits


@settings(max_examples=20)
@given(
    st.sampled_from([(1, 4, 8), (2, 4, 4), (1, 2, 16), (4, 8, 1), (8, 4, 1)]),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "2bw"]),
    st.booleans(),
    st.sampled_from(["replicas", "pipeline"]),
    st.floats(1, 2),
)
def test_no_run_is_slower_than_on_the_slowest_nodes_alone(
    sizes: tuple[int, int, int], schedule: str, bpipe: bool, placement: Any, slowness: float
) -> None:
    slow = cluster("2x8-a100-80gb").model_copy(update={"slowness": slowness})
    fast = cluster("2x8-h100")
    mixed = slow.model_copy(update={"nodes": 4, "groups": (fast, slow)})
    t, p, d = sizes
    run = Run(64, tensor=t, stages=p, data=d, schedule=schedule, bpipe=bpipe, placement=placement, recompute="full")
    try:
        found = estimate(MODEL, mixed, run, MEGATRON)
    except EstimateError:  # no bpipe of this schedule, or its pairs and this placement
        return
    longest = estimate(MODEL, slow.model_copy(update={"nodes": 4}), run, MEGATRON).iteration_ms
    least = estimate(MODEL, fast.model_copy(update={"nodes": 4}), run, MEGATRON).iteration_ms
    assert least * (1 - 1e-9) <= found.iteration_ms <= longest * (1 + 1e-9)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([], "own.nodes: is an empty list: write device and count of each kind of nodes"),
        (["h100"], "own.nodes.0: is 'h100': write device, count and what else is its own"),
        ([{"device": "h100"}], "own.nodes.0.count: "),
        ([{"count": 1}], "own.nodes.0.device: "),
        ([{"device": "h100", "count": 1, "slowness": 0.5}], "own.nodes.0.slowness: "),
        ([{"device": "h100", "count": 1, "gpus_per_node": 4}], "own.nodes.0.gpus_per_node: unknown key"),
        ([{"device": "h1000", "count": 1}], "own.nodes.0.device: h1000: unknown among devices, did you mean h100?"),
    ],
)
def test_a_wrong_list_is_refused_in_a_line(tmp_path: Path, nodes: Any, said: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        listed(tmp_path, nodes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_listed_cluster_has_its_own_size(tmp_path: Path) -> None:
    listed(tmp_path, MIXED)
    with pytest.raises(DescriptionError, match=r"own.yaml@4x8: lists unlike nodes, and has no other size"):
        cluster(f"{tmp_path / 'own.yaml'}@4x8")


def test_tensor_parallel_ranks_are_never_on_two_kinds(tmp_path: Path) -> None:
    own = listed(tmp_path, [{"device": "h100", "count": 3}, {"device": "a100-80gb", "count": 1}], gpus_per_node=4)
    with pytest.raises(EstimateError, match=r"tensor_parallel=8: .* no divisor of the 12 GPUs on nodes 0-2 .h100.:"):
        estimate(MODEL, own, Run(64, tensor=8, stages=2, data=1), MEGATRON)


def test_a_precision_is_one_of_every_kind(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="products in tensorwise: a100-80gb has no fp8"):
        estimate(MODEL, listed(tmp_path, MIXED), Run(64, stages=4, data=8, quantized="tensorwise"), MEGATRON)


@pytest.mark.parametrize("nodes", [MIXED, 4])
def test_a_wrong_key_is_named_once_with_its_file(tmp_path: Path, nodes: Any) -> None:
    with pytest.raises(DescriptionError) as caught:
        listed(tmp_path, nodes, gpus_per_node="eight", device="h100")
    key = "own.nodes.0" if nodes == MIXED else "own"
    assert str(caught.value) == f"{tmp_path / 'own.yaml'}: {key}.gpus_per_node: must be a whole number"


def test_stages_of_unlike_nodes_are_not_to_be_levelled_by_layers(tmp_path: Path) -> None:
    """The faster nodes' stages hold more because they compute more."""
    uneven = {"layout": (13, 13, 3, 3), "recompute": "full"}
    assert not any("even them out" in one for one in estimated(listed(tmp_path, MIXED), **uneven).warnings)
    assert any("even them out" in one for one in estimated(cluster("4x8-h100"), **uneven).warnings)
