"""Megatron-core on machines without a GPU: its own modules on the CPU, and the patches for them."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from evenpipe.megatron.supported import core_patch, expected, members
from evenpipe.upstream import PRESENT, Patch, PatchSet
from evenpipe.upstream.torch_cuda import no_gpu, without_cuda

__all__ = [
    "DATASETS",
    "EXPERTS",
    "cpu_mode",
    "have_dataset_helpers",
    "stand_in_for_triton_kernels",
    "take_dataset_helpers_from_the_wheel",
    "without_transformer_engine",
]


DATASETS = "megatron.core.datasets"
EXPERTS = "megatron.core.transformer.moe.moe_utils"
_HELPERS = f"{DATASETS}.helpers_cpp"
_TRITON_KERNELS = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.paged_stash",
)


def have_dataset_helpers() -> bool:
    """Return whether Megatron's compiled dataset helpers are loaded or can be."""
    return _HELPERS in sys.modules or importlib.util.find_spec(_HELPERS) is not None


def take_dataset_helpers_from_the_wheel() -> None:
    """Load the helpers of an installed megatron-core in a checkout that has not compiled its own.

    Their functions are the same in every supported release. Does nothing where there are none.
    """
    file = None if have_dataset_helpers() else _installed_helpers()
    spec = None if file is None else importlib.util.spec_from_file_location(_HELPERS, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_HELPERS] = module
    vars(import_module(DATASETS))["helpers_cpp"] = module


def _installed_helpers() -> Path | None:
    try:
        wheel = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    files = (Path(str(wheel.locate_file(f"{_HELPERS.replace('.', '/')}{suffix}"))) for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.exists()), None)


def without_transformer_engine() -> None:
    """Routers look for its matrix product under a name that nothing has without it; None has them take torch's."""
    vars(import_module(EXPERTS)).setdefault("te_general_gemm", None)


def stand_in_for_triton_kernels() -> None:
    """Without triton, let the modules that are written in it be imported; what is called in them raises."""
    if importlib.util.find_spec("triton") is None:
        for name in _TRITON_KERNELS:
            sys.modules.setdefault(name, _WithoutTriton(name))


