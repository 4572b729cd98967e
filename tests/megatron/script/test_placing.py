"""Pair-adjacent ranks from Megatron's arguments and torchrun's environment: when, where to, and when not."""

from argparse import Namespace

import pytest

from evenpipe.megatron_lm.flags import ArgumentError
from evenpipe.megatron_lm.placing import place_process
from evenpipe.runtime.placement import NotPlacedError
from evenpipe.settings.config import EvenPipeConfig

ASKED = EvenPipeConfig(bpipe=True, pair_adjacent=True)
AUTOMATIC = EvenPipeConfig(bpipe=True)


def megatrons(stages=4, tensor=1, rank=0, **others):
    """Arguments as Megatron-LM leaves them after its own validation."""
    values = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tensor,
        "num_experts": None,
        "use_tp_pp_dp_mapping": False,
        "async_save": None,
        "use_persistent_ckpt_worker": False,
        "rank": rank,
    }
    return Namespace(**values | others)


def torchruns(slot, nodes, per_node):
    values = {
        "RANK": slot,
        "WORLD_SIZE": nodes * per_node,
        "LOCAL_RANK": slot % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": slot // per_node,
        "GROUP_WORLD_SIZE": nodes,
    }
    return {name: str(value) for name, value in values.items()}


def ranks_by_node(nodes, per_node, config=AUTOMATIC, **arguments):
    """The rank of every process, a list a node; what else is changed is an error."""
    ranks = []
    for slot in range(nodes * per_node):
        args, environ = megatrons(rank=slot, **arguments), torchruns(slot, nodes, per_node)
        placement = place_process(args, config, environ)
        assert vars(args) == vars(megatrons(rank=args.rank, **arguments))
        assert environ == torchruns(slot, nodes, per_node) | {"RANK": str(args.rank)}
        assert not isinstance(placement, NotPlacedError) or args.rank == slot
        ranks.append(args.rank)
    return [ranks[node * per_node : (node + 1) * per_node] for node in range(nodes)]


@pytest.mark.parametrize("config", [AUTOMATIC, ASKED])
def test_partners_come_to_one_node(config):
    """Four stages, and two-way data: without tensor ranks a stage's rank is data rank + 2 stages."""
    assert ranks_by_node(2, 2, config) == [[0, 3], [1, 2]]
    assert ranks_by_node(2, 4, config) == [[0, 6, 2, 4], [1, 7, 3, 5]]
    assert ranks_by_node(2, 4, config, tensor=2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_one_node_holds_everything():
    assert ranks_by_node(1, 4) == [[0, 3, 1, 2]]
    assert ranks_by_node(1, 4, tensor=2, stages=2) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "talking",
    [
        {"context_parallel_size": 2},
        {"num_experts": 2, "expert_model_parallel_size": 2},
        {"gtp_weight_remat_size": 2},
        {"tensor": 2, "num_experts": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ],
)
def test_ranks_that_talk_in_every_layer_stay_together(talking):
    """Two consecutive ranks of a stage, where a node has room for two stages' pairs of them."""
    assert ranks_by_node(2, 4, **talking) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_only_the_flag_spreads_them_over_nodes():
    """A node of two holds a stage's two context-parallel ranks, or two partners."""
    context = {"stages": 2, "context_parallel_size": 2}
    assert ranks_by_node(2, 2, AUTOMATIC, **context) == [[0, 1], [2, 3]]
    assert ranks_by_node(2, 2, ASKED, **context) == [[0, 2], [1, 3]]
    assert str(place_process(megatrons(**context), AUTOMATIC, torchruns(0, 2, 2))) == (
        "a node of 2 processes does not hold two whole groups of 2 tensor-, context- and expert-parallel ranks; "
        "--pair-adjacent spreads such groups over nodes"
    )


def test_pairs_that_trade_nothing_come_together_only_if_asked_to():
    assert ranks_by_node(3, 2, AUTOMATIC, stages=3) == [[0, 1], [2, 3], [4, 5]]
    assert ranks_by_node(3, 2, ASKED, stages=3) != [[0, 1], [2, 3], [4, 5]]


CANNOT = {
    "another order": ({"use_tp_pp_dp_mapping": True}, {}, "--use-tp-pp-dp-mapping numbers ranks in an order of"),
    "worker that goes by rank": (
        {"async_save": True, "use_persistent_ckpt_worker": True},
        {},
        "--use-persistent-ckpt-worker takes a rank for the number of a GPU",
    ),
    "copies by rank": (
        {"non_persistent_ckpt_type": "local"},
        {},
        "--non-persistent-ckpt-type local keeps copies by rank",
    ),
    "no launcher": ({}, {"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set: start the processes with torchrun"),
    "no agents": ({}, {"GROUP_RANK": None}, "GROUP_RANK is not set: start the processes with torchrun"),
    "nodes that differ": ({}, {"LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE 4 is not 2 nodes of 3, .*--nproc-per-node"),
    "counted over nodes": ({}, {"RANK": "1"}, "WORLD_SIZE 4 is not 2 nodes of 2, numbered one after the other"),
    "half an expert": (
        {"num_experts": 3, "expert_model_parallel_size": 3},
        {},
        "WORLD_SIZE 4 is not --pipeline-model-parallel-size 4 times whole groups of 3",
    ),
    "one stage a node": (
        {"stages": 2, "tensor": 2},
        {},
        "a node of 2 processes does not hold two whole groups of --tensor-model-parallel-size 2",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_placed_is_refused_if_asked_for_and_else_told(case):
    arguments, launch, said = CANNOT[case]
    launched = torchruns(2, 2, 2) | launch
    environ = {name: value for name, value in launched.items() if value is not None}
    before = dict(environ)
    with pytest.raises(ArgumentError, match=f"^--pair-adjacent: {said}") as error:
        place_process(megatrons(**arguments), ASKED, environ)
    assert "\n" not in str(error.value)
    args = megatrons(rank=2, **arguments)
    obstacle = place_process(args, AUTOMATIC, environ)
    assert isinstance(obstacle, NotPlacedError)
    assert (args.rank, environ) == (2, before)
    assert f"--pair-adjacent: {obstacle}" == str(error.value)


def test_no_pair_adjacent():
    args, environ = megatrons(), torchruns(1, 2, 2)
    config = EvenPipeConfig(bpipe=True, pair_adjacent=False)
    assert str(place_process(args, config, environ)) == "--no-pair-adjacent is given"
