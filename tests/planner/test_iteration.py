"""An iteration on the simulator's clock, and what a run's links take where its ranks are."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.iteration import simulated
from evenpipe.planner.kernels import FITTED, Links
from evenpipe.planner.run import EstimateError, Run
from evenpipe.schedule import Program, Programs, Size, find
from evenpipe.simulate import Costs, Wire, simulate

TIMES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 80)), min_size=2, max_size=5)
SCHEDULES = st.sampled_from(
    ["1f1b", "gpipe", "kfkb", "interleaved", "zb-h1", "v-half", "v-min", "zbv", "interleaved-zb"]
)


def costs_of(times: list[tuple[int, int]], message: Wire | None = None) -> Costs:
    forward_ms, backward_ms = zip(*times, strict=True)
    wires = {} if message is None else {"forward": message, "backward": message, "evict": message, "load": message}
    return Costs(tuple(map(float, forward_ms)), tuple(map(float, backward_ms)), wires=wires)  # type: ignore[arg-type]


@given(
    SCHEDULES,
    TIMES,
    st.integers(1, 3),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from([None, Wire(1.0, 0.0), Wire(0.0, 7.0), Wire(2.0, 30.0)]),
)
def test_it_is_as_long_and_as_large(
    name: str, times: list[tuple[int, int]], k: int, m: int, bpipe: bool, message: Wire | None
) -> None:
    spec, stages = find(name), len(times)
    chunks = 2 if name.startswith("interleaved") else 1
    m = -(-m // stages) * stages if name.startswith(("interleaved", "v-half")) else m
    programs = Programs(spec, bpipe and spec.balanced is not None and stages >= 4 and chunks == 1)
    size = spec.fitted(Size(stages, m, chunks, k if "groups" in spec.needs else 1))
    units = [[100 + stage] * size.chunks for stage in range(stages)]
    left = [[80 + 30 * (stage % 2)] * size.chunks for stage in range(stages)]
    costs = costs_of(times, message)

    found = simulated(programs, size, costs, units, left)
    whole = simulate(programs(size), costs, units, left)
    assert found.makespan_ms == pytest.approx(whole.makespan_ms, rel=1e-9)
    assert found.saved_bytes == tuple(stage.peak_bytes for stage in whole.stages)


class Watched(Programs):
    """Notes what is built."""

    def __call__(self, size: Size) -> Program:
        self.built = max(getattr(self, "built", 0), size.micro_batches)
        return super().__call__(size)


def test_a_long_batch_is_not_built() -> None:
    programs = Watched("1f1b")
    found = simulated(programs, Size(4, 100_000), costs_of([(1, 2)] * 4), [[1]] * 4)
    assert programs.built < 100
    assert found.makespan_ms == pytest.approx(3 * (100_000 + 3))


def test_where_messages_take_time_a_very_long_batch_is_cut_short_to_a_thousandth() -> None:
    programs, costs = Watched("1f1b"), costs_of([(9, 20), (7, 31), (12, 14), (3, 38)], Wire(1.0, 20.0))
    found = simulated(programs, Size(4, 8000), costs, [[1]] * 4)
    assert programs.built < 1000
    whole = simulate(programs(Size(4, 8000)), costs)
    assert found.makespan_ms == pytest.approx(whole.makespan_ms, rel=1e-3)


def test_a_batch_of_a_stream_takes_what_one_more_adds() -> None:
    found = simulated(Programs("2bw"), Size(4, 8, batches=3), costs_of([(10, 20)] * 4), [[1]] * 4)
    assert found.makespan_ms == pytest.approx(8 * 30)
    assert found.saved_bytes == (4, 3, 2, 1)
    assert found.weight_versions == 2


@pytest.mark.parametrize("message", [None, Wire(1.0, 20.0)])
def test_long_batches_of_a_stream_are_not_walked_to_their_end(message: Wire | None) -> None:
    programs, times = Watched("2bw"), [(9, 20), (7, 31), (12, 14), (3, 38), (8, 16), (12, 22), (14, 20), (6, 30)]
    began = time.process_time()
    found = simulated(programs, Size(8, 2048, batches=3), costs_of(times, message), [[1]] * 8)
    assert time.process_time() - began < 1
    assert programs.built < 200
    one, other = (
        simulate(Programs("2bw")(Size(8, 512, batches=n)), costs_of(times, message)).makespan_ms for n in (3, 4)
    )
    assert found.makespan_ms == pytest.approx(4 * (other - one), rel=1e-3)


NODES = cluster("4x8-a100-80gb-25gbit")
INSIDE = NODES.peer_gbps * 1e9 * FITTED.peer
BETWEEN = NODES.node_gbps * 1e9 * FITTED.node


def links(**changed: object) -> Links:
    sizes = {"global_batch": 32, "tensor": 2, "stages": 4, "data": 4, **changed}
    return Links(Run(**sizes), NODES, FITTED)  # type: ignore[arg-type]


def test_replicas_of_a_stage_in_one_node_reduce_there_and_stages_are_nodes_apart() -> None:
    found = links(placement="replicas")
    assert found.reduction(1e9) == pytest.approx(1e9 / INSIDE)
    assert found.message(1e6)[1] == pytest.approx(1e6 / BETWEEN)


def test_a_pipeline_in_one_node_sends_there_and_its_replicas_are_nodes_apart() -> None:
    found = links(placement="pipeline")
    assert found.reduction(1e9) == pytest.approx(1e9 / BETWEEN)
    assert found.message(1e6)[1] == pytest.approx(1e6 / INSIDE)


def test_within_one_node_it_is_all_the_same() -> None:
    for one in ("replicas", "pipeline"):
        found = links(data=1, placement=one)
        assert found.message(1e6)[1] == pytest.approx(1e6 / INSIDE)


def test_tied_embeddings_are_summed_where_their_stages_are() -> None:
    """In one node where a pipeline is placed in one, or where the first stage and the last are a pair of BPipe's."""
    nodes = cluster("2x8-a100-80gb")
    run = Run(global_batch=32, stages=8, data=2)
    across, inside, paired = (
        Links(one, nodes, FITTED).between_ends(1e9)
        for one in (run, replace(run, placement="pipeline"), replace(run, bpipe=True))
    )
    assert inside == paired < across / 2


def test_how_sure_an_estimate_is_depends_on_the_links_between_nodes() -> None:
    run = Run(global_batch=128, stages=8, tensor=4, micro_batch=2, recompute="selective", bpipe=True)
    fast, slow = (estimate(model("gpt3-96b"), cluster(f"4x8-a100-80gb{one}"), run) for one in ("", "-25gbit"))
    assert fast.uncertainty.high < 0.05 < slow.uncertainty.high


def test_a_pipeline_in_one_node_is_refused_where_replicas_share_out_experts() -> None:
    run = Run(global_batch=32, stages=2, data=8, expert=8, placement="pipeline")
    with pytest.raises(EstimateError, match="placement=pipeline: Megatron places replicas first"):
        estimate(model("mixtral-8x7b"), cluster("2x8-h100"), run)
