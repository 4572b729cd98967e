"""Tensors that consist of plain ones, as frameworks have them, and a function that saves one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: An 8-bit number counts for so much; what is cast so is a multiple.
SCALE = 1 / 32


class _Cast(Tensor):
    """Values in eight bits, and what to multiply them by."""

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, **more: Any) -> _Cast:
        return Tensor._make_wrapper_subclass(cls, data.size(), strides=data.stride(), dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor, **more: Any) -> None:
        self._data, self._scale = data, scale
        vars(self).update(more)

    def values(self) -> Tensor:
        return self._data.to(self._scale.dtype) * self._scale

    @classmethod
    def of(cls, tensor: Tensor) -> _Cast:
        tensor = tensor.detach()
        return cls((tensor / SCALE).round().clamp(-127, 127).to(torch.int8), tensor.new_tensor([SCALE]))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale)
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Flattened(_Cast):
    """By torch's protocol."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Flattened:
        return Flattened(inner["_data"], inner["_scale"])


class Quantized(_Cast):
    """By Transformer Engine's interface: it may lack parts, and has a flag that is not among its metadata."""

    _rowwise_data: Tensor | None = None
    _is_stale = True

    def get_metadata(self) -> dict[str, Any]:
        return {"data": self._data, "scale": self._scale, "rowwise_data": self._rowwise_data, "quantizer": None}

    def prepare_for_saving(self) -> Any:
        raise AssertionError("it would empty what others hold")

    restore_from_saved = prepare_for_saving

    @classmethod
    def of(cls, tensor: Tensor) -> Quantized:
        made = super().of(tensor)
        assert isinstance(made, Quantized)
        made._is_stale = False
        return made

    def values(self) -> Tensor:
        assert not self._is_stale
        return super().values()


class Opaque(_Cast):
    """Nobody knows what it consists of."""


class Product(torch.autograd.Function):
    """`value` times `weight`; the gradient of `weight` is of `value` as cast to eight bits, which is what is saved."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, kind: type[_Cast]) -> Tensor:
        cast = kind.of(value)
        ctx.save_for_backward(cast, weight)
        return cast.values() * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cast, weight = ctx.saved_tensors
        return gradient * weight, (gradient * cast.values()).sum(0), None
