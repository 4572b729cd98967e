"""What the trainer's engine calls of megatron-core beyond a schedule, and sets on what it has made."""

from __future__ import annotations

from typing import Final

from evenpipe.megatron.supported import PARALLEL_STATE, Changes, expected, members
from evenpipe.megatron.training_supported import training_expected
from evenpipe.upstream import ANY, PRESENT, Distribution, Expectation

__all__ = ["TRAINED", "layer_kinds", "without_processes"]

_MODELS: Final = "megatron.core.models"
_CONFIG: Final = "megatron.core.model_parallel_config:ModelParallelConfig"
_SCHEDULER: Final = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
_TENSOR_PARALLEL: Final = "megatron.core.tensor_parallel"
_ANY_RANK: Final = (
    *("get_pipeline_model_parallel_rank", "get_tensor_model_parallel_rank", "get_data_parallel_rank"),
    "get_expert_model_parallel_rank",
)

_LAYER_KINDS: Final[dict[str, Changes]] = {
    **members(PARALLEL_STATE, ("initialize_model_parallel",)),
    f"{_TENSOR_PARALLEL}:model_parallel_cuda_manual_seed": PRESENT,
    f"{_MODELS}.gpt:GPTModel": PRESENT,
    **members(f"{_MODELS}.gpt.gpt_layer_specs", ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec")),
    "megatron.core.transformer.transformer_config:TransformerConfig": PRESENT,
}

TRAINED: Final = (
    *expected(
        {
            **members(PARALLEL_STATE, ("initialize_model_parallel", *_ANY_RANK, "get_data_parallel_group")),
            f"{PARALLEL_STATE}:destroy_model_parallel": "()",
            **members(
                "megatron.core.distributed",
                ("DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"),
            ),
            **members(
                "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
                ("no_sync", "zero_grad_buffer"),
                "(self)",
            ),
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_grad_sync": (
                "(self, *unused)"
            ),
            f"{_MODELS}.bert.bert_layer_specs:bert_layer_local_spec": PRESENT,
            f"{_MODELS}.bert.bert_model:BertModel": PRESENT,
            f"{_MODELS}.gpt:GPTModel": PRESENT,
            f"{_MODELS}.gpt.gpt_layer_specs:get_gpt_layer_local_spec": PRESENT,
            **members("megatron.core.optimizer", ("MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer")),
            **members(
                "megatron.core.optimizer.optimizer:ChainedOptimizer", ("chained_optimizers", "is_stub_optimizer")
            ),
            _SCHEDULER: PRESENT,
            f"{_SCHEDULER}.step": "(self, increment)",
            f"{_SCHEDULER}.state_dict": "(self)",
            f"{_SCHEDULER}.load_state_dict": "(self, state_dict)",
            "megatron.core.transformer.module:Float16Module": "(config, module)",
            "megatron.core.transformer.transformer_config:TransformerConfig": PRESENT,
            "megatron.core.pipeline_parallel:get_forward_backward_func": PRESENT,
            f"{_TENSOR_PARALLEL}:get_cuda_rng_tracker": PRESENT,
            f"{_TENSOR_PARALLEL}:model_parallel_cuda_manual_seed": PRESENT,
        }
    ),
    *expected(
        members(_CONFIG, ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "grad_scale_func")),
        "as Megatron-LM's training loop sets them",
    ),
)


def layer_kinds() -> list[Expectation]:
    """Return what is called to build a small model that has each kind of layer once, from a script's flags."""
    of_scripts = training_expected(
        *(f"megatron.training.arguments:{name}" for name in ("parse_args", "validate_args")),
        "megatron.training.arguments:core_transformer_config_from_args",
    )
    return [*of_scripts, *expected(_LAYER_KINDS)]


def without_processes() -> list[Expectation]:
    """Return what of torch is set in a process of its own, where a model is made without memory or other ranks."""
    group = "groups are made of one process, whatever backend is asked for"
    mask = "on the meta device, dropout saves what CUDA's does"
    torch = Distribution("torch")
    return [
        Expectation("torch.distributed.distributed_c10d:new_group", torch, {ANY: PRESENT}, group),
        Expectation("torch.nn.functional:dropout", torch, {ANY: PRESENT}, mask),
    ]
