"""What 2BW calls of megatron-core beyond its schedules, and the signature of each in every release."""

from __future__ import annotations

from types import MappingProxyType

from evenpipe.megatron.supported import MEGATRON_CORE, since
from evenpipe.upstream import Expectation

__all__ = ["verify_relied_on"]

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_SELF = since({"0.14": "(self)"})

_SIGNATURES = MappingProxyType(
    {
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32": since(
            {"0.14": "(parameters, max_norm, total_norm, use_decoupled_grad=False)"}
        ),
        f"{_OPTIMIZER}:MegatronOptimizer.get_grad_stats_parallel_group": _SELF,
        f"{_OPTIMIZER}:MegatronOptimizer.get_parameters": _SELF,
        f"{_OPTIMIZER}:FP32Optimizer.prepare_grads": _SELF,
        f"{_OPTIMIZER}:FP32Optimizer.step_with_ready_grads": _SELF,
        f"{_OPTIMIZER}:MixedPrecisionOptimizer.prepare_grads": _SELF,
        f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads": _SELF,
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads": _SELF,
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling": _SELF,
        f"{_DISTRIBUTED}._copy_model_grads_to_main_grads": _SELF,
        f"{_DISTRIBUTED}._collect_main_grad_data_for_unscaling": _SELF,
        f"{_DISTRIBUTED}._get_model_param_range_map": since({"0.14": "(self, param)"}),
        f"{_DISTRIBUTED}.step_with_ready_grads": _SELF,
        f"{_BUCKETS}.start_grad_sync": since({"0.14": "(self)", "0.16": "(self, force_all_reduce=False)"}),
        f"{_BUCKETS}.finish_grad_sync": since({"0.14": "(self)", "0.16": "(self, force_all_reduce=False)"}),
        f"{_BUCKETS}.start_param_sync": since({"0.14": "(self, force_sync=False)"}),
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer": _SELF,
        "megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate": since(
            {
                "0.14": "(param)",
                "0.16": "(param, tp_group=None)",
                "0.19": "(param, tp_group=None, expert_tp_group=None)",
            }
        ),
        "megatron.core.transformer.module:param_is_not_shared": since({"0.14": "(param)"}),
    }
)


def verify_relied_on() -> None:
    """Raise UpstreamError naming the first of them that is not as recorded for the installed release."""
    for symbol, signatures in _SIGNATURES.items():
        Expectation(symbol, MEGATRON_CORE, signatures).verify()
