"""What Megatron's arguments say of model and run."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from evenpipe.descriptions import DescriptionError, cluster, model
from evenpipe.planner.arguments import FlagError, Pipelined, model_of, run_of
from evenpipe.planner.estimate import estimate
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import parameters_of

GPT3: dict[str, Any] = {
    "num_layers": 80,
    "hidden_size": 9984,
    "num_attention_heads": 104,
    "seq_length": 2048,
    "padded_vocab_size": 51200,
    "micro_batch_size": 2,
    "global_batch_size": 128,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 8,
    "data_parallel_size": 1,
    "fp16": True,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "recompute_granularity": "selective",
    "transformer_impl": "local",
}


def args(**changed: Any) -> Namespace:
    return Namespace(**{**GPT3, **changed})


OWN = Pipelined()


def run(pipelined: Pipelined = OWN, layout: list[list[str]] | None = None, **changed: Any) -> Run:
    return run_of(args(**changed), pipelined, layout)


def parameters(**changed: Any) -> float:
    """10^9, of the whole model, embeddings' copies left out."""
    of = model_of(args(**changed), "own").model_copy(update={"mtp_layers": 0})
    alone = Run(global_batch=1, precision="bf16", attention="flash")
    return sum(parameters_of(part, Blocks(of, alone)).all for part in parts_of(of, alone)) / 1e9


def test_flags_of_what_no_description_says_are_told() -> None:
    assert model_of(args(), "own").left_out == ()
    windowed = {"window_size": (128, 0), "add_qkv_bias": True, "add_bias_linear": False}
    told = model_of(args(**windowed), "own")
    assert told.left_out == (
        "biases of queries, keys and values",
        "sliding windows (all attention is estimated in full)",
    )
    latent = {"multi_latent_attention": True, "q_lora_rank": 1536, "qk_layernorm": True}
    of = model_of(args(**latent), "own")
    assert (of.left_out, of.qk_norm) == ((), False), "norms of its low ranks are described"
    every_second = model_of(args(**windowed, window_attn_skip_freq=2, qk_layernorm=True), "own")
    assert (every_second.window, every_second.qk_norm) == (128, True)
    assert len(every_second.left_out) == 1


def test_a_model_that_has_a_description_has_the_same_by_its_flags() -> None:
    described = model("gpt3-96b")
    told = model_of(args(), "gpt3-96b")
    assert told.model_dump(exclude={"sources", "framework"}) == described.model_dump(exclude={"sources", "framework"})
    nodes = cluster("4x8-a100-80gb")
    by_name = Run(
        global_batch=128,
        tensor=4,
        stages=8,
        micro_batch=2,
        recompute="selective",
        attention="unfused",
        precision="fp16",
    )
    by_flags = run(Pipelined("1f1b", True))
    assert by_flags.blocking == ()
    shown = [estimate(of, nodes, one) for of, one in ((told, by_flags), (described, by_name))]
    assert shown[0].stages[3].bytes.weights == shown[1].stages[3].bytes.weights
    assert shown[0].mfu == pytest.approx(shown[1].mfu, rel=0.1)


