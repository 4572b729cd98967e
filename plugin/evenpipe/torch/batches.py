"""How much each micro-batch counts in a batch's loss; a batch without gradients, and what is switched off for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenpipe.runtime.recompute_swap import NodeCaller

__all__ = [
    "Evaluation",
    "Shown",
    "Tokens",
    "WithoutDropout",
    "buffers_kept",
    "check_gradients",
    "evaluating",
    "mean_loss",
    "share_of",
    "weights_of",
]

#: How many tokens, or whatever else it is a mean over, each micro-batch's loss has.
Tokens = Tensor | Sequence[float]
#: Arguments by which operations know that a model trains, and what they are in an evaluation.
_SWITCHES: Final = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}


def weights_of(tokens: Tokens | None, total: float | None, count: int) -> list[float | None]:
    """Return the weight of each of `count` micro-batches: its share of `total`, which is all `tokens` if left out.

    None for each without `tokens`: all count the same. Raises ValueError.
    """
    if tokens is None:
        if total is not None:
            raise ValueError("total: says of how many tokens: give tokens, how many each micro-batch has")
        return [None] * count
    values = [float(one) for one in tokens]
    if len(values) != count:
        raise ValueError(f"tokens: {len(values)} numbers for {count} micro-batches: give one for each")
    whole = sum(values) if total is None else float(total)
    if min(values) < 0 or not whole > 0:
        raise ValueError(f"tokens: {values} of {whole}: give how many tokens each micro-batch's loss is a mean over")
    return [one / whole for one in values]


def share_of(loss: Tensor, weight: float | None, count: int) -> Tensor:
    """Return a micro-batch's part of the batch's loss. A mean over no tokens is no number, and counts nothing."""
    if weight is None:
        return loss / count
    return loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0


def mean_loss(losses: Sequence[Tensor], items: Sequence[Sequence[Any]]) -> Tensor:
    """Return the batch's, of its micro-batches' losses; the last of what each of them gets is its weight."""
    weights = [item[-1] for item in items]
    if None in weights:
        return torch.stack(list(losses)).mean()
    return torch.stack([share_of(*one, len(items)) for one in zip(losses, weights, strict=True)]).sum()


class Evaluation(NamedTuple):
    """A batch's results: `loss` as `step` returns it and micro-batches' `losses`, where the model ends; `outputs`."""

    loss: Tensor | None
    losses: list[Tensor]
    outputs: Any


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, there are no gradients and modules are in evaluation mode; afterwards modes and buffers are as before."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad(), buffers_kept(modules):
            yield
    finally:
        for one, mode in modes:
            one.training = mode


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards the modules' buffers are as before."""
    buffers = [(one, one.clone()) for module in modules for one in module.buffers()]
    try:
        yield
    finally:
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
