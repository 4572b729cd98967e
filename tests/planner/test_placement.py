"""Where ranks are: what is next to each other communicates over a node's own links."""

from __future__ import annotations

import pytest

from evenpipe.planner.descriptions import cluster
from evenpipe.planner.kernels import FITTED, Links
from evenpipe.planner.run import Run

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