def test_llama_3_and_deepseek_v3_by_their_flags_have_their_parameters() -> None:
    llama = {"group_query_attention": True, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
    untied = {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"}
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    found = parameters(**llama, **untied, **sizes, ffn_hidden_size=14336, padded_vocab_size=128256)
    assert found == pytest.approx(8.03, rel=0.003)
    experts = {
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_layer_freq": "([0]*3+[1]*58)",
    }
    latent = {"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128}
    sizes = {"num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "ffn_hidden_size": 18432}
    shared = {"moe_shared_expert_intermediate_size": 2048, "mtp_num_layers": 1, "padded_vocab_size": 129280}
    llama["group_query_attention"] = False
    assert parameters(**llama, **untied, **experts, **latent, **sizes, **shared) == pytest.approx(671, rel=0.005)


def test_every_second_layer_may_have_experts() -> None:
    of = model_of(args(num_experts=8, moe_layer_freq=2), "own")
    counted = parts_of(of, Run(global_batch=8, stages=8, tensor=4))
    assert [(part["layer"], part["expert layer"]) for part in counted] == [(5, 5)] * 8


def test_expert_tensor_parallelism_of_its_own_gives_each_rank_whole_experts() -> None:
    of = model_of(args(num_experts=8, moe_ffn_hidden_size=4096, add_bias_linear=False), "own")

    def expert_parameters(run: Run) -> float:
        return parameters_of({"expert layer": 1}, Blocks(of, run)).expert

    shape = Run(global_batch=8, tensor=4, data=2, precision="bf16", attention="flash")
    divided, whole = (Run(**{**shape.__dict__, "expert": e, "expert_tensor": t}) for e, t in ((2, None), (8, 1)))
    assert expert_parameters(divided) == expert_parameters(whole)
    assert (divided.expert_replicas, whole.expert_replicas) == (1, 1)


def test_megatron_s_own_schedule_waits_and_ours_does_not() -> None:
    virtual = {"virtual_pipeline_model_parallel_size": 2}
    assert run().blocking == run(**virtual).blocking == ("1f1b",), "virtual stages overlap unless they are told not to"
    assert run(overlap_p2p_comm=False, **virtual).blocking == ("1f1b", "interleaved")
    assert (run(**virtual).schedule, run(**virtual).chunks) == ("interleaved", 2)
    assert run(Pipelined("kfkb", group_size=2)).group_size == 2


def test_layouts_of_all_kinds() -> None:
    ends = run(decoder_first_pipeline_num_layers=7, decoder_last_pipeline_num_layers=13)
    assert ends.layout == (7, *(10,) * 6, 13)
    counted = run(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True, num_layers=78)
    assert counted.layout == (9, *(10,) * 6, 9)
    parts = [["embedding", *["decoder"] * 11], *[["decoder"] * 11] * 6, ["decoder", "decoder", "decoder", "loss"]]
    assert run(layout=parts).layout == (11,) * 7 + (3,)
    apart = run(layout=[*parts[:-1], ["decoder"] * 3, ["mtp"], ["loss"]], pipeline_model_parallel_size=10)
    assert (apart.layout, apart.further_part) == ((11,) * 7 + (3, 0, 0), 8)
    with pytest.raises(FlagError, match="do not divide among the other 7 stages"):
        run(decoder_first_pipeline_num_layers=9)


def test_block_recomputation_keeps_the_other_layers() -> None:
    whole, block, none = (
        run(recompute_granularity=how, recompute_method=method, recompute_num_layers=4)
        for how, method in (("full", "uniform"), ("full", "block"), (None, None))
    )
    assert (whole.recomputed_layers, block.recomputed_layers) == (None, 4)
    of, nodes = model_of(args(), "own"), cluster("4x8-a100-80gb")
    held = [estimate(of, nodes, one).stages[3].bytes.activations for one in (whole, block, none)]
    # Of ten layers four keep their input only.
    assert held[1] == pytest.approx(0.4 * held[0] + 0.6 * held[2], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "unfused"),
        ({"use_flash_attn": True}, "flash"),
        ({"transformer_impl": "transformer_engine"}, "flash"),
        ({"transformer_impl": "transformer_engine", "attention_backend": "unfused"}, "unfused"),
    ],
)
def test_attention(given: dict[str, Any], kind: str) -> None:
    assert run(**given).attention == kind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden_size": None}, "--hidden-size: not given"),
        ({"padded_vocab_size": None}, "--vocab-size: not given"),
        ({"hybrid_layer_pattern": "M*M*"}, "--hybrid-layer-pattern: estimates are of GPT and BERT"),
        ({"num_attention_heads": 7}, "the flags: own.*: --hidden-size 9984 does not divide by --num-attention-heads 7"),
        ({"num_experts": 8, "moe_layer_freq": "[1]*4"}, "--moe-layer-freq: 4 entries for 80 layers"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises((FlagError, DescriptionError), match=said) as caught:
        model_of(args(**given), "own")
    assert "\n" not in str(caught.value)


def test_virtual_stages_are_estimated_in_megatrons_groups() -> None:
    flags = {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 48}
    assert run(**flags, microbatch_group_size_per_vp_stage=8).group_size == run(**flags).group_size == 1
    nodes, found = cluster("4x8-a100-80gb"), {}
    for group in (8, 12):
        shown = run(**flags, microbatch_group_size_per_vp_stage=group)
        found[group] = estimate(model("gpt3-96b"), nodes, shown).stages[0].bytes.activations
    assert found[12] / found[8] == pytest.approx(27 / 23, rel=0.01)  # 2 (p - 1) + (v - 1) k + 1


def test_learned_positions_have_as_many_rows_as_the_flags_say() -> None:
    """The embedding's other parameters are 51,200 words."""
    shape = Run(global_batch=1, precision="bf16", attention="flash")

    def rows(**changed: Any) -> float:
        of = model_of(args(**changed), "own")
        return parameters_of({"embedding": 1}, Blocks(of, shape)).all / of.hidden - 51200

    assert rows() == 2048
    assert rows(max_position_embeddings=4096) == 4096
    assert rows(max_position_embeddings=4096, position_embedding_type="rope") == 0
