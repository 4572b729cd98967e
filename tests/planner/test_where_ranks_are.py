"""Where a run's ranks are decides what its links take, how sure that is, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenpipe.planner.descriptions import cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.kernels import FITTED, Links
from evenpipe.planner.run import EstimateError, Run


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
