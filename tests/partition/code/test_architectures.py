"""Architectures of Hugging Face's, tiny, cut into two stages: the uncut model's loss to the bit, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import Example
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.trace import trace
from evenpipe.stage_code import Draws, drawing, load_parts, write_stages
from tests.partition.code.cut import SEED, profiled

transformers = pytest.importorskip("transformers")

TOKENS, LENGTH, SIZE = 64, 16, 2
_WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": TOKENS, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**_WIDTH, **_TEXT}
LLAMA = {**BERT, "num_key_value_heads": 2}
HEADS = {**LLAMA, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {**_WIDTH, "image_size": 32, "patch_size": 8, "num_labels": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"state_size": 8, "expand": 2, "head_dim": 16, "num_heads": 4, "n_groups": 2, "chunk_size": 8}
GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1}
_COUNTS = {
    f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))
}
BART = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": TOKENS, **_COUNTS}
HEARS = {"max_source_positions": 16, "max_target_positions": 64, "num_mel_bins": 8, "decoder_start_token_id": 1}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}

#: The class, and its configuration, by `model_type`.
ALWAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", BERT),
    "llama": ("LlamaForCausalLM", LLAMA),
    "vit": ("ViTForImageClassification", VISION),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**HEADS, **EXPERTS, "num_experts": 4}),
    "mamba2": ("Mamba2ForCausalLM", {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, **MAMBA}),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", HEADS),
    "mistral": ("MistralForCausalLM", HEADS),
    "phi": ("PhiForCausalLM", LLAMA),
    "phi3": ("Phi3ForCausalLM", LLAMA),
    "gpt_neox": ("GPTNeoXForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**LLAMA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**BERT, "num_key_value_heads": 4, **EXPERTS, **GROUPED, **LATENT}),
    "gpt_oss": ("GptOssForCausalLM", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "resnet": ("ResNetForImageClassification", RESNET),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**BERT, "projection_dim": 16},
            "vision_config": {**VISION, "projection_dim": 16},
            "projection_dim": 16,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "n_positions": 64}),
    "t5": ("T5ForConditionalGeneration", {**T5, "vocab_size": TOKENS}),
    "opt": ("OPTForCausalLM", {**PLAIN, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "bloom": ("BloomForCausalLM", {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gemma": ("GemmaForCausalLM", HEADS),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, "sliding_window": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", {**HEADS, "sliding_window": 8}),
    "bart": ("BartForConditionalGeneration", {**BART, "max_position_embeddings": 64}),
    "whisper": ("WhisperForConditionalGeneration", {**BART, **HEARS, "pad_token_id": 0}),
    "falcon": ("FalconForCausalLM", {**PLAIN, "max_position_embeddings": 64}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**BERT, **RELATIVE}),
}
NAMES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def inputs_of(name: str) -> dict[str, Any]:
    """Return what its forward takes for a loss."""
    tokens, labels = torch.randint(3, TOKENS, (2, SIZE, LENGTH))
    images = torch.randn(SIZE, 3, 32, 32)
    match name:
        case "vit" | "resnet":
            return {"pixel_values": images, "labels": torch.arange(SIZE)}
        case "clip":
            return {"input_ids": tokens, "pixel_values": images, "return_loss": True}
        case "whisper":
            return {"input_features": torch.randn(SIZE, 8, 2 * LENGTH), "labels": labels}
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_are_the_uncut_model(name, tmp_path):
    """In training, with dropout where the model has it."""
    architecture, fields = (ALWAYS | LONG)[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**fields)
    config.use_cache = False
    model = getattr(transformers, architecture)(config).train()
    inputs = inputs_of(name)
    graph = trace(model, inputs)
    found = profiled(Example(name, model, inputs), graph)
    path = tmp_path / "P.json"
    write_stages(graph, found, find_plan(found, Workload("1f1b", 4), 2, 1 << 34), path)

    received: tuple[torch.Tensor, ...] = ()
    for stage in range(2):
        [part] = load_parts(path, stage, model)
        received = part(inputs, Draws(SEED, 3), *received)
    received[0].backward()
    gradients = {key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    with drawing(SEED, 3):
        loss = model(**inputs).loss
    loss.backward()
    assert torch.equal(received[0], loss)
    expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    assert gradients.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(
            gradients[key], one, rtol=1e-4, atol=1e-6, msg=lambda said, key=key: f"{key}: {said}"
        )
