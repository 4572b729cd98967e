"""Megatron's flags for the keys of a model's description, in which a user is told what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["MODEL_FLAGS"]

MODEL_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "layers": "--num-layers",
        "hidden": "--hidden-size",
        "heads": "--num-attention-heads",
        "key_value_heads": "--num-query-groups",
        "head_dim": "--kv-channels",
        "ffn": "--ffn-hidden-size",
        "max_positions": "--max-position-embeddings",
        "vocabulary": "--vocab-size",
        "sequence": "--seq-length",
        "mtp_layers": "--mtp-num-layers",
        "window": "--window-size",
        "experts.count": "--num-experts",
        "experts.chosen": "--moe-router-topk",
        "experts.ffn": "--moe-ffn-hidden-size",
        "experts.shared_ffn": "--moe-shared-expert-intermediate-size",
        "experts.groups": "--moe-router-num-groups",
        "experts.chosen_groups": "--moe-router-group-topk",
        "experts.layers": "--moe-layer-freq",
        "latent.query_rank": "--q-lora-rank",
        "latent.key_value_rank": "--kv-lora-rank",
        "latent.plain_dim": "--qk-head-dim",
        "latent.rotary_dim": "--qk-pos-emb-head-dim",
        "latent.value_dim": "--v-head-dim",
    }
)
