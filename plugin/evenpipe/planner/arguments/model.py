"""The model that Megatron's arguments describe."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from evenpipe.planner.arguments.values import FlagError, Values, expert_layers, padded_vocabulary
from evenpipe.planner.descriptions import Model, described

__all__ = ["model_of"]

#: Models whose layers are none of those that are described.
_OTHERS: Final = {
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "is_hybrid_model": "--is-hybrid-model",
}


def model_of(args: Namespace, name: str, causal: bool = True) -> Model:
    """From arguments that Megatron has parsed; ``causal``: each token sees those before it, as BERT's do not.

    Raises FlagError for a model that is none of these, DescriptionError for sizes that do not go together.
    """
    value = Values(args)
    for other, flag in _OTHERS.items():
        if value(other, None):
            raise FlagError(f"{flag}: estimates are of GPT and BERT with equal layers: leave --estimate out")
    said: dict[str, Any] = {
        "layers": value.needed("num_layers"),
        "hidden": value.needed("hidden_size"),
        "heads": value.needed("num_attention_heads"),
        "key_value_heads": value.group_count,
        "head_dim": value("kv_channels", 0),
        "ffn": value.ffn,
        "gated": value.gated,
        "norm": "rms" if value("normalization", "LayerNorm") == "RMSNorm" else "layer",
        "biases": bool(value("add_bias_linear", True)),
        "dropout": bool(value("hidden_dropout", 0.1) or value("attention_dropout", 0.1)),
        "positions": "learned" if value.learned_positions else "rotary",
        "vocabulary": padded_vocabulary(value),
        "sequence": value.needed("seq_length"),
        "causal": causal,
        "tied": not value("untie_embeddings_and_output_weights", False),
        "mtp_layers": value("mtp_num_layers", 0),
    }
    if value("num_experts", 0):
        said["experts"] = _experts(value)
    if value("multi_latent_attention", False):
        said |= {"key_value_heads": 0, "latent": _latent(value)}
    return described(Model, name, said, "the flags")


def _experts(value: Values) -> dict[str, Any]:
    layers = expert_layers(value("moe_layer_freq", 1), value.needed("num_layers"))
    return {
        "count": value("num_experts", 0),
        "chosen": value("moe_router_topk", 2),
        "ffn": value("moe_ffn_hidden_size", value.ffn),
        "shared_ffn": value("moe_shared_expert_intermediate_size", 0),
        "layers": layers,
    }


def _latent(value: Values) -> dict[str, int]:
    if not value("q_lora_rank", 0):
        raise FlagError("--multi-latent-attention: queries from low ranks only: give --q-lora-rank")
    return {
        "query_rank": value("q_lora_rank", 0),
        "key_value_rank": value("kv_lora_rank", 512),
        "plain_dim": value("qk_head_dim", 128),
        "rotary_dim": value("qk_pos_emb_head_dim", 64),
        "value_dim": value("v_head_dim", 128),
    }
