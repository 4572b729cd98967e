"""The operations that an estimate says Megatron-LM logs are those that its own function counts."""

import ast
from argparse import Namespace

import pytest

from evenpipe.descriptions import model, names
from evenpipe.planner.counted_flops import logged_flops
from evenpipe.planner.run import Run

FUNCTION = "num_floating_point_operations"


class Arguments(Namespace):
    """An argument that was not given is None."""

    def __getattr__(self, name):
        return None


def arguments_of(of):
    latent, experts = of.latent, of.experts
    of_experts = {
        "num_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_layer_freq": [of.expert_layers(layer, layer + 1) for layer in range(of.layers)],
    } if experts else {}  # fmt: skip
    of_latent = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    } if latent else {"group_query_attention": True, "num_query_groups": of.key_value_heads}  # fmt: skip
    return Arguments(
        num_layers=of.layers,
        hidden_size=of.hidden,
        num_attention_heads=of.heads,
        kv_channels=of.head_dim,
        ffn_hidden_size=of.ffn,
        swiglu=of.gated,
        seq_length=of.sequence,
        padded_vocab_size=of.vocabulary,
        mtp_num_layers=of.mtp_layers or None,
        **of_experts,
        **of_latent,
    )


def function_of(megatron_lm):
    """Megatron-LM's own, without the imports of its module, which need a GPU."""
    tree = ast.parse((megatron_lm / "megatron" / "training" / "training.py").read_text())
    own = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    known = dict.fromkeys(("is_linear_attention_variant", "is_hybrid_model"), lambda asked: False)
    exec(compile(ast.Module([own], []), FUNCTION, "exec"), known)
    return known[FUNCTION]


@pytest.mark.every_release
@pytest.mark.parametrize("name", names("models"))
def test_every_model_counts_as_in_megatron_s_log(megatron_lm, name):
    of, batch = model(name), 4
    theirs = function_of(megatron_lm)(arguments_of(of), batch)
    assert logged_flops(of, Run(global_batch=batch, precision="bf16")) == pytest.approx(theirs, rel=1e-3)
