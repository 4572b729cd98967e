"""The layers of a PipelineModule as one module of plain PyTorch, under the names that their parameters have there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

__all__ = ["LOSS", "TIED", "WholeModel", "add_layer", "cast_parameters"]

#: Where a PipelineModule has its tied modules, and its loss function if that is a module.
TIED: Final = "tied_modules"
LOSS: Final = "loss_fn"


class WholeModel(nn.Module):
    """The layers of a PipelineModule one after the other, and its loss: what `evenpipe partition --module` cuts.

    layers, loss_fn: as PipelineModule takes them.
    dtype: to which DeepSpeed casts parameters, torch.bfloat16 for one with `"bf16": {"enabled": true}`.

    In the file that `--module` names::

        def uncut(micro_batch_size=2):
            tokens, labels = next(batches(micro_batch_size))
            return WholeModel(layers, loss), {"inputs": tokens, "labels": labels}
    """

    def __init__(
        self, layers: Iterable[Any], loss_fn: Callable[[Any, Any], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.add_module(TIED, nn.ModuleDict())
        self._calls = [add_layer(self, number, layer) for number, layer in enumerate(layers)]
        self.loss_fn = loss_fn
        cast_parameters(self, dtype)

    def forward(self, inputs: Any, labels: Any) -> Tensor:
        """Return a micro-batch's loss; `inputs` and `labels`: the pair that DeepSpeed's data iterators give."""
        for call in self._calls:
            inputs = call(inputs)
        return self.loss_fn(inputs, labels)


def add_layer(whole: nn.Module, number: int, layer: Any) -> Callable[[Any], Any]:
    """Build a layer as PipelineModule does, and add it to `whole` by its name there; returns what calls it."""
    if isinstance(layer, TiedLayerSpec):
        tied: Any = getattr(whole, TIED)
        if layer.key not in tied:
            tied[layer.key] = layer.build()
        module = tied[layer.key]
        return module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
    built = layer.build() if isinstance(layer, LayerSpec) else layer
    if isinstance(built, nn.Module):
        whole.add_module(str(number), built)
    called: Callable[[Any], Any] = built
    return called


def cast_parameters(whole: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters as DeepSpeed's engine does to a model; buffers stay as they are. Tied parameters stay tied."""
    cast: dict[int, nn.Parameter] = {}
    for module in whole.modules():
        for name, one in module._parameters.items():
            if one is not None and one.is_floating_point() and one.dtype != dtype:
                made = cast.setdefault(id(one), nn.Parameter(one.detach().to(dtype), one.requires_grad))
                module._parameters[name] = made
