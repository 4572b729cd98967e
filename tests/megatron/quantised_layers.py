"""Linear layers with the interface of Transformer Engine's in FP8 (2.15 to 2.18), which really quantise; on the CPU.

As in transformer_engine/pytorch: a layer quantises its weight where `is_first_microbatch` is set, into a copy that it
keeps in `_fp8_workspaces`, or writes over in place; a backward multiplies by that same memory. By delayed scaling, each
value is quantised by the scale that follows of the largest values before it: those of forwards are taken in at the
exit of an autocast, those of gradients in the backward of the first layer in it. Nothing of it needs GPUs but speed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from torch import Tensor

__all__ = ["FP8GlobalState", "FP8GlobalStateManager", "TransformerEngineBaseModule", "installed", "quantise"]

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
HISTORY = 3
INPUT, WEIGHT = 0, 1


@dataclass
class FP8GlobalState:
    """What Transformer Engine has once in a process; `autocast_depth` and what follows are of its autocast."""

    global_amax_history_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[list[Tensor]]] = field(default_factory=list)
    autocast_depth: int = 0
    is_first_fp8_module: bool = False
    phase: str = ""  # of layers that are computed again: "first", "again"

    def add(self, key: str, scaling: Scaling) -> None:
        self.global_amax_history_buffer.setdefault(key, []).append(scaling.amax_history)
        self.global_scale_buffer.setdefault(key, []).append(scaling.scale)

    def reduce_and_update(self, forward: bool) -> None:
        """The rule of `fused_amax_and_scale_update_after_reduction`, with the largest of the history."""
        key, largest = ("forward_", torch.finfo(FORWARD).max) if forward else ("backward_", torch.finfo(GRADIENT).max)
        pairs = zip(self.global_amax_history_buffer.get(key, ()), self.global_scale_buffer.get(key, ()), strict=True)
        for history, scale in pairs:
            for column in range(history.shape[1]):
                if history[0, column] != 0:
                    amax = history[:, column].max()
                    history[:, column] = torch.roll(history[:, column], -1)
                    history[0, column] = 0
                    scale[column] = largest / amax


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()


class Scaling:
    """The history of so many values, and the scales that they are multiplied by."""

    def __init__(self, values: int) -> None:
        self.amax_history, self.scale = torch.zeros(HISTORY, values), torch.ones(values)


@contextmanager
def autocast(state: FP8GlobalState) -> Iterator[None]:
    state.is_first_fp8_module |= state.autocast_depth == 0
    state.autocast_depth += 1
    yield
    state.autocast_depth -= 1
    if state.autocast_depth == 0 and torch.is_grad_enabled():
        state.reduce_and_update(forward=True)


class Quantised:
    """A value in 8 bits."""

    def __init__(self, value: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.data, self.scale = torch.empty(value.shape, dtype=dtype), torch.empty(())
        self.quantize_(value, scale)

    def quantize_(self, value: Tensor, scale: Tensor) -> None:
        most = torch.finfo(self.data.dtype).max
        self.data.copy_((value.detach() * scale).clamp(-most, most))
        self.scale.copy_(scale)

    def dequantize(self) -> Tensor:
        return self.data.float() / self.scale


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._fp8_workspaces: dict[str, Quantised] = {}
        self.fp8_meta: dict[str, Any] = {}
        self.is_first_microbatch = True


class Linear(TransformerEngineBaseModule):
    def __init__(self, like: Any, state: FP8GlobalState, delayed: bool) -> None:
        super().__init__()
        self.weight, self.bias, self._skip_bias = like.weight, like.bias, like.skip_bias_add
        self.state, self._delayed = state, delayed

    def forward(self, value: Tensor, *_: Any) -> tuple[Tensor, Tensor | None]:
        assert self.state.autocast_depth, "Megatron's layers are inside of an autocast"
        self._start()
        if self.state.phase and self._delayed:
            forwards = self.fp8_meta["scaling_fwd"]
            kept = self.state.fp8_tensors_recompute_buffer[self.fp8_meta["buffer"]]
            updated = [forwards.amax_history.clone(), forwards.scale.clone()]
            if self.state.phase == "first":
                kept.append(updated)
            else:
                self._set(*kept.popleft())
        first, self.is_first_microbatch = self.is_first_microbatch, False
        weight = self._fp8_workspaces.get("weight")
        if weight is None:
            weight = self._fp8_workspaces["weight"] = self.quantised(self.weight, WEIGHT, FORWARD)
        elif first:
            weight.quantize_(self.weight, self._scale(self.weight, WEIGHT, FORWARD))
        reduces, self.state.is_first_fp8_module = self.state.is_first_fp8_module, False
        bias = None if self._skip_bias else self.bias
        product = _Product.apply(value, self.weight, bias, weight, self, reduces)
        if self.state.phase == "again" and self._delayed:
            self._set(*updated)
        return product, self.bias if self._skip_bias else None

    def quantised(self, value: Tensor, place: int, dtype: torch.dtype) -> Quantised:
        return Quantised(value, self._scale(value, place, dtype), dtype)

    def _scale(self, value: Tensor, place: int, dtype: torch.dtype) -> Tensor:
        amax = value.detach().abs().max()
        if not self._delayed:
            return torch.finfo(dtype).max / amax
        scaling = self.fp8_meta["scaling_fwd" if dtype == FORWARD else "scaling_bwd"]
        scaling.amax_history[0, place] = torch.maximum(scaling.amax_history[0, place], amax)
        return scaling.scale[place]

    def _start(self) -> None:
        if self.fp8_meta or not self._delayed:
            return
        self.fp8_meta = {"scaling_fwd": Scaling(2), "scaling_bwd": Scaling(1)}
        self.state.add("forward_", self.fp8_meta["scaling_fwd"])
        self.state.add("backward_", self.fp8_meta["scaling_bwd"])
        self.fp8_meta["buffer"] = len(self.state.fp8_tensors_recompute_buffer)
        self.state.fp8_tensors_recompute_buffer.append(deque())

    def _set(self, history: Tensor, scale: Tensor) -> None:
        self.fp8_meta["scaling_fwd"].amax_history.copy_(history)
        self.fp8_meta["scaling_fwd"].scale.copy_(scale)

    def get_extra_state(self) -> list[Tensor]:
        """By delayed scaling, all that it knows of values before."""
        return [tensor.clone() for tensor in self._known()]

    def set_extra_state(self, state: list[Tensor]) -> None:
        self._start()
        for tensor, saved in zip(self._known(), state, strict=True):
            tensor.copy_(saved)

    def _known(self) -> list[Tensor]:
        each = [self.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd") if self.fp8_meta]
        return [tensor for scaling in each for tensor in (scaling.amax_history, scaling.scale)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, copy: Quantised, layer: Linear, reduces: bool
    ) -> Tensor:
        taken = layer.quantised(value, INPUT, FORWARD)
        ctx.taken, ctx.copy, ctx.layer, ctx.reduces, ctx.has_bias = taken, copy, layer, reduces, bias is not None
        product = taken.dequantize().matmul(copy.dequantize().t())
        return product if bias is None else product + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_output = ctx.layer.quantised(gradient, 0, GRADIENT).dequantize()
        if ctx.reduces:
            ctx.layer.state.reduce_and_update(forward=False)
        flat, taken = of_output.flatten(0, -2), ctx.taken.dequantize().flatten(0, -2)
        of_bias = flat.sum(dim=0) if ctx.has_bias else None
        return of_output.matmul(ctx.copy.dequantize()), flat.t().matmul(taken), of_bias, None, None, None


def quantise(module: Any, recipe: str, state: FP8GlobalState) -> None:
    """Have the layers of `module`, a model of Megatron's, compute in FP8 by that recipe."""
    config = module.config
    config.fp8, config.fp8_recipe, config.fp8_state = "hybrid", recipe, state
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnParallelLinear | RowParallelLinear) and name.startswith("linear_"):
                setattr(parent, name, Linear(child, state, recipe == "delayed"))


