"""What the executor needs of one pipeline stage, and the plain `nn.Module` that fulfils it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input

from evenpipe.runtime.precisions import autocast_dtype
from evenpipe.schedule import FORWARD, Kind, Unit

__all__ = ["Edges", "ModuleStage", "SplitStage", "Stage", "Stepping", "VaryingStage", "check_sent"]


class Stage(Protocol):
    """The compute of one stage. A unit is one micro-batch in one model chunk of this stage."""

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Fresh contiguous tensors for what `kind` (FORWARD: input, BACKWARD: gradient of the output) will receive."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Compute `unit` from `inputs` (None at the start of the model) and return what the next stage needs."""

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Back-propagate `gradients` of the outputs (None at the end of the model); return those of the inputs."""


class SplitStage(Stage, Protocol):
    """A stage whose backward can be done in two halves."""

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return what `backward` does; the gradients of the weights are left for `backward_weight`."""

    def backward_weight(self, unit: Unit) -> None:
        """Accumulate the gradients of the weights, and let go of what is saved of the unit."""


class VaryingStage(Stage, Protocol):
    """A stage that gives and takes other tensors from one micro-batch to the next."""

    def description(self, unit: Unit, outputs: list[Tensor]) -> list[int]:
        """Describe the `outputs` of `unit` in whole numbers, for the next stage's `buffers_like`."""

    def buffers_like(self, unit: Unit, description: Sequence[int]) -> list[Tensor]:
        """Return buffers for the input of `unit` that the stage before has described so."""


class Stepping(Protocol):
    """The optimizer of a stage in a stream without flushes: weights change between two of the stage's actions."""

    def use(self, unit: Unit) -> None:
        """Point the stage's parameters at the weights of `unit`, which is computed next."""

    def gather(self) -> None:
        """Start to exchange with all stages what the last batch's step depends on; all have computed that batch."""

    def update(self) -> None:
        """Finish that step."""


class Edges(NamedTuple):
    """For each chunk of a stage, tensors like those that it takes and gives for a micro-batch.

    The model's start takes none, and its end gives the loss. What comes back for those that require a gradient is one.
    """

    taken: Sequence[Sequence[Tensor]]
    given: Sequence[Sequence[Tensor]]

    @classmethod
    def alike(cls, boundary: Tensor, chunks: int = 1) -> Edges:
        """One tensor like `boundary` passes from chunk to chunk."""
        like = [boundary.detach().requires_grad_()]
        return cls([like] * chunks, [like] * chunks)


class ModuleStage:
    """A stage of plain modules, one per model chunk, that pass tensors like those of `edges` from chunk to chunk.

    A module takes them one by one, and returns one or a tuple of them. `first(i)` gives micro-batch i's input at the
    start of the model, `loss(i, output)` its scalar loss at the end, which follows chunk `loss_chunk` of this stage, or
    is on another one (None).
    Gradients accumulate in `parameter.grad`; `losses[i]` holds the detached losses.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        edges: Edges,
        first: Callable[[int], Tensor],
        loss: Callable[[int, Any], Tensor],
        loss_chunk: int | None,
    ) -> None:
        self.chunks = list(chunks)
        self.losses: dict[int, Tensor] = {}
        self._edges = edges
        self._first = first
        self._loss = loss
        self._loss_chunk = loss_chunk
        self._inputs: dict[Unit, list[Tensor]] = {}  # those that have gradients
        #: By their number among those that gradients come back for: `_Start`s, which hold no memory of theirs.
        self._outputs: dict[Unit, dict[int, Tensor]] = {}
        self._owed: dict[Unit, Callable[[], object]] = {}  # the second halves of backwards

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """Return tensors like those of the edge; for gradients like those that have any."""
        if kind == FORWARD:
            like = self._edges.taken[unit.chunk]
            return [_empty(one).requires_grad_(one.requires_grad) for one in like]
        return [_empty(one) for one in self._edges.given[unit.chunk] if one.requires_grad]

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Return the chunk's outputs, or its loss where the model ends."""
        returned = self.compute(unit, inputs)
        if unit.chunk == self._loss_chunk:
            returned = self._loss(unit.micro_batch, returned)
            self.losses[unit.micro_batch] = returned.detach()
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        edge = self._edges.given[unit.chunk]
        if unit.chunk != self._loss_chunk:
            check_sent(outputs, [(tuple(like.shape), like.dtype) for like in edge], unit)
        if inputs is not None and torch.is_grad_enabled():
            self._inputs[unit] = _learning(inputs, self._edges.taken[unit.chunk])
        # Of what frozen parameters alone have made, a gradient that comes back is needed by nobody.
        given = [(number, one) for number, one in enumerate(_learning(outputs, edge)) if one.requires_grad]
        self._outputs[unit] = {number: _Start.apply(one) for number, one in given}  # type: ignore[no-untyped-call]
        return outputs

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Any:
        """Return what the unit's module returns."""
        arguments = [self._first(unit.micro_batch)] if inputs is None else inputs
        return self.chunks[unit.chunk](*arguments)

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        for held in (self._inputs, self._outputs, self._owed):
            held.clear()

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs; nothing at the start of the model."""
        outputs = self._outputs.pop(unit)
        if outputs:
            torch.autograd.backward(list(outputs.values()), _of(outputs, gradients))
        return [_gradient(taken, unit) for taken in self._inputs.pop(unit, ())]

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs. At the model's start all is left for later: nobody waits."""
        taken = self._inputs.get(unit)
        if not taken:
            self._owed[unit] = lambda: self.backward(unit, gradients)
            return []
        outputs = self._outputs.pop(unit)
        given = _of(outputs, gradients) or [torch.ones_like(one) for one in outputs.values()]
        pairs = list(zip(outputs.values(), given, strict=True))
        now = [(one, gradient) for one, gradient in pairs if _depends(one, taken)]
        # Of what a branch of the model that starts here gives, torch's halves would leave the weights out.
        later = [(one, gradient) for one, gradient in pairs if not _depends(one, taken)]
        weights = list(self.chunks[unit.chunk].parameters())
        _, groups = stage_backward_input([one for one, _ in now], [one for _, one in now], taken, iter(weights))

        def weight_half() -> None:
            if later:
                torch.autograd.backward([one for one, _ in later], [one for _, one in later], retain_graph=True)
            _second_half(weights, groups)

        self._owed[unit] = weight_half
        del self._inputs[unit]
        return [_gradient(one, unit) for one in taken]

    def backward_weight(self, unit: Unit) -> None:
        """Accumulate into `parameter.grad`, as a whole backward does."""
        self._owed.pop(unit)()


