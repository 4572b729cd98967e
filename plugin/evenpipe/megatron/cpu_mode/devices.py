"""CUDA devices and their tensors, on the CPU, or on no device at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import BUILTIN, Patch

if TYPE_CHECKING:
    import torch

__all__ = ["device_patches"]

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
            _cuda_type_name,
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


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.type()` says torch.cuda.FloatTensor for torch.FloatTensor, and `tensor.type(name)` knows both names."""

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(item.replace("torch.cuda.", "torch.", 1) if isinstance(item, str) else item for item in args)
        result = original(self, *args, **kwargs)
        if not isinstance(result, str):
            return result
        # A torch function mode, such as a default device, has this called within itself.
        return f"torch.cuda.{result.removeprefix('torch.').removeprefix('cuda.').removeprefix('meta.')}"

    return type_name
