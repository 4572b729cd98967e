"""Backwards in two halves: what the first leaves of the gradients of weights for the second.

The first half computes the gradients of inputs, which a stage waits for; the second the products that are the weights'
gradients (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2). What no layer leaves has its gradients in the first
half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenpipe.runtime import streams
from evenpipe.runtime.saved import plain_parts
from evenpipe.schedule import Unit

__all__ = ["MARK", "WeightGradients", "queued_bytes", "whole_layers"]

#: On a parameter, while a batch whose backwards are in halves is under way: its `WeightGradients`.
MARK: Final = "evenpipe_weight_gradients"


class _Use(NamedTuple):
    """One use of a weight in a first half: `product(*tensors)` is its gradient; None where it is added elsewhere.

    `cast`: the node that gave the weight another dtype for this use, and others that share it; None if there is none.
    `backward`: the number of the backward, of which there are several in a half that has others inside, as activation
    checkpointing does; each accumulates for itself.
    """

    weight: torch.nn.Parameter
    tensors: tuple[Tensor, ...]
    product: Callable[..., Tensor | None]
    stream: streams.Stream
    cast: object
    backward: int


class WeightGradients:
    """The second halves of the backwards of one model chunk.

    In a first half, uses of its `weights` are given to `add` in place of a gradient, so that no hook on them runs. A
    second half is a backward of its own, through one node a weight: gradients are accumulated, and hooks of data
    parallelism run, as a whole backward has it.

    `recording(unit)` is entered to save what a second half needs, so that it is counted.

    Layers that were made with delayed gradients (Transformer Engine's, `delay_wgrad_compute`) have queues of their own,
    first in, first out, which are not among it: :func:`queued_bytes`.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        weights: Iterable[torch.nn.Parameter],
        recording: Callable[[Unit], AbstractContextManager[object]],
    ) -> None:
        self.weights = [weight for weight in weights if weight.requires_grad]
        self._parameters = list(chunk.parameters())
        self._recording = recording
        self._uses: list[_Use] | None = None
        self._left: dict[Unit, list[Tensor]] = {}
        self._layers: list[Any] = [one for one in chunk.modules() if _delays(one)][::-1]  # as a backward comes to them
        self._queued: dict[Unit, list[int]] = {}

    def begin(self) -> None:
        """Mark the weights, before a batch. Raises ValueError for a weight that two chunks of a stage share."""
        for weight in self.weights:
            if hasattr(weight, MARK):
                raise ValueError("two model chunks of a stage share a weight: take a schedule of whole backwards")
            setattr(weight, MARK, self)

    def unmark(self) -> None:
        """Undo `begin`."""
        for weight in self.weights:
            vars(weight).pop(MARK, None)

    def end(self) -> None:
        """After a batch, or what there was of it."""
        self.unmark()
        self._left.clear()
        self._queued.clear()

    def leave(self, unit: Unit, backward: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what `backward`, the first half of `unit`, returns; what it leaves is kept for `compute`."""
        self._uses, before = [], self._queues()
        try:
            found = backward()
        finally:
            uses, self._uses = self._uses, None
        self._queued[unit] = [after - length for length, after in zip(before, self._queues(), strict=True)]
        self._keep_apart(uses)
        of_weight: dict[tuple[int, int], list[_Use]] = {}
        for use in (
            one for one in uses if one.weight.requires_grad
        ):  # a weight comes where it is used last, as its gradient is then complete
            key = use.backward, id(use.weight)
            of_weight[key] = [*of_weight.pop(key, []), use]
        with self._recording(unit), torch.enable_grad():
            self._left[unit] = [_node_of(uses) for uses in of_weight.values()]
        return found

    def compute(self, unit: Unit) -> None:
        """Accumulate the gradients that the first half of `unit` has left, in the order of a whole backward."""
        left = self._left.pop(unit)[::-1]
        while left:
            node = left.pop()
            torch.autograd.backward(node, node.detach())
        for layer, count in zip(self._layers, self._queued.pop(unit), strict=True):
            for _ in range(count):
                layer.backward_dw()

    def add(
        self,
        weight: torch.nn.Parameter,
        tensors: Sequence[Tensor],
        product: Callable[..., Tensor | None],
        cast: object = None,
    ) -> None:
        """Leave `product(*tensors)` for the second half. Raises RuntimeError outside of a first half."""
        if self._uses is None:
            raise RuntimeError(
                "a backward outside of the schedule reaches layers whose backwards are in halves: take a schedule of "
                "whole backwards, such as 1f1b"
            )
        own = tuple(tensor.detach() for tensor in tensors)
        backward = torch._C._current_graph_task_id()
        self._uses.append(_Use(weight, own, product, streams.current(own[0].device), cast, backward))

    def _keep_apart(self, uses: Iterable[_Use]) -> None:
        """Give gradients memory of their own that autograd has put where a second half reads, and would add to there.

        A gradient that comes to a parameter unchanged, but for a view, becomes its `grad`.
        """
        read = {tensor.untyped_storage()._cdata for use in uses for tensor in use.tensors}
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.untyped_storage()._cdata in read:
                parameter.grad = parameter.grad.clone()

    def _queues(self) -> list[int]:
        return [layer.wgrad_store.context.qsize() for layer in self._layers]


def whole_layers(chunks: Iterable[torch.nn.Module]) -> int:
    """Return how many layers could leave gradients for a second half, and were not made to."""
    return sum(hasattr(one, "wgrad_store") and not _delays(one) for chunk in chunks for one in chunk.modules())


def queued_bytes(chunks: Iterable[torch.nn.Module]) -> int:
    """Return the bytes that wait in the queues of layers with delayed gradients."""
    layers: list[Any] = [one for chunk in chunks for one in chunk.modules() if _delays(one)]
    stores = [one.wgrad_store.context.queue for one in layers]
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in _tensors_in(stores)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from plain_parts(value)
    elif isinstance(value, list | tuple | deque):
        for one in value:
            yield from _tensors_in(one)


def _delays(layer: Any) -> bool:
    """Return whether `layer` is one of Transformer Engine's whose backward queues the gradients of its weights."""
    store = getattr(layer, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def _node_of(uses: list[_Use]) -> Tensor:
    """Return the node whose backward accumulates the gradient of the weight of `uses`; on the stream of the last."""
    tensors = [tensor for use in uses for tensor in use.tensors]
    parts = [(len(use.tensors), use.product, use.cast) for use in uses]
    with streams.on(uses[-1].stream):
        return cast(Tensor, _Products.apply(uses[-1].weight, parts, *tensors))  # type: ignore[no-untyped-call]


class _Products(torch.autograd.Function):
    """Its backward gives the gradient of a weight: the sum of the products of its uses, in their order.

    Uses that share a cast are summed before it, as autograd does.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, parts: list[Any], *tensors: Tensor) -> Tensor:
        ctx.dtype, ctx.parts = weight.dtype, parts
        ctx.save_for_backward(*tensors)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        saved = ctx.saved_tensors
        tensors, sums = iter(saved), dict[object, Tensor]()
        for count, product, shared in ctx.parts:
            made = product(*islice(tensors, count))
            if made is not None:
                key = object() if shared is None else shared
                # Behind the others: a sum reaches the weight when its last use has been added.
                sums[key] = sums.pop(key) + made if key in sums else made
        total = None
        for made in sums.values():
            made = made.to(ctx.dtype)
            total = made if total is None else total + made
        return total, None, *[None] * len(saved)