def check_sent(outputs: Sequence[Any], edge: Sequence[tuple[tuple[int, ...], torch.dtype]], unit: Unit) -> None:
    """Raise ValueError where `outputs` of `unit` have not the shapes and dtypes that the next part receives by."""
    for number, (shape, dtype) in enumerate(edge[: len(outputs)]):
        output = outputs[number]
        if not isinstance(output, Tensor) or output.layout != torch.strided:
            kind = str(output.layout) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"{_output(unit, number)} is {kind}: parts hand on dense tensors")
        if (tuple(output.shape), output.dtype) != (shape, dtype):
            raise ValueError(
                f"{_output(unit, number)} is {tuple(output.shape)}, {output.dtype}, and the next part receives "
                f"{shape}, {dtype}: {_remedy(output, dtype)}"
            )
    if len(outputs) != len(edge):
        raise ValueError(
            f"chunk {unit.chunk}: its output is {len(outputs)} tensors, and the next part receives {len(edge)}"
        )


def _output(unit: Unit, number: int) -> str:
    return f"chunk {unit.chunk}: output {number} of micro-batch {unit.micro_batch}"


def _remedy(sent: Tensor, dtype: torch.dtype) -> str:
    if sent.dtype == dtype:
        return "give micro-batches of one size, the one that the pipeline was made for"
    if autocast_dtype(sent.device.type) is not None:
        return "torch.autocast is on: make the pipeline, or its plan, for what it gives, or turn it off"
    return "cast what is handed on, or make the pipeline for this dtype"


class _Start(torch.autograd.Function):
    """The start of a backward in place of an output: its graph, with the memory of one element.

    What has been sent on is held by autograd alone, where it needs it. torch's halves of a backward detach it in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        element = torch.empty(1, dtype=output.dtype, device=output.device)
        return element.new_empty(0).set_(element.untyped_storage(), 0, output.shape, (0,) * output.dim())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _second_half(weights: Sequence[torch.nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Accumulate into `weights` what torch's first half of a backward has left for later.

    A group has weights (`params`, their nodes), the nodes at which the graph of the inputs leaves theirs
    (`intermediates`), and the gradients that came there (`grads`). torch's own second half counts a gradient twice
    before 2.13 where a weight is used twice, one use behind the other; in 2.10 it adds up those of one node's outputs.
    """
    by_node = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    for group in groups:
        nodes, came = list(group.pop("intermediates")), group.pop("grads", [])
        reached = [
            (GradientEdge(node, number), gradient)
            for node, gradients in zip(nodes, came, strict=False)
            for number, gradient in enumerate(gradients or ())
            if gradient is not None
        ]
        if not reached:
            continue
        params = list(group["params"])
        # What a use behind this one hands on to it is in what came here already.
        handles = [
            node.register_prehook(lambda _, own=gradients: own)
            for node, gradients in zip(nodes, came, strict=True)
            if len(nodes) > 1 and gradients is not None
        ]
        try:
            edges, given = zip(*reached, strict=True)
            of_weights = torch.autograd.grad(edges, [GradientEdge(node, 0) for node in params], given)
        except RuntimeError as error:
            own = next((type(node).__name__ for node in nodes if isinstance(node, BackwardCFunction)), None)
            if own is None:
                raise
            raise RuntimeError(
                f"torch {torch.__version__} has let go of {own}, of a function with a backward of its own, between the "
                "halves of a backward: use torch 2.13 or newer, or a schedule of whole backwards, such as 1f1b"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        for node, gradient in zip(params, of_weights, strict=True):
            weight = by_node[node]
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _learning(tensors: Sequence[Tensor], edge: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of an edge that a gradient comes back for."""
    return [one for one, like in zip(tensors, edge, strict=True) if like.requires_grad]


def _of(outputs: dict[int, Tensor], gradients: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Return the gradients of these outputs among those that have come back."""
    return None if gradients is None else [gradients[number] for number in outputs]


def _depends(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether a gradient of `output` reaches any of the leaves `inputs`."""
    leaves = {id(one) for one in inputs}
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        nodes += [one for one, _ in node.next_functions]
    return False


def _gradient(received: Tensor, unit: Unit) -> Tensor:
    if received.grad is None:
        raise RuntimeError(
            f"chunk {unit.chunk}: its output does not depend on its input, so that the stage before would wait for a "
            "gradient for ever: have each part of the model use what it takes"
        )
    return received.grad
