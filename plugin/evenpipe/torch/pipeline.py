"""ModulePipeline: one stage of a pipeline of plain `nn.Module`s, trained under any schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.executor import Observer
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Program, Unit
from evenpipe.torch.base import Pipeline, shares, stage_in
from evenpipe.torch.batches import Evaluation, Tokens, mean_loss, share_of, weights_of
from evenpipe.torch.boundaries import Between, edges_of, inferred, learning
from evenpipe.torch.keywords import Keywords
from evenpipe.torch.offers import MODULE_OFFERS
from evenpipe.wording.nearest import nearest

__all__ = ["ModulePipeline"]


class ModulePipeline(Pipeline):
    """One stage of a pipeline, in a process of its own: forwards, backwards and messages of every batch.

    part: gives the part of the model at a position, counted from the model's start; called for those that `program`
    places on this stage, and no others. A part takes tensors, one by one, and returns one or a tuple of them, the last
    part what `loss` takes.
    program: what `evenpipe.schedule.build` returns, for as many stages as `group` has ranks.
    loss: `loss(output, target)` of a micro-batch, a scalar.
    boundary: a tensor like the one that passes from part to part for one micro-batch, or a function that gives those
    that leave the part at a position; their device is the parts'. Whole numbers travel without gradients, and so do all
    whose `requires_grad` is false, where it is true of any. Left out, the first batch's first micro-batch is forwarded
    once more, to find them.
    names: gives the uncut model's name of a part's parameter or buffer, by the part's number and the name in it. Left
    out, the uncut model is `nn.Sequential` of the parts: "3.weight".
    group: the ranks of the pipeline, stage by stage; all ranks, if left out.
    observer: is told of every action; with `measure`, `executor.counter` knows what this stage saves.
    swap: the share of what each micro-batch saves that may go to the memory of the host, above 0 and up to 1.

    All ranks of the group make it alike. Raises ValueError where `program` is not for such a group, or needs what
    this engine does not offer.
    """

    def __init__(
        self,
        part: Callable[[int], nn.Module],
        program: Program,
        loss: Callable[[Any, Any], Tensor],
        boundary: Tensor | Between | None = None,
        group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        measure: bool = False,
        swap: float | None = None,
        *,
        names: Callable[[int, str], str] | None = None,
    ) -> None:
        stage, places = stage_in(program, group, MODULE_OFFERS, "ModulePipeline", swap), program.schedule.places
        positions = [places.position(stage, chunk) for chunk in range(places.chunks)]
        chunks = [part(position) for position in positions]
        if boundary is None and torch.cuda.is_available() and not [*nn.ModuleList(chunks).parameters()]:
            raise ValueError(f"boundary: no parameter says the device of stage {stage}: give an example that does")
        between = None if boundary is None else learning(boundary, places)
        unknown = Edges([[]] * len(chunks), [[]] * len(chunks))
        edges = unknown if between is None else edges_of(places, positions, between)
        super().__init__(chunks, edges, program, group, observer, measure, swap)
        self._finds_edges = between is None
        self._loss = loss
        self._keywords = Keywords(chunks)
        #: Of each part's parameters and buffers, by their names in the uncut model.
        names = names or _name_in_sequential
        self._named = [{names(number, name): name for name in chunk.state_dict()} for number, chunk in self._numbered]
        mine = [(number, [*of]) for number, of in zip(positions, self._named, strict=True)], self._keywords.own
        stages: list[Any] = [None] * program.schedule.stages
        dist.all_gather_object(stages, mine, group=group)
        every = [name for _, names in sorted(part for parts, _ in stages for part in parts) for name in names]
        if twice := [name for name, times in Counter(every).items() if times > 1]:
            raise ValueError(f"names: {twice[0]!r} is of several parameters: give each its own name of the uncut model")
        self._every = every
        taken = [of_stage for _, of_stage in stages]
        self._keywords.known = None if None in taken else frozenset().union(*taken)

    def step(
        self,
        inputs: Tensor | Sequence[Tensor] = (),
        targets: Tensor | Sequence[Any] = (),
        *,
        tokens: Tokens | None = None,
        total: float | None = None,
        **keywords: Any,
    ) -> Tensor | None:
        """Forward and backward of a batch; gradients of its mean loss are added to `parameter.grad`.

        `inputs` are read where the model starts, `targets` where it ends: a tensor of whose first dimension every
        micro-batch has an equal share, or a sequence with an entry a micro-batch. `tokens` weigh micro-batches, of each
        of which `loss` is a mean over so many, by their share of `total`, or of their sum; without them all count the
        same. `keywords` go to each part that takes their names: a tensor's first dimension is shared out, a list has an
        entry a micro-batch, anything else is for all; all ranks give the same names. Returns the mean loss where the
        model ends, None elsewhere. Raises ValueError where they cannot be shared out, or no part takes a keyword.
        """
        return self.carry_out((inputs, targets, tokens, total, keywords))

    def evaluate(
        self,
        inputs: Tensor | Sequence[Any] = (),
        targets: Tensor | Sequence[Any] | None = None,
        *,
        tokens: Tokens | None = None,
        total: float | None = None,
        **keywords: Any,
    ) -> Evaluation:
        """Forward a batch without gradients, under any schedule, with modules in evaluation mode.

        Of what `step` takes; without `targets` no loss is computed. `outputs` are what the last part returns for each
        micro-batch, where the model ends, None elsewhere. Under 2bw all steps that are due are made first. All ranks of
        the group call it.
        """
        count = self.program.schedule.micro_batches
        items = self.shared((inputs, [None] * count if targets is None else targets, tokens, total, keywords))
        outputs: list[Any] = []

        def loss(micro_batch: int, output: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(()) if targets is None else self._loss(output, items[micro_batch][1])

        stage = self._stage(items.__getitem__, loss)
        self.forward_only(stage)
        if not self.is_last:
            return Evaluation(None, [], None)
        losses = [] if targets is None else list(stage.losses.values())
        return Evaluation(mean_loss(losses, items) if losses else None, losses, outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return this stage's parameters and buffers, by their names in the uncut model."""
        found = zip((chunk.state_dict() for chunk in self.chunks), self._named, strict=True)
        return {uncut: state[name] for state, names in found for uncut, name in names.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters with their names in the uncut model."""
        for chunk, names in zip(self.chunks, self._named, strict=True):
            of_name = {name: uncut for uncut, name in names.items()}
            yield from ((of_name[name], one) for name, one in chunk.named_parameters())

    def full_state_dict(self) -> dict[str, Any] | None:
        """Return the uncut model's, on the host of the first stage; None elsewhere. All ranks of the group call it."""
        found = self.gathered(self.state_dict())
        return None if found is None else {name: found[name] for name in self._every}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this stage's of the uncut model's state, or of what `state_dict` gave. Raises ValueError."""
        mine = self.state_dict()
        for name, one in mine.items():
            if name not in state:
                raise ValueError(f"{name}: is not in the state to load: give the uncut model's, or this stage's own")
            if isinstance(one, Tensor) and one.shape != state[name].shape:
                raise ValueError(f"{name}: is {tuple(state[name].shape)}, and the part's is {tuple(one.shape)}")
        if unknown := sorted(state.keys() - self._every):
            raise ValueError(f"{unknown[0]}: no stage has it: {nearest(unknown[0], self._every)}")
        for chunk, names in zip(self.chunks, self._named, strict=True):
            chunk.load_state_dict({name: state[uncut] for uncut, name in names.items()})

    @property
    def _numbered(self) -> Iterator[tuple[int, nn.Module]]:
        return zip(self.positions, self.chunks, strict=True)

    def shared(self, batch: Any) -> Sequence[tuple[Any, Any, dict[str, Any], float | None]]:
        """Return an input and a target, of which only the model's ends have any, what is given by name, and a weight.

        `batch` has `step`'s arguments, in its order, the keywords last and as a dict; those at the end may be left out.
        """
        count = self.program.schedule.micro_batches
        inputs, targets, tokens, total, keywords = (*batch, None, None, None)[:5]
        first = shares("inputs", inputs, count) if self.is_first else [None] * count
        last = shares("targets", targets, count) if self.is_last else [None] * count
        named = self._keywords.shared(keywords or {}, count)
        return list(zip(first, last, named, weights_of(tokens, total, count), strict=True))

    def stage_for(self, item: Callable[[int], Any], losses: dict[int, Tensor], first: int) -> ModuleStage:
        count = self.program.schedule.micro_batches

        def share_of_loss(micro_batch: int, output: Any) -> Tensor:
            _, target, _, weight = item(micro_batch)
            loss = self._loss(output, target)
            losses[micro_batch] = loss.detach()
            return self.scaled(share_of(loss, weight, count))

        return self._stage(item, share_of_loss, self.executor.recording(self.program))

    def _stage(
        self,
        item: Callable[[int], Any],
        loss: Callable[[int, Any], Tensor],
        recording: Callable[[Unit], AbstractContextManager[object]] | None = None,
    ) -> ModuleStage:
        """Return what computes micro-batches, each of which gets `item(i)`."""
        places = self.program.schedule.places

        def stage(edges: Edges) -> ModuleStage:
            return ModuleStage(
                self.chunks,
                edges,
                lambda one: item(one)[0],
                loss,
                self.loss_chunk,
                recording,
                self.program.schedule.recomputed_chunks(self.stage),
                lambda unit: self._keywords.of(unit.chunk, item(unit.micro_batch)[2]),
            )

        if self._finds_edges:
            compute = stage(self.edges).compute
            between = inferred(places, self.stage, self.chunks, compute, self.group, self.device)
            self.edges, self._finds_edges = edges_of(places, self.positions, between), False
        return stage(self.edges)


def _name_in_sequential(number: int, name: str) -> str:
    return f"{number}.{name.replace('_orig_mod.', '')}"  # which torch.compile puts around a module
