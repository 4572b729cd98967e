"""torch.cuda without CUDA: devices and their tensors, random state and streams, on the CPU or on no device at all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from evenpipe.upstream.expectation import ANY, Distribution
from evenpipe.upstream.patches import Patch, around
from evenpipe.upstream.symbols import BUILTIN

if TYPE_CHECKING:
    import torch

__all__ = ["no_gpu", "without_cuda"]

_MADE_HERE: Final = "device='cuda' is asked for by name; without CUDA the tensor has to be made on the CPU"
_ONE_GENERATOR: Final = "the CUDA random state is kept and put back; without CUDA every draw is of the CPU's generator"
_PROFILED: Final = "ranges are named for a profiler of CUDA; without CUDA there is none"
_IN_ORDER: Final = "CUDA work is ordered with streams; CPU work happens in program order"


def no_gpu() -> str | None:
    """Return why these patches must not be applied in this process, as there is a GPU; else None."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "CUDA is available here: CPU mode is for machines without a GPU: leave it off, or set CUDA_VISIBLE_DEVICES="


def without_cuda(device: str) -> list[Patch]:
    """Under them what is asked of a CUDA device happens on `device`, the only one: "cpu", or "meta", without memory.

    The CUDA random state is the CPU's. Streams can be made, entered and waited for; all on them has happened already.
    """

    def in_its_place(original: Callable[..., Any]) -> Callable[..., Any]:
        return _replacing_cuda(original, _device(device))

    return [
        _patch(
            "torch.cuda:current_device",
            lambda original: lambda: _device(device),
            "buffers are allocated on the current CUDA device; without CUDA that is the CPU",
            "()",
        ),
        _patch(
            "torch.cuda:device_count",
            lambda original: lambda: 1,
            "process groups and seeds are set up only where there is a device; the CPU is one",
            "()",
        ),
        _patch(
            "torch.cuda:set_device",
            lambda original: lambda device: None,
            "a CUDA device is chosen for each process; the CPU is there for all of them",
            "(device)",
        ),
        _patch(
            "torch.cuda:get_device_properties",
            lambda original: lambda device=None: SimpleNamespace(major=9, minor=0),
            "how new the device is decides what may be asked for, and the environment for it; the CPU is a Hopper",
            "(device=None)",
        ),
        _patch(
            "torch.cuda.memory:memory_stats",
            lambda original: lambda device=None: Counter(),
            "CUDA's memory figures are written to logs by name; without CUDA each of them is 0",
            "(device=None)",
            "torch.cuda:memory_stats",
        ),
        _patch(
            "torch.cuda:synchronize",
            lambda original: lambda device=None: None,
            "the device is waited for after communication; CPU work is done when its call returns",
            "(device=None)",
        ),
        *(
            _patch(f"torch:{name}", in_its_place, _MADE_HERE, BUILTIN)
            for name in ("tensor", "empty", "zeros", "ones", "empty_like")
        ),
        _patch(
            "torch:Tensor.cuda",
            lambda original: lambda self, *args, **kwargs: self,
            "tensors and modules are moved to the GPU; without CUDA they are where they belong",
            BUILTIN,
        ),
        _patch(
            "torch:Tensor.to",
            in_its_place,
            "tensors are moved to a CUDA device by name; without CUDA they go to the CPU",
            BUILTIN,
        ),
        _patch(
            "torch:Tensor.type",
            around(_cuda_type_name),
            "optimizers tell precisions apart by type names such as torch.cuda.HalfTensor",
            BUILTIN,
        ),
        _patch(
            "torch.cuda.random:manual_seed",
            lambda original: lambda seed: _generator().manual_seed(int(seed)),
            _ONE_GENERATOR,
            "(seed)",
            "torch.cuda:manual_seed",
        ),
        _patch(
            "torch.cuda.random:get_rng_state",
            lambda original: lambda device="cuda": _generator().get_state(),
            _ONE_GENERATOR,
            "(device='cuda')",
            "torch.cuda:get_rng_state",
        ),
        _patch(
            "torch.cuda.random:set_rng_state",
            lambda original: lambda new_state, device="cuda": _generator().set_state(new_state),
            _ONE_GENERATOR,
            "(new_state, device='cuda')",
            "torch.cuda:set_rng_state",
        ),
        _patch(
            "torch.cuda.streams:Stream",
            lambda original: type("Stream", (_Stream,), {}),
            _IN_ORDER,
            "(device=None, priority=0, **kwargs)",
            "torch.cuda:Stream",
        ),
        *(
            _patch(f"torch.cuda:{name}", lambda original: lambda device=None: _Stream(), _IN_ORDER, "(device=None)")
            for name in ("current_stream", "default_stream")
        ),
        _patch("torch.cuda:stream", lambda original: lambda stream: contextlib.nullcontext(), _IN_ORDER, "(stream)"),
        _patch(
            "torch.cuda.streams:Event",
            lambda original: type("Event", (_Event,), {}),
            _IN_ORDER,
            "(enable_timing=False, blocking=False, interprocess=False, external=False)",
            "torch.cuda:Event",
        ),
        _patch("torch:Tensor.record_stream", lambda original: lambda self, stream: None, _IN_ORDER, BUILTIN),
        _patch("torch.cuda.nvtx:range_push", lambda original: lambda msg: 0, _PROFILED, "(msg)"),
        _patch("torch.cuda.nvtx:range_pop", lambda original: lambda: 0, _PROFILED, "()"),
    ]


def _patch(target: str, replacement: Callable[[Any], Any], reason: str, signature: str, *bindings: str) -> Patch:
    """Named after its target; of any torch."""
    name, versions = target.partition(":")[2], {ANY: signature}
    return Patch(name, (target, *bindings), Distribution("torch"), versions, replacement, reason)


def _device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def _generator() -> torch.Generator:
    import torch

    return torch.default_generator


def _replacing_cuda(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Any argument that names a CUDA device names `device` instead."""
    kind = type(device)

    def is_cuda(argument: object) -> bool:
        if isinstance(argument, kind):
            return argument.type == "cuda"
        return isinstance(argument, str) and argument.partition(":")[0] == "cuda"

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_cuda, args)):
            args = tuple(device if is_cuda(argument) else argument for argument in args)
        if is_cuda(kwargs.get("device")):
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


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        """Like CUDA's."""

    @property
    def device(self) -> torch.device:
        return _device("cpu")

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> _Stream:
        """Return what has happened when this stream has: an event is waited for like a stream."""
        return self


class _Event:
    """An event that has happened."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        """Like CUDA's."""

    def record(self, stream: object = None) -> None:
        """It has happened already."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True
