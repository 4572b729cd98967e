"""Linear layers of plain torch that leave the gradients of their weights for the second half of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from evenpipe.runtime.compiled_linear import SPLITS, anchor_of, linear_in_graph, whole_in_graph
from evenpipe.runtime.weight_gradients import WeightGradients
from evenpipe.schedule import Unit

__all__ = ["LinearGradients"]

#: Not by its name in `torch.nn.functional`, where others may have put one of theirs around it.
_LINEAR: Final = torch._C._nn.linear
_LINEAR_OPERATION: Final = torch.ops.aten.linear.default
_EMBEDDING_OPERATION: Final = torch.ops.aten.embedding.default


class LinearGradients(WeightGradients):
    """The second halves of the backwards of `chunk`, whose forwards run inside `calls`.

    Every call of `torch.nn.functional.linear` with one of its parameters as weight leaves its product, whatever module
    makes it, also when activation checkpointing calls it again. Bits are those of a whole backward: autograd computes
    the gradients of input and bias, and products are its own, in its order. If something else uses the weight too (a
    matmul, a penalty of weights), the gradient of that use is added in the first half already, and sums round
    differently. An autograd Function of a user's own leaves a product too if its backward finds these halves on its
    weight, by `getattr(weight, MARK, None)`, gives them `add(weight, tensors, product)`, and returns None in place of
    the gradient.

    What `torch.compile` compiles inside `calls` leaves products too, each with a copy of its tensors. Its graphs are
    others than those that it compiles outside.

    All other gradients are computed in the first half: of calls inside functions of torch's own
    (`multi_head_attention_forward`), of activation checkpoints within what is compiled, of a weight that the chunk has
    looked up as an embedding, and of one that another of `chunks` has too.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        recording: Callable[[Unit], AbstractContextManager[object]],
        chunks: Sequence[torch.nn.Module] = (),
    ) -> None:
        others = {id(weight) for other in chunks if other is not chunk for weight in other.parameters()}
        super().__init__(chunk, (one for one in chunk.parameters() if id(one) not in others), recording)
        self._at: dict[int, torch.nn.Parameter] = {}
        self.calls = _Calls(self, chunk)

    def leave(self, unit: Unit, backward: Callable[[], list[Tensor]]) -> list[Tensor]:
        def inside() -> list[Tensor]:
            with self.calls:
                return backward()

        self.begin()
        try:
            return super().leave(unit, inside)
        finally:
            self.unmark()
            self._at.clear()

    def add_of_graph(self, weight: Tensor, tensors: Sequence[Tensor]) -> None:
        """Leave the product of a compiled backward, or the gradient, by a tensor that lies where the weight does."""
        self._at = self._at or {one.data_ptr(): one for one in self.weights}
        found = self._at.get(weight.data_ptr())
        if found is None or found.shape != weight.shape:
            raise RuntimeError(
                "a compiled part was traced with weights of its own, and runs with those of another chunk: take a "
                "schedule of whole backwards, such as 1f1b"
            )
        self.add(found, tensors, _product_of(found) if len(tensors) > 1 else _itself)


