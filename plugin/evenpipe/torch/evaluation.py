"""A batch without gradients: what comes of it, and what is switched off on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenpipe.runtime.recompute_swap import NodeCaller

__all__ = ["Evaluation", "Shown", "WithoutDropout", "check_gradients", "evaluating"]

#: Arguments by which operations know that a model trains, and what they are in an evaluation.
_SWITCHES: Final = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}


class Evaluation(NamedTuple):
    """Of a batch: `loss` as `step` returns it, and `losses` of the micro-batches, where the model ends; `outputs`."""

    loss: Tensor | None
    losses: list[Tensor]
    outputs: Any


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, there are no gradients and modules are in evaluation mode; afterwards modes and buffers are as before."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    buffers = [(one, one.clone()) for module in modules for one in module.buffers()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def check_gradients() -> None:
    """Raise ValueError where nothing can be trained."""
    if not torch.is_grad_enabled():
        raise ValueError("step under torch.no_grad trains nothing: call evaluate, or step outside of it")


class Shown(NodeCaller):
    """Collects what the model returns beside its loss, by name, of one micro-batch after the other."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = {}

    def output(self, name: str, tensor: Tensor) -> None:
        """Keep it."""
        self._found.setdefault(name, []).append(tensor)

    @property
    def whole(self) -> dict[str, Tensor]:
        """Micro-batches one behind the other along the first dimension; stacked, where there is none."""
        return {name: _joined(parts) for name, parts in self._found.items()}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts))


class WithoutDropout(TorchFunctionMode):
    """Inside, operations of stage code that was traced in training are those of an evaluation."""

    def __torch_function__(
        self, function: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if (schema := getattr(function, "_schema", None)) is not None:
            names = [argument.name for argument in schema.arguments]
            args = tuple(_SWITCHES.get(name, one) for name, one in zip(names, args, strict=False))
            given = {name: _SWITCHES.get(name, one) for name, one in given.items()}
        return function(*args, **given)
