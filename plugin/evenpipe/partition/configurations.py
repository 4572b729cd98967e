"""The models of DawnPiper's evaluation (§5.1) by name, and the configurations of those that transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CONFIGURATIONS", "MODELS"]

_T5: Final = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 1024,
    "d_kv": 64,
    "num_layers": 24,
    "num_heads": 16,
    "decoder_start_token_id": 0,
}
_SMALL_T5: Final = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}

# Configurations as their authors published them. The paper's T5 has 780 million parameters, to which t5-v1.1-large
# (783 M) is nearer than t5-large (738 M).
CONFIGURATIONS: Final[Mapping[str, tuple[dict[str, Any], dict[str, Any]]]] = {  # full size, and what is small
    "bert-large": (
        {
            "model_type": "bert",
            "architectures": ["BertForPreTraining"],
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 128,
        },
    ),
    "gpt2-large": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1280, "n_layer": 36, "n_head": 20},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "t5-large": (_T5 | {"d_ff": 4096}, _SMALL_T5),
    "t5-v1.1-large": (
        _T5 | {"d_ff": 2816, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _SMALL_T5,
    ),
}

MODELS: Final = (*CONFIGURATIONS, "amoebanet-d")