class _Calls(TorchFunctionMode):
    """Sees every call of torch's functions, on autograd's threads too."""

    def __init__(self, halves: LinearGradients, chunk: torch.nn.Module) -> None:
        super().__init__()
        self._halves = halves
        self._weights = {id(one): one for one in halves.weights if one.dim() == 2 and one.is_floating_point()}
        #: An input of all that leaves a product, so that it has a backward whatever else has.
        self._anchor = anchor_of(next(iter(halves.weights), torch.empty(0)), halves.add_of_graph)
        looked_up = {id(one.weight) for one in chunk.modules() if isinstance(one, torch.nn.Embedding)}
        for one in chunk.parameters():  # by which a graph is compiled
            setattr(one, SPLITS, id(one) in self._weights and id(one) not in looked_up)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _LINEAR or func is _LINEAR_OPERATION:
            of = self._linear_in_graph if torch.compiler.is_compiling() else self._linear
            return of(func, *args, **kwargs)
        elif func is functional.embedding or func is _EMBEDDING_OPERATION:
            if not torch.compiler.is_compiling():
                for one in (*args, *kwargs.values()):
                    if self._weights.pop(id(one), None) is not None:
                        setattr(one, SPLITS, False)
        elif func is Tensor.backward or func is torch.autograd.backward:
            with self:  # which torch turns off while it calls a function
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear_in_graph(self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not getattr(weight, SPLITS, False) or not weight.requires_grad or not torch.is_grad_enabled():
            found: Tensor = func(input, weight, bias)
        elif torch._C._are_functorch_transforms_active():
            found = func(input, weight, bias)
        elif _folds(input):
            found = linear_in_graph(func, self._anchor, input, weight, bias)
        else:
            found = func(input, whole_in_graph(self._anchor, weight), bias)
        return found

    def _linear(self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        known = id(weight) in self._weights and weight.requires_grad and torch.is_grad_enabled()
        if not known or torch._C._are_functorch_transforms_active():
            found: Tensor = func(input, weight, bias)
            return found
        use = _Use(self._halves, weight, _product_of(weight))
        if type(input) not in (Tensor, torch.nn.Parameter) or not _folds(input):
            alias = _Whole.apply(self._anchor, use)  # type: ignore[no-untyped-call]
            found = func(input, alias, bias)
            return found
        stand_in, kept = weight.detach(), input
        if torch.is_autocast_enabled(weight.device.type):
            stand_in, node = _cast(weight)
            use = use._replace(cast=None if stand_in.dtype == weight.dtype else node)
            if input.is_leaf and input.requires_grad:  # autograd casts it once for all that takes it
                kept, _ = _cast(input)
            else:
                kept = input = input.to(stand_in.dtype)
        found = _Leave.apply(func(input, stand_in, bias), kept.detach(), self._anchor, use)  # type: ignore[no-untyped-call]
        return found


class _Use(NamedTuple):
    """How a linear layer uses a weight."""

    halves: LinearGradients
    weight: Any
    product: Callable[[Tensor, Tensor], Tensor]
    cast: object = None


class _Leave(torch.autograd.Function):
    """The output of a linear layer that has been computed without a gradient of its weight; saves what that takes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, kept: Tensor, anchor: Tensor, use: _Use) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(kept)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        halves, weight, product, cast = ctx.use
        halves.add(weight, [*ctx.saved_tensors, gradient], product, cast)
        return gradient, None, None, None


class _Whole(torch.autograd.Function):
    """A weight whose gradient is computed in the first half, and added to the others in the second."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: _Use) -> Tensor:
        ctx.use = use
        return use.weight.detach()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.use.halves.add(ctx.use.weight, [gradient], _itself)
        return None, None


def _product(taken: Tensor, gradient: Tensor) -> Tensor:
    return _rows(gradient).t().mm(_rows(taken))


def _transposed_product(taken: Tensor, gradient: Tensor) -> Tensor:
    return _rows(taken).t().mm(_rows(gradient)).t()


def _itself(gradient: Tensor) -> Tensor:
    return gradient


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product_of(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product as autograd makes it: by the weight's layout (mm_mat2_backward in FunctionsManual.cpp)."""
    return _product if weight.stride() == (weight.shape[1], 1) else _transposed_product


def _folds(taken: Tensor) -> bool:
    """Return whether torch makes one product of `taken`, whether or not the weight has a gradient (its should_fold)."""
    shape, strides = taken.shape, taken.stride()
    if taken.layout != torch.strided or taken.dim() < 2:
        return False
    return all(strides[one] == strides[one + 1] * shape[one + 1] for one in range(taken.dim() - 2))


def _cast(value: Tensor) -> tuple[Tensor, object]:
    """Return what torch.autocast makes of `value`, which it keeps for those that take it next, and that node."""
    with saved_tensors_hooks(_as_is, _as_is):
        node: Any = torch.matmul(value, value.new_empty(value.shape[-1], 0, requires_grad=True)).grad_fn
    while not hasattr(node, "_saved_self"):
        node = node.next_functions[0][0]
    return node._saved_self.detach(), node.next_functions[0][0]


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _backward(tensors: Any, gradient: Any = None, inputs: Any = None, **kwargs: Any) -> None:
    """Call `torch.autograd.backward` by edges, of which a mode sees nothing; `Tensor.backward`'s arguments too."""
    gradients = kwargs.pop("grad_tensors", gradient)
    edges = None if inputs is None else _edges(inputs)
    torch.autograd.backward(_edges(tensors), gradients, inputs=edges, **kwargs)


def _edges(tensors: Any) -> list[GradientEdge]:
    each = [tensors] if isinstance(tensors, Tensor | GradientEdge) else tensors
    return [get_gradient_edge(one) if isinstance(one, Tensor) else one for one in each]
