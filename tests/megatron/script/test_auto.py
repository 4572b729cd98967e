"""What `--evenpipe auto` chooses among: by Megatron's arguments a placement, halves of backwards, or nothing."""

from argparse import Namespace

import pytest

pytest.importorskip("megatron.core")

from evenpipe.megatron_lm.auto import auto_spec, why_stock
from evenpipe.schedule import Size, loop, vee


def args(**given):
    usual = {"pipeline_model_parallel_size": 4, "save": None, "load": None, "cuda_graph_impl": "none"}
    return Namespace(**{**usual, "pipeline_model_parallel_layout": None, **given})


@pytest.mark.parametrize(
    ("given", "micro_batches", "in_a_v"),
    [
        ({}, 16, True),
        ({}, 74, True),
        ({}, 75, False),  # Megatron's interleaving idles 3 / (2 * 75) of its time, which a tie is
        ({"hybrid_layer_pattern": "M*M*"}, 16, False),
        ({"ckpt_format": "torch", "save": "here"}, 16, False),
        ({"pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|L"}, 16, False),
        ({"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|mL"}, 16, True),
    ],
)
def test_two_chunks_lie_in_a_v_unless_megatron_s_interleaving_is_as_good_or_a_flag_asks_for_it(
    given, micro_batches, in_a_v
):
    spec = auto_spec(args(**given), micro_batches)
    assert spec.places(Size(4, micro_batches, 2)) == (vee(4) if in_a_v else loop(4, 2))
    assert ("vee" in spec.needed(2)) == in_a_v
    assert "split" in spec.needed(2)
    assert not spec.fused


def test_whole_backwards_and_passes_together_have_orders_without_halves():
    whole = auto_spec(args(defer_embedding_wgrad_compute=True), 16)
    assert "split" not in whole.needed(2)
    together = auto_spec(args(overlap_moe_expert_parallel_comm=True), 16)
    assert together.fused
    assert together.needed(2) == {"chunks", "times"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration replays a whole iteration"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp gathers and frees parameters"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations keeps"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"], "num_experts": 8},
            "--cuda-graph-impl transformer_engine captures its order; if memory is short, give --bpipe",
        ),
        ({"external_cuda_graph": True}, "--external-cuda-graph captures its order"),
    ],
)
def test_where_there_is_nothing_to_choose_the_flag_is_named(given, said):
    why = why_stock(args(**given))
    assert why is not None
    assert why.startswith(said)
    assert "\n" not in why


def test_other_flags_leave_a_choice():
    assert why_stock(args(overlap_moe_expert_parallel_comm=True, fp8="hybrid")) is None