def _checkpoint(function: Any, distribute: bool, rng: Any, group: Any, *args: Any) -> Any:
    """In place of `te_checkpoint`; `function` is made by a method of Megatron's block of layers."""
    [block] = [cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, torch.nn.Module)]
    state = block.config.fp8_state
    outside = state.autocast_depth > 0

    def run(*args: Any) -> Any:
        state.phase = "again" if torch.is_grad_enabled() else "first"
        with autocast(state) if outside and state.phase == "again" else nullcontext():
            found = function(*args)
        state.phase = ""
        return found

    return tensor_parallel.checkpoint(run, distribute, *args)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, Megatron's blocks of layers enter this autocast, and EvenPipe finds a Transformer Engine."""
    names = ("", ".pytorch", ".pytorch.fp8", ".pytorch.module", ".pytorch.module.base")
    modules: dict[str, Any] = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    modules["transformer_engine"].__version__ = "2.18.0"
    modules["transformer_engine"].__spec__ = ModuleSpec("transformer_engine", None)  # without files
    modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager = FP8GlobalStateManager
    modules["transformer_engine.pytorch.module.base"].TransformerEngineBaseModule = TransformerEngineBaseModule
    block: Any = transformer_block
    before = block.get_fp8_context, block.te_checkpoint
    sys.modules.update(modules)
    block.get_fp8_context, block.te_checkpoint = lambda config, *_, **__: autocast(config.fp8_state), _checkpoint
    yield
    block.get_fp8_context, block.te_checkpoint = before
    for name in modules:
        del sys.modules[name]
