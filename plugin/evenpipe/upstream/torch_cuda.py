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

_CURRENT: Final = "buffers are allocated on the current CUDA device; without CUDA that is the CPU"
_COUNTED: Final = "process groups and seeds are set up only where there is a device; the CPU is one"
_CHOSEN: Final = "a CUDA device is chosen for each process; the CPU is there for all of them"
_HOPPER: Final = "how new the device is decides what may be asked for, and the environment for it; the CPU is a Hopper"
_FIGURES: Final = "CUDA's memory figures are written to logs by name; without CUDA each of them is 0"
_WAITED: Final = "the device is waited for after communication; CPU work is done when its call returns"
_MADE_HERE: Final = "device='cuda' is asked for by name; without CUDA the tensor has to be made on the CPU"
_MOVED: Final = "tensors and modules are moved to the GPU; without CUDA they are where they belong"
_MOVED_BY_NAME: Final = "tensors are moved to a CUDA device by name; without CUDA they go to the CPU"
_TYPES: Final = "optimizers tell precisions apart by type names such as torch.cuda.HalfTensor"
_ONE_GENERATOR: Final = "the CUDA random state is kept and put back; without CUDA every draw is of the CPU's generator"
_PROFILED: Final = "ranges are named for a profiler of CUDA; without CUDA there is none"
_IN_ORDER: Final = "CUDA work is ordered with streams; CPU work happens in program order"
_EVENT: Final = "(enable_timing=False, blocking=False, interprocess=False, external=False)"


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

    def here(original: Callable[..., Any]) -> Callable[..., Any]:
        return _replacing_cuda(original, _device(device))

    def stream() -> Callable[[Any], Any]:
        return _always(lambda device=None: _Happened())

    return [
        _patch("torch.cuda:current_device", "()", _CURRENT, _always(lambda: _device(device))),
        _patch("torch.cuda:device_count", "()", _COUNTED, _always(lambda: 1)),
        _patch("torch.cuda:set_device", "(device)", _CHOSEN, _always(lambda device: None)),
        _patch(
            *("torch.cuda:get_device_properties", "(device=None)", _HOPPER),
            _always(lambda device=None: SimpleNamespace(major=9, minor=0)),
        ),
        _patch("torch.cuda.memory:memory_stats", "(device=None)", _FIGURES, _always(lambda device=None: Counter())),
        _patch("torch.cuda:synchronize", "(device=None)", _WAITED, _always(lambda device=None: None)),
        *(
            _patch(f"torch:{name}", BUILTIN, _MADE_HERE, here)
            for name in ("tensor", "empty", "zeros", "ones", "empty_like")
        ),
        _patch("torch:Tensor.cuda", BUILTIN, _MOVED, _always(lambda self, *args, **kwargs: self)),
        _patch("torch:Tensor.to", BUILTIN, _MOVED_BY_NAME, here),
        _patch("torch:Tensor.type", BUILTIN, _TYPES, around(_cuda_type_name)),
        _patch(
            *("torch.cuda.random:manual_seed", "(seed)", _ONE_GENERATOR),
            _always(lambda seed: _generator().manual_seed(int(seed))),
        ),
        _patch(
            *("torch.cuda.random:get_rng_state", "(device='cuda')", _ONE_GENERATOR),
            _always(lambda device="cuda": _generator().get_state()),
        ),
        _patch(
            *("torch.cuda.random:set_rng_state", "(new_state, device='cuda')", _ONE_GENERATOR),
            _always(lambda new_state, device="cuda": _generator().set_state(new_state)),
        ),
        _patch("torch.cuda.streams:Stream", "(device=None, priority=0, **kwargs)", _IN_ORDER, _a("Stream")),
        _patch("torch.cuda:current_stream", "(device=None)", _IN_ORDER, stream()),
        _patch("torch.cuda:default_stream", "(device=None)", _IN_ORDER, stream()),
        _patch("torch.cuda:stream", "(stream)", _IN_ORDER, _always(lambda stream: contextlib.nullcontext())),
        _patch("torch.cuda.streams:Event", _EVENT, _IN_ORDER, _a("Event")),
        _patch("torch:Tensor.record_stream", BUILTIN, _IN_ORDER, _always(lambda self, stream: None)),
        _patch("torch.cuda.nvtx:range_push", "(msg)", _PROFILED, _always(lambda msg: 0)),
        _patch("torch.cuda.nvtx:range_pop", "()", _PROFILED, _always(lambda: 0)),
    ]


def _patch(target: str, signature: str, reason: str, replacement: Callable[[Any], Any]) -> Patch:
    """Return a patch for any torch, named after its target; `torch.cuda` has what its own modules define, too."""
    module, _, name = target.partition(":")
    bound = ["torch.cuda"] if module in ("torch.cuda.memory", "torch.cuda.random", "torch.cuda.streams") else []
    targets = (target, *(f"{again}:{name}" for again in bound))
    return Patch(name, targets, Distribution("torch"), {ANY: signature}, replacement, reason)


def _always(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what puts `call` in the place of any original."""
    return lambda original: call


def _a(name: str) -> Callable[[Any], Any]:
    """Return what puts a class of that name, of streams or events, in the place of any original."""
    return lambda original: type(name, (_Happened,), {})


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


class _Happened:
    """A stream on which everything has already happened, or an event that has; both are waited for alike."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Like CUDA's."""

    @property
    def device(self) -> torch.device:
        return _device("cpu")

    def wait(self, *of: object, **named: object) -> None:
        """Nothing to wait for."""

    wait_stream = synchronize = record = wait

    def record_event(self, event: object = None) -> _Happened:
        """Return what has happened when this stream has."""
        return self

    def query(self) -> bool:
        """Return that it has happened."""
        return True
