"""torch.cuda without CUDA: devices and their tensors, random state and streams, on the CPU or on no device at all."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import BUILTIN, Patch, around

if TYPE_CHECKING:
    import torch

__all__ = ["device_patches", "random_patches", "stream_patches"]

_FACTORIES = ("tensor", "empty", "zeros", "ones", "empty_like")


def device_patches(device: str) -> list[Patch]:
    """What is asked of a CUDA device happens on `device`, which is the only one: "cpu", or "meta", without memory."""
    on_cpu = "megatron-core asks for device='cuda'; without CUDA the tensor has to be made on the CPU"

    def in_its_place(original: Callable[..., Any]) -> Callable[..., Any]:
        return _replacing_cuda(original, _device(device))

    return [
        patch(
            "torch.cuda:current_device",
            lambda original: lambda: _device(device),
            "megatron-core allocates buffers on the current CUDA device; without CUDA that is the CPU",
            "()",
        ),
        patch(
            "torch.cuda:device_count",
            lambda original: lambda: 1,
            "Megatron sets up its process groups and seeds only where there is a device; the CPU is one",
            "()",
        ),
        patch(
            "torch.cuda:set_device",
            lambda original: lambda device: None,
            "Megatron chooses a CUDA device for each process; the CPU is there for all of them",
            "(device)",
        ),
        patch(
            "torch.cuda:get_device_properties",
            lambda original: lambda device=None: SimpleNamespace(major=0),
            "Megatron-LM asks how new the device is, to check the environment that tensor parallelism wants",
            "(device=None)",
        ),
        patch(
            "torch.cuda.memory:memory_stats",
            lambda original: lambda device=None: Counter(),
            "Megatron-LM writes CUDA's memory figures to TensorBoard by name; without CUDA each of them is 0",
            "(device=None)",
            "torch.cuda:memory_stats",
        ),
        patch(
            "torch.cuda:synchronize",
            lambda original: lambda device=None: None,
            "megatron-core waits for the device after communication; CPU work is done when its call returns",
            "(device=None)",
        ),
        *(patch(f"torch:{name}", in_its_place, on_cpu, BUILTIN) for name in _FACTORIES),
        patch(
            "torch:Tensor.cuda",
            lambda original: lambda self, *args, **kwargs: self,
            "megatron-core moves tensors and modules to the GPU; without CUDA they are where they belong",
            BUILTIN,
        ),
        patch(
            "torch:Tensor.to",
            in_its_place,
            "megatron-core moves tensors to a CUDA device by name; without CUDA they go to the CPU",
            BUILTIN,
        ),
        patch(
            "torch:Tensor.type",
            around(_cuda_type_name),
            "megatron-core's optimizers tell precisions apart by type names such as torch.cuda.HalfTensor",
            BUILTIN,
        ),
    ]


def _device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def _is_cuda(device: object) -> bool:
    import torch

    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _replacing_cuda(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Any argument that names a CUDA device names `device` instead."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(device if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = device
        return original(*args, **kwargs)

    return call


def _cuda_type_name(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.type()` says torch.cuda.FloatTensor for torch.FloatTensor, and `tensor.type(name)` knows both names."""
    args = tuple(item.replace("torch.cuda.", "torch.", 1) if isinstance(item, str) else item for item in args)
    result = original(tensor, *args, **kwargs)
    if not isinstance(result, str):
        return result
    # A torch function mode, such as a default device, has this called within itself.
    return f"torch.cuda.{result.removeprefix('torch.').removeprefix('cuda.').removeprefix('meta.')}"


def random_patches() -> list[Patch]:
    """Every draw comes from the CPU's generator, and its state is what is kept and put back."""
    one_generator = "megatron-core keeps the CUDA random state; without CUDA every draw comes from the CPU's generator"
    random = "megatron.core.tensor_parallel.random"
    return [
        patch(
            "torch.cuda.random:manual_seed",
            lambda original: lambda seed: _generator().manual_seed(int(seed)),
            one_generator,
            "(seed)",
            "torch.cuda:manual_seed",
        ),
        patch(
            "torch.cuda.random:get_rng_state",
            lambda original: lambda device="cuda": _generator().get_state(),
            one_generator,
            "(device='cuda')",
            "torch.cuda:get_rng_state",
        ),
        patch(
            "torch.cuda.random:set_rng_state",
            lambda original: lambda new_state, device="cuda": _generator().set_state(new_state),
            one_generator,
            "(new_state, device='cuda')",
            "torch.cuda:set_rng_state",
        ),
        patch(
            f"{random}:_set_cuda_rng_state",
            lambda original: lambda new_state, device=-1, graph_safe=False: _generator().set_state(new_state),
            one_generator,
            "(new_state, device=-1, graph_safe=False)",
        ),
        patch(
            f"{random}:CudaRNGStatesTracker.fork",
            around(_without_warning),
            "megatron-core warns when a draw inside a fork moves the CPU's random state; here every draw does",
            "(self, name='model-parallel-rng')",
        ),
    ]


def _generator() -> torch.Generator:
    import torch

    return torch.default_generator


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


def stream_patches() -> list[Patch]:
    """Streams can be made, entered and waited for; everything on them has already happened."""
    in_order = "megatron-core orders CUDA work with streams; CPU work happens in program order"
    return [
        patch(
            "torch.cuda.streams:Stream",
            lambda original: type("Stream", (_Stream,), {}),
            in_order,
            "(device=None, priority=0, **kwargs)",
            "torch.cuda:Stream",
        ),
        patch("torch.cuda:current_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        patch("torch.cuda:default_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        patch("torch.cuda:stream", lambda original: lambda stream: contextlib.nullcontext(), in_order, "(stream)"),
    ]


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        """Like CUDA's."""

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> _Stream:
        """What has happened when this stream has: an event is waited for like a stream."""
        return self
