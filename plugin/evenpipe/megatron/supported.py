"""The releases of megatron-core that EvenPipe works with, and what it relies on in each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from evenpipe.upstream import Distribution, Expectation

__all__ = ["MEGATRON_CORE", "RELEASES", "SCHEDULES", "CoreRelease", "installed_release", "recorded"]

MEGATRON_CORE = Distribution("megatron-core", version_at="megatron.core:__version__")
SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@dataclass(frozen=True)
class CoreRelease:
    """One series of megatron-core, as far as its schedules are concerned.

    `process_groups_argument` is the name under which schedules take an instance of `process_groups_class`
    ("module:class") and pass it on to `config.finalize_model_grads_func`; `takes_force_all_reduce` tells whether both
    also take `force_all_reduce`. `signatures` maps "module:attribute" to the recorded signature.
    """

    series: str
    process_groups_argument: str
    process_groups_class: str
    takes_force_all_reduce: bool
    signatures: Mapping[str, str]

    @property
    def backward_takes_pipeline_size(self) -> bool:
        """Whether `backward_step` wants to know the number of stages."""
        return "pipeline_model_parallel_size" in self.signatures[f"{SCHEDULES}:backward_step"]


def installed_release() -> CoreRelease:
    """The release that an import of megatron.core loads, with every signature verified.

    Raises UpstreamError naming the version when it is not supported, or the first symbol that is not as recorded.
    """
    release = RELEASES[MEGATRON_CORE.series(RELEASES)]
    for symbol in release.signatures:
        Expectation(symbol, MEGATRON_CORE, recorded(symbol)).verify()
    return release


def recorded(symbol: str) -> Mapping[str, str]:
    """The recorded signature of `symbol` in every series that has it; what a Patch or an Expectation asks for."""
    return {series: release.signatures[symbol] for series, release in RELEASES.items() if symbol in release.signatures}


_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_PROCESS_GROUPS = "megatron.core.process_groups_config"

_EVERY_SERIES = {
    f"{SCHEDULES}:forward_step": (
        "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
        "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)"
    ),
    f"{SCHEDULES}:deallocate_output_tensor": "(out, deallocate_pipeline_outputs=False)",
    f"{SCHEDULES}:get_tensor_shapes": (
        "(*, seq_length, micro_batch_size, decoder_seq_length, config, tp_group, cp_group)"
    ),
    f"{SCHEDULES}:clear_embedding_activation_buffer": "(config, model, is_last_stage)",
    f"{SCHEDULES}:finish_embedding_wgrad_compute": "(config, embedding_module, is_last_stage, tp_group)",
    f"{SCHEDULES}:get_schedule_table": "(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage)",
}


def _pipelining(tail: str) -> dict[str, str]:
    """Signatures of the two pipelining schedules, which differ between series in their last arguments."""
    signature = (
        "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
        "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
        f"adjust_tensor_shapes_fn=None, p2p_communicator=None, {tail})"
    )
    kinds = ("without_interleaving", "with_interleaving")
    return {f"{SCHEDULES}:forward_backward_pipelining_{kind}": signature for kind in kinds}


def _release(series: str, argument: str, groups: str, force_all_reduce: bool, own: Mapping[str, str]) -> CoreRelease:
    signatures = MappingProxyType({**_EVERY_SERIES, **own})
    return CoreRelease(series, argument, f"{_PROCESS_GROUPS}:{groups}", force_all_reduce, signatures)


RELEASES: Mapping[str, CoreRelease] = MappingProxyType(
    {
        "0.14": _release(
            "0.14",
            "grad_finalize_pgs",
            "GradFinalizeProcessGroups",
            False,
            {
                f"{SCHEDULES}:get_forward_backward_func": "()",
                f"{SCHEDULES}:backward_step": (
                    "(input_tensor, output_tensor, output_tensor_grad, model_type, config, "
                    "pipeline_model_parallel_size=1)"
                ),
                **_pipelining("grad_finalize_pgs=None"),
                _FINALIZE: "(model, num_tokens=None, grad_finalize_pgs=None)",
                f"{_PROCESS_GROUPS}:GradFinalizeProcessGroups": "()",
            },
        ),
        "0.15": _release(
            "0.15",
            "pg_collection",
            "ProcessGroupCollection",
            False,
            {
                f"{SCHEDULES}:get_forward_backward_func": "()",
                f"{SCHEDULES}:backward_step": "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
                **_pipelining("pg_collection=None"),
                _FINALIZE: "(model, num_tokens=None, pg_collection=None)",
                f"{_PROCESS_GROUPS}:ProcessGroupCollection": "(**kwargs)",
            },
        ),
        "0.16": _release(
            "0.16",
            "pg_collection",
            "ProcessGroupCollection",
            True,
            {
                f"{SCHEDULES}:get_forward_backward_func": "(pp_size=None, vp_size=None)",
                f"{SCHEDULES}:backward_step": "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
                **_pipelining("pg_collection=None, force_all_reduce=False"),
                _FINALIZE: "(model, num_tokens=None, pg_collection=None, force_all_reduce=False)",
                f"{_PROCESS_GROUPS}:ProcessGroupCollection": "(**kwargs)",
            },
        ),
    }
)
