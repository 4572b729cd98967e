"""The profile that layouts are planned with, and the planner's descriptions, are of the same model: they agree."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from evenpipe.partition.layouts import Shape, kinds, profile_of, roofline
from evenpipe.planner.arguments import Pipelined, model_of, run_of
from evenpipe.planner.descriptions import device
from evenpipe.planner.operations.parts import Block, Blocks, Part
from evenpipe.planner.stage_bytes import chunks_of, stage_memory_of

GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "padded_vocab_size": 51200,
    "bf16": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_flash_attn": True,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 5632,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
DIVIDED = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 4096, "add_bias_linear": False}


@pytest.mark.parametrize(
    "changed",
    [{}, LLAMA, DIVIDED, LLAMA | DIVIDED, EXPERTS],
    ids=["gpt", "llama", "gpt tp4", "llama tp4", "experts"],
)
def test_each_layer_keeps_and_holds_as_much(changed: dict[str, Any]) -> None:
    args = Namespace(**{**GPT, **changed})
    shape, model, run = Shape.of(args), model_of(args, "own"), run_of(args, Pipelined())
    times = {kind: roofline(shape, kind, device("h100")) for kind in kinds(shape)}
    nodes = profile_of(shape, times, device="h100", versions={}).nodes
    layer: Block = "expert layer" if model.experts else "layer"
    parts: dict[str, Part] = {"embedding": {"embedding": 1}, "layers.1": {layer: 1}, "loss": {"head": 1}}
    for name, part in parts.items():
        own = [node for node in nodes if node.name.partition(".")[0] == name or node.name.startswith(f"{name}.")]
        [described] = stage_memory_of(chunks_of([part], Blocks(model, run)), run, 0)
        kept = sum(node.activation_bytes for node in own)
        assert described.sample_bytes * run.micro_batch == pytest.approx(kept, rel=0.02), name
        if name == "loss" and model.tied:
            continue  # the matrix is the embedding's, whose node has it
        held = sum(node.parameter_bytes + node.gradient_bytes + node.optimizer_bytes for node in own)
        assert described.static_bytes == pytest.approx(held, rel=0.02), name
