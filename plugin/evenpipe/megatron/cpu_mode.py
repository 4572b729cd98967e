"""CPU mode: megatron-core on CPU tensors and gloo, for tests and for trying a configuration without a GPU."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.upstream import ANY, BUILTIN, Distribution, Patch, PatchSet

__all__ = ["cpu_mode"]


def cpu_mode() -> PatchSet:
    """The patches that make megatron-core train on CPU; nothing changes before `apply()` is called on them.

    Apply them before the first model is built. Refused where CUDA is available: with them in place, tensors stay on the
    CPU and the "CUDA" random state is the CPU's.
    """
    return PatchSet(
        "cpu-mode", [*_device_patches(), *_random_patches(), *_stream_patches(), *_send_patches()], guard=_no_gpu
    )


def _no_gpu() -> str | None:
    return "CUDA is available here: CPU mode is for machines without a GPU" if torch.cuda.is_available() else None


_CPU = torch.device("cpu")
_TORCH = Distribution("torch")
_FACTORIES = ("tensor", "empty", "zeros", "ones", "empty_like")


def _patch(target: str, replacement: Callable[[Any], Any], reason: str, signature: str, *bindings: str) -> Patch:
    """A patch named after its target; megatron-core's signatures hold for its supported series, torch's for any."""
    core = target.startswith("megatron.")
    versions = dict.fromkeys(RELEASES if core else (ANY,), signature)
    distribution = MEGATRON_CORE if core else _TORCH
    return Patch(target.partition(":")[2], (target, *bindings), distribution, versions, replacement, reason)


# Devices ----------------------------------------------------------------------------------------------------------


def _device_patches() -> list[Patch]:
    on_cpu = "megatron-core asks for device='cuda'; without CUDA the tensor has to be made on the CPU"
    return [
        _patch(
            "torch.cuda:current_device",
            lambda original: lambda: _CPU,
            "megatron-core allocates buffers on the current CUDA device; without CUDA that is the CPU",
            "()",
        ),
        _patch(
            "torch.cuda:synchronize",
            lambda original: lambda device=None: None,
            "megatron-core waits for the device after communication; CPU work is done when its call returns",
            "(device=None)",
        ),
        *(_patch(f"torch:{name}", _on_cpu, on_cpu, BUILTIN) for name in _FACTORIES),
        _patch(
            "torch:Tensor.cuda",
            lambda original: lambda self, *args, **kwargs: self,
            "megatron-core moves tensors and modules to the GPU; without CUDA they are where they belong",
            BUILTIN,
        ),
        _patch(
            "torch:Tensor.to",
            _on_cpu,
            "megatron-core moves tensors to a CUDA device by name; without CUDA they go to the CPU",
            BUILTIN,
        ),
        _patch(
            "torch:Tensor.type",
            _cuda_type_name,
            "megatron-core's optimizers tell precisions apart by type names such as torch.cuda.HalfTensor",
            BUILTIN,
        ),
    ]


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Any argument that names a CUDA device names the CPU instead."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_CPU if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return call


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.type()` says torch.cuda.FloatTensor for torch.FloatTensor, and `tensor.type(name)` knows both names."""

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(item.replace("torch.cuda.", "torch.", 1) if isinstance(item, str) else item for item in args)
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_name


# Random state -----------------------------------------------------------------------------------------------------


def _random_patches() -> list[Patch]:
    one_generator = "megatron-core keeps the CUDA random state; without CUDA every draw comes from the CPU's generator"
    random = "megatron.core.tensor_parallel.random"
    return [
        _patch(
            "torch.cuda.random:manual_seed",
            lambda original: lambda seed: _seed(seed),
            one_generator,
            "(seed)",
            "torch.cuda:manual_seed",
        ),
        _patch(
            "torch.cuda.random:get_rng_state",
            lambda original: lambda device="cuda": torch.get_rng_state(),
            one_generator,
            "(device='cuda')",
            "torch.cuda:get_rng_state",
        ),
        _patch(
            "torch.cuda.random:set_rng_state",
            lambda original: lambda new_state, device="cuda": torch.set_rng_state(new_state),
            one_generator,
            "(new_state, device='cuda')",
            "torch.cuda:set_rng_state",
        ),
        _patch(
            f"{random}:_set_cuda_rng_state",
            lambda original: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
            one_generator,
            "(new_state, device=-1, graph_safe=False)",
        ),
        _patch(
            f"{random}:CudaRNGStatesTracker.fork",
            _without_warning,
            "megatron-core warns when a draw inside a fork moves the CPU's random state; here every draw does",
            "(self, name='model-parallel-rng')",
        ),
    ]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _without_warning(original: Callable[..., Any]) -> Callable[..., Any]:
    """`fork` with the logger of its module switched off for its duration."""
    logger = logging.getLogger(original.__module__)

    @contextlib.contextmanager
    @functools.wraps(original)
    def fork(*args: Any, **kwargs: Any) -> Iterator[None]:
        before, logger.disabled = logger.disabled, True
        try:
            with original(*args, **kwargs):
                yield
        finally:
            logger.disabled = before

    return fork


# Streams ----------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        self.device = _CPU

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _stream_patches() -> list[Patch]:
    in_order = "megatron-core orders CUDA work with streams; CPU work happens in program order"
    return [
        _patch(
            "torch.cuda.streams:Stream",
            lambda original: type("Stream", (_Stream,), {}),
            in_order,
            "(device=None, priority=0, **kwargs)",
            "torch.cuda:Stream",
        ),
        _patch("torch.cuda:current_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        _patch("torch.cuda:default_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        _patch("torch.cuda:stream", lambda original: lambda stream: contextlib.nullcontext(), in_order, "(stream)"),
    ]


# Sends ------------------------------------------------------------------------------------------------------------


def _send_patches() -> list[Patch]:
    return [
        _patch(
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            _sending_aliases,
            "megatron-core frees a stage's output while gloo still sends it; an alias keeps the memory until then",
            "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)",
        )
    ]


def _sending_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_p2p_ops` on detached aliases of what it sends.

    `deallocate_output_tensor` swaps the `.data` of the sent tensor; gloo keeps the tensor but reads through it late.
    """

    def p2p_ops(**kwargs: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if kwargs[name] is not None:
                kwargs[name] = kwargs[name].detach()
        return original(**kwargs)

    return p2p_ops