class _WithoutTriton(ModuleType):
    """Has every function, and each of them raises ImportError."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
            raise ImportError(f"{self.__name__}.{name} needs triton, and a GPU: leave out the flag that asks for it")

        return unavailable


_RANDOM: Final = "megatron.core.tensor_parallel.random"
_OPTIMIZER: Final = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_DISPATCHER: Final = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"


_ASSIGNED: Final = (
    *expected(
        members(_DISPATCHER, ("input_splits", "output_splits")),
        "megatron-core makes numbers, which an all-to-all wants, of the counts of experts' tokens on a GPU only",
    ),
    *expected(
        {"megatron.core.model_parallel_config:ModelParallelConfig.sequence_parallel": PRESENT},
        "megatron-core's own layer norm is made as if without sequence parallelism, and its parameters marked for it",
    ),
    *expected(
        {f"{EXPERTS}:te_general_gemm": PRESENT},
        "routers look for Transformer Engine's matrix product under a name that nothing has without it",
    ),
    *expected(
        {
            "megatron.core.transformer.custom_layers:batch_invariant_kernels": {"0.16": PRESENT},
            "megatron.core.transformer.moe:paged_stash": {"0.18": PRESENT},
        },
        "modules that are written in triton can be imported where there is none; what is called in them raises",
    ),
    *expected({f"{_OPTIMIZER}.model_param_group_index_map": PRESENT, f"{_OPTIMIZER}.optimizer": PRESENT}),
)


def cpu_mode(device: str = "cpu") -> PatchSet:
    """Return the patches that make megatron-core train on CPU; nothing changes before `apply()` is called on them.

    With `device` "meta" models have shapes but neither memory nor values: to find out what they would take.

    Apply them before the first model is built. Refused where CUDA is available: with them in place, tensors stay on the
    CPU and the "CUDA" random state is the CPU's.
    """
    return PatchSet("cpu-mode", [*without_cuda(device), *_core_patches()], _ASSIGNED, guard=no_gpu)


def _core_patches() -> Iterator[Patch]:
    for symbol, call, reason, signature in (
        (
            f"{_RANDOM}:_set_cuda_rng_state",
            _set_random_state,
            "megatron-core keeps the CUDA random state; without CUDA every draw comes from the CPU's generator",
            "(new_state, device=-1, graph_safe=False)",
        ),
        (
            f"{_RANDOM}:CudaRNGStatesTracker.fork",
            _without_warning,
            "megatron-core warns when a draw inside a fork moves the CPU's random state; here every draw does",
            "(self, name='model-parallel-rng')",
        ),
        (
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            _send_aliases,
            "megatron-core frees a stage's output while gloo still sends it; an alias keeps the memory until then "
            "(a p2p_communicator= of 0.19 could, but scripts give none)",
            "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)",
        ),
        (
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _mark_for_sequence_parallel,
            "megatron-core has sequence parallelism only with the layer norms of Apex and Transformer Engine",
            "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
            "normalization='LayerNorm')",
        ),
        (
            f"{_DISPATCHER}._maybe_dtoh_and_synchronize",
            _with_numbers,
            "megatron-core makes numbers, which an all-to-all wants, of the counts of experts' tokens on a GPU only",
            "(self, point, tokens_per_expert=None)",
        ),
        # What is needed for the distributed optimizer to load what it has saved.
        (
            f"{_OPTIMIZER}.state_dict",
            _with_state,
            "the distributed optimizer, about to load, wants the step count that torch's Adam has only after a step",
            "(self)",
        ),
        (
            f"{_OPTIMIZER}._get_main_param_and_optimizer_states",
            _without_step,
            "the distributed optimizer takes the step count of torch's Adam for a tensor as long as the parameter",
            "(self, model_param)",
        ),
        (
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            _keep_step,
            "the distributed optimizer looks for the step count of torch's Adam among the saved tensors, where it is "
            "not, and writes to parameters with gradients on",
            "(self, model_param, tensors)",
        ),
    ):
        yield core_patch(symbol.partition(":")[2], symbol, call, reason, signature)


def _set_random_state(original: object, new_state: Any, device: object = -1, graph_safe: bool = False) -> None:
    import torch

    torch.default_generator.set_state(new_state)


@contextlib.contextmanager
def _without_warning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """`fork` with the logger of its module switched off for its duration."""
    logger = logging.getLogger(original.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with original(*args, **kwargs):
            yield
    finally:
        logger.disabled = before


def _send_aliases(original: Callable[..., Any], **kwargs: Any) -> Any:
    """`_p2p_ops` on detached aliases of what it sends.

    `deallocate_output_tensor` swaps the `.data` of the sent tensor; gloo keeps the tensor but reads through it late.
    """
    for name in ("tensor_send_prev", "tensor_send_next"):
        if kwargs[name] is not None:
            kwargs[name] = kwargs[name].detach()
    return original(**kwargs)


def _mark_for_sequence_parallel(original: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """The parameters carry the mark by which megatron-core sums their gradients over tensor-parallel ranks."""
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    norm = original(cls, unsplit, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _with_numbers(original: Callable[..., Any], dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    for name in ("input_splits", "output_splits"):
        if torch.is_tensor(splits := getattr(dispatcher, name)):
            setattr(dispatcher, name, splits.numpy())
    return original(dispatcher, *args, **kwargs)


def _with_state(original: Callable[[Any], Any], optimizer: Any) -> Any:
    """`state_dict`, of a torch optimizer that has made no step as its first step would have set it up."""
    import torch

    inner = optimizer.optimizer
    if not inner.state:
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return original(optimizer)


def _without_step(original: Callable[[Any, Any], dict[str, Any]], optimizer: Any, model_param: Any) -> dict[str, Any]:
    """Return the tensors that are saved; upstream keeps the step count apart, with the parameter groups."""
    return {name: tensor for name, tensor in original(optimizer, model_param).items() if name != "step"}


def _keep_step(original: Callable[..., None], optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """As upstream has it, but the step count, which it has set already, gets a tensor for each parameter.

    Upstream sets one tensor for all, and torch's Adam, which counts in place, would count it up once per parameter.
    """
    import torch

    group, order = optimizer.model_param_group_index_map[model_param]
    inner = optimizer.optimizer
    state = inner.state[inner.param_groups[group]["params"][order]]
    state["step"] = state["step"].clone()
    with torch.no_grad():
        original(optimizer, model_param, {**tensors, "step": state["step"]})
