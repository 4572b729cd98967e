"""What --group-size auto, and what asks for the memory of a process, calls of megatron-core beyond schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from evenpipe.megatron.supported import PARALLEL_STATE, Changes, expected, members
from evenpipe.upstream import PRESENT

__all__ = ["ADAPTIVE", "LOGGED_LOSSES", "RANDOM_NUMBERS", "STATIC_MEMORY"]

_TRANSFORMER: Final = "megatron.core.transformer"
_DDP: Final = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_OPTIMIZERS: Final = "megatron.core.optimizer.optimizer"

LOGGED_LOSSES: Final[Mapping[str, Changes]] = {
    f"{_TRANSFORMER}.multi_token_prediction:MTPLossLoggingHelper.tracker": PRESENT,
    f"{_TRANSFORMER}.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.tracker": {"0.16": PRESENT},
}
"""Dictionaries, beside the experts', in which models add up losses for the log; a model need not use their modules."""

STATIC_MEMORY: Final = expected(
    {
        f"{PARALLEL_STATE}:get_global_memory_buffer": "()",
        "megatron.core.utils:GlobalMemoryBuffer.buffer": PRESENT,
        **members(_DDP, ("module", "buffers", "expert_parallel_buffers")),
        **members("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer", ("param_data", "grad_data")),
        **members(f"{_OPTIMIZERS}:ChainedOptimizer", ("chained_optimizers", "is_stub_optimizer")),
        f"{_OPTIMIZERS}:MegatronOptimizer.optimizer": PRESENT,
    }
)
"""What a process holds from batch to batch."""

RANDOM_NUMBERS: Final = expected(
    {
        "megatron.core.tensor_parallel:get_cuda_rng_tracker": (
            "(use_te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False)"
        ),
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states": "(self)",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states": "(self, states)",
    }
)
"""What leaves Megatron's random numbers as they were."""

ADAPTIVE: Final = (
    *STATIC_MEMORY,
    *RANDOM_NUMBERS,
    *expected(
        {
            f"{_DDP}.zero_grad_buffer": "(self)",
            f"{_TRANSFORMER}.moe.moe_utils:clear_aux_losses_tracker": "()",
            "megatron.core.models.bert.bert_model:BertModel": PRESENT,
            **LOGGED_LOSSES,
        }
    ),
)
"""Of --group-size auto."""
