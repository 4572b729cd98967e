"""Reads the flags of a script of Megatron's and times a small model that has each kind of layer once.

As a script: what is asked for on standard input; what was found, as JSON, on the last line of standard output.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from evenpipe.layouts.gpt import Gpt, LayoutError, Pipeline, parse_flags
from evenpipe.layouts.layers import kinds
from evenpipe.layouts.measured import measured
from evenpipe.layouts.plan import even_layout
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.megatron_lm.cpu_scripts import install_cpu_mode
from evenpipe.megatron_lm.flags import add_flags
from evenpipe.runtime.precisions import PRECISIONS

__all__ = ["build", "read"]

_MTP_WITH_LOSS: Final = ("0.14", "0.15")
_NEED_A_GPU: Final = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"),
    *("gradient_accumulation_fusion", "apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
    *("moe_router_fusion", "cross_entropy_loss_fusion", "tp_comm_overlap", "moe_shared_expert_overlap"),
    *("overlap_p2p_comm", "delay_wgrad_compute", "overlap_moe_expert_parallel_comm", "enable_cuda_graph"),
)


def read(flags: Sequence[str], world_size: int | None, measure: bool = True) -> tuple[Namespace, Gpt, Pipeline]:
    """Parsed by megatron.training, where there is one, which also validates them with the even layout in them.

    `measure`: times are to be measured here.
    """
    if flags and not flags[0].startswith("-"):
        if not Path(flags[0]).is_file():
            raise LayoutError(f"{flags[0]}: no such script: name pretrain_gpt.py of your checkout, then its flags")
        sys.path.insert(0, str(Path(flags[0]).resolve().parent))
        flags = flags[1:]
    if importlib.util.find_spec("megatron.training") is None:
        args = parse_flags(flags)
        gpt = Gpt.of(args, world_size, latent=not measure)
        return args, gpt, gpt.pipeline(args)
    from megatron.training import arguments

    sys.argv = ["pretrain_gpt.py", *flags]
    args = arguments.parse_args(extra_args_provider=add_flags)
    gpt = Gpt.of(args, world_size, latent=not measure)
    pipeline = gpt.pipeline(args)
    checked = copy.deepcopy(args)
    checked.pipeline_model_parallel_layout = even_layout(gpt, pipeline)
    checked.num_virtual_stages_per_pipeline_rank = checked.num_layers_per_virtual_pipeline_stage = None
    checked.world_size = gpt.run.gpus
    arguments.validate_args(checked)
    arguments.core_transformer_config_from_args(checked)
    return checked, gpt, pipeline


def build(args: Namespace, gpt: Gpt) -> tuple[torch.nn.Module, dict[str, torch.nn.Module]]:
    """Return a model with one layer of each kind, and its parts by kind, in order; what follows them is "loss"."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from evenpipe.megatron.train_engine.profile import fake_groups

    described, run = gpt
    dist.new_group = fake_groups(dist.new_group)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.tensor)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layers = [kind for kind in kinds(gpt) if kind in ("dense", "experts")]
    if (layers[-1] == "experts") != gpt.has_experts(described.layers - 1):
        layers.reverse()  # MTP layers are like the last one
    config = _config(args, gpt, [int(kind == "experts") for kind in layers])
    spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=described.vocabulary,
        max_sequence_length=described.max_positions or described.sequence,
        share_embeddings_and_output_weights=described.tied,
        position_embedding_type="learned_absolute" if described.positions == "learned" else "rope",
        mtp_block_spec=specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        if described.mtp_layers
        else None,
    ).to(PRECISIONS[str(run.precision)])
    parts = {"embedding": model.embedding, **dict(zip(layers, model.decoder.layers, strict=True))}
    return model, parts | ({"mtp": model.mtp} if described.mtp_layers else {})


def _config(args: Namespace, gpt: Gpt, layers: list[int]) -> Any:
    """Megatron's, of what the flags say about a layer, for as many layers as there are kinds, and without a GPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    silent = {name: value for name, value in vars(args).items() if name in known and value is not None}
    model, run = gpt
    described = model.experts
    experts = described.count // run.expert if described else 0
    decided: dict[str, Any] = {
        **dict.fromkeys(_NEED_A_GPU, False),
        "num_layers": len(layers),
        "moe_layer_freq": layers,
        "num_moe_experts": experts or None,
        "moe_router_topk": min(described.chosen, experts) if described else 2,
        "num_query_groups": model.key_value_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "moe_ffn_hidden_size": described.ffn if described else None,
        "gated_linear_unit": model.gated,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "tensor_model_parallel_size": run.tensor,
        "params_dtype": PRECISIONS[str(run.precision)],
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "alltoall",
        "attention_softmax_in_fp32": True,
        "deallocate_pipeline_outputs": False,
    }
    if model.gated:
        decided["activation_func"] = torch.nn.functional.silu
    # Full recomputation, added to what is measured without, would hide where a layer's nodes are.
    decided["recompute_granularity"] = "selective" if run.recompute == "selective" else None
    decided |= {"recompute_method": None, "recompute_num_layers": None}
    left_out = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size", "fp8", "fp4")
    given = {name: value for name, value in {**silent, **decided}.items() if name in known and name not in left_out}
    return TransformerConfig(**given)


def _main() -> None:
    asked = json.load(sys.stdin)
    install_cpu_mode()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            args, gpt, pipeline = read(asked["flags"], asked["world_size"], asked["measure"])
            series = MEGATRON_CORE.series(RELEASES)
            times = measured(gpt, lambda: build(args, gpt)) if asked["measure"] else {}
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise SystemExit(" ".join(str(error).split()) or f"Megatron refuses these flags: {where.line}") from None
    found = {
        "gpt": TypeAdapter(Gpt).dump_python(gpt, mode="json"),
        "pipeline": dataclasses.astuple(pipeline),
        "times": times,
    }
    print(json.dumps({**found, "version": series, "mtp_apart": series not in _MTP_WITH_LOSS}))


if __name__ == "__main__":
    _main()
