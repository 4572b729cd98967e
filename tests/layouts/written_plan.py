"""A plan as a file, for flags of which layers take made-up times."""

import json
from argparse import Namespace
from pathlib import Path

from evenpipe.layouts.gpt import Gpt, Pipeline
from evenpipe.layouts.layers import Time, kinds, layers_of
from evenpipe.layouts.plan import plan_layout

__all__ = ["FLAGS", "write_plan"]

FLAGS = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "vocab_size": 8000,
    "num_experts": 4,
    "mtp_num_layers": 1,
    "pipeline_model_parallel_size": 2,
}


def write_plan(path: Path, chunks: int = 1) -> Path:
    """For FLAGS, and so many chunks a stage; returns `path`."""
    gpt = Gpt.of(Namespace(**FLAGS))
    layers = layers_of(gpt, {kind: {kind: Time(1.0, 2.0, 100)} for kind in kinds(gpt)})
    plan = plan_layout(layers, Pipeline(2, chunks, 8), mtp_apart=True, source="roofline", gpt=gpt)
    path.write_text(json.dumps(plan.to_json()))
    return path
