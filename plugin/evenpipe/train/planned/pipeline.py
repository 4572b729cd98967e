"""PlannedPipeline: one stage of a plain model that `evenpipe partition` has cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.code import Boundary, Draws, Part, load_parts, tensors_of, users_lines
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.search.problem import PartitionError
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.figures import StageFigures, per_stage
from evenpipe.runtime.keep import Keeper
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Unit
from evenpipe.train.pipeline import Pipeline, shares, stage_in
from evenpipe.train.plain_steps import SharedGradients, scaled_to
from evenpipe.train.planned.ties import Ties
from evenpipe.train.planned.truth import beside_plan

__all__ = ["PlannedPipeline"]


class PlannedPipeline(Pipeline):
    """One stage of a cut model, in a process of its own: forwards, backwards and messages of every batch.

    plan: what `evenpipe partition --out` wrote, with the code of its stages beside it.
    model: the model that it is of, uncut; this stage takes those parameters and buffers of it that it uses.
    seed: of random numbers, which depend on it, on the micro-batch and on the operation alone.
    group: the ranks of the pipeline, stage by stage; all ranks, if left out.
    observer: is told of every action. With `measure`, `executor.counter` knows what this stage saves, and `truth` what
    all stages took.

    Parameters that several stages use have a copy on each, with the same gradient. All ranks of the group make it
    alike. Raises PartitionError or StageCodeError (both ValueError), one line, where the plan cannot be read, is of
    another model or number of processes, or cannot be trained.
    """

    def __init__(
        self,
        plan: str | Path,
        model: nn.Module,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        measure: bool = False,
    ) -> None:
        path = Path(plan)
        self.plan = Plan.read(path)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) != self.plan.stage_count:
            raise PartitionError(
                f"{path}: is for {self.plan.stage_count} stages, and there are {len(ranks)} processes: start as many, "
                f"or make a plan with --stages {len(ranks)}"
            )
        program = self.plan.program
        stage = stage_in(program, group, "planned", "PlannedPipeline")
        parts = load_parts(path, stage, model)
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        super().__init__(parts, _edges(parts, device), program, group, observer, measure)
        self.parts = parts
        if any(part.KEEPING.nodes for part in parts):
            self.executor.keeper = Keeper(self.executor.store, self.device)
        self.seed = seed
        #: Every name that a parameter or a buffer has in the model, and the first of them.
        self._names = _first_names(model)
        of_parts = ((name, one) for part in parts for name, one in tensors_of(part).items())
        self._own = {self._names[name]: one for name, one in of_parts if name in self._names}
        self._parameters = {name: one for name, one in self._own.items() if isinstance(one, nn.Parameter)}
        held: list[list[str]] = [[] for _ in ranks]
        dist.all_gather_object(held, list(self._own), group=group)
        self._owner = {name: stage for stage, names in reversed(list(enumerate(held))) for name in names}
        state = model.state_dict()
        self._unused = {name: one for name, one in state.items() if self._names.get(name) not in self._owner}
        parameters = dict(model.named_parameters())
        tied = {name for name, one in parameters.items() if one.requires_grad}
        self._ties = Ties([tied.intersection(names) for names in held], self._parameters, stage, ranks, device)
        self._saved = list(state)
        self._learned = [name for name in parameters if name in self._owner]

    def step(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Forward and backward of a batch; gradients of its mean loss are added to `parameter.grad`.

        batch: the arguments of the model's forward, alike on all ranks; every micro-batch gets an equal share of each
        one's first dimension. Returns the mean loss where the model ends, None elsewhere. Raises ValueError where the
        batch cannot be shared out, or is not of the shapes that the plan is for.
        """
        with self._ties.summed():
            return self.carry_out(batch)

    def shared(self, batch: Mapping[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
        """The arguments of each micro-batch."""
        count = self.program.schedule.micro_batches
        for name, one in batch.items():
            if not isinstance(one, Tensor):
                kind = type(one).__name__
                raise ValueError(f"batch[{name!r}] is a {kind}: give tensors only; anything else is as in the plan")
        of_inputs = {name: shares(name, one, count) if one.dim() else [one] * count for name, one in batch.items()}
        return [{name: of_all[number] for name, of_all in of_inputs.items()} for number in range(count)]

    def made(self, item: Callable[[int], Any], found: dict[int, Tensor], first: int) -> ModuleStage:
        """Random numbers are those of batch `first`, and of as many after it as there are."""
        count, stride = self.program.schedule.micro_batches, self.stride

        def share_of_loss(micro_batch: int, output: tuple[Tensor]) -> Tensor:
            [loss] = output
            found[micro_batch] = loss.detach()
            return loss / count

        def number(micro_batch: int) -> int:
            return (first + micro_batch // count * stride) * count + micro_batch % count

        return _PlannedStage(self, item, number, share_of_loss)

    @property
    def shared_gradients(self) -> SharedGradients:
        return self._ties

    def squares(self) -> Tensor:
        """By parameter of the model, each counted on the first stage that has it."""
        found = torch.zeros(len(self._learned), dtype=torch.float64, device=self.device)
        for number, name in enumerate(self._learned):
            gradient = self._parameters[name].grad if self._owner[name] == self.stage else None
            if gradient is not None:
                found[number] = gradient.double().square().sum()
        return found

    def clip_grad_norm(self, limit: float) -> float:
        """Scale all stages' gradients so that their norm is at most `limit`, 0 for any; returns the norm before.

        Of copies of a parameter, one counts. All ranks of the group call it, between `step` and the optimizer's.
        """
        found = self.squares()
        # Each is of one stage: whatever order this sum is made in, it is exact.
        dist.all_reduce(found, group=self._group)
        norm = math.sqrt(sum(found.tolist()))
        scaled_to(limit, norm, [one.grad for one in self._parameters.values() if one.grad is not None])
        return norm

    def numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        """This stage's parameters, with their number in the whole model."""
        return ((number, self._parameters[name]) for number, name in enumerate(self._learned) if name in self._own)

    def truth(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What the plan says of every stage's time and memory, and what the last batch took: a line a stage.

        For the first stage; nothing elsewhere. All ranks of the group call it after `optimizer`'s step, with gradients
        in place. Memory is saved activations, parameters, gradients, optimizer, and a message each way. Raises
        ValueError without `measure`.
        """
        if not self.executor.measure:
            raise ValueError("truth: nothing was measured: make the PlannedPipeline with measure=True")
        kept, mine = self.kept_bytes(optimizer), StageFigures.of(self.executor)
        held = mine.peak_bytes + kept.static_bytes + kept.weight_version_bytes + kept.message_bytes
        figures = per_stage(mine._replace(peak_bytes=held), self.stage, self.plan.stage_count, self.device, self._group)
        return beside_plan(self.plan, figures) if self.stage == 0 else []

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's parameters and buffers, by the names that they have in the model."""
        return {name: one.detach() for name, one in self._own.items()}

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The uncut model's, on the host of the first stage; None elsewhere. All ranks of the group call it."""
        mine = {name: one.cpu() for name, one in self.state_dict().items() if self._owner[name] == self.stage}
        ranks = dist.get_process_group_ranks(self._group)
        gathered: list[Any] | None = [None] * len(ranks) if self.stage == 0 else None
        dist.gather_object(mine, gathered, dst=ranks[0], group=self._group)
        if gathered is None:
            return None
        whole = {name: one for of_stage in gathered for name, one in of_stage.items()}
        whole |= {name: one.cpu() for name, one in self._unused.items()}
        return {name: whole[name if name in whole else self._names[name]] for name in self._saved}

    def _is_saved(self, name: str) -> bool:
        """Whether the model's `state_dict` has this parameter or buffer, under whatever name."""
        return any(self._names.get(saved) == name for saved in self._saved)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over this stage's of the uncut model's state, or of what `state_dict` gave. Raises ValueError."""
        given = {self._names.get(name, name): one for name, one in state.items()}
        mine = {name: one for name, one in self._own.items() if name in given or self._is_saved(name)}
        wanted = f"give one of {self.plan.origin.model}"
        for name, one in mine.items():
            if name not in given:
                raise ValueError(f"{name}: is not in the state to load: {wanted}")
            if given[name].shape != one.shape:
                raise ValueError(f"{name}: is {tuple(given[name].shape)}, and not {tuple(one.shape)}: {wanted}")
        with torch.no_grad():
            for name, one in (mine | {name: one for name, one in self._unused.items() if name in given}).items():
                one.copy_(given[name])

    def close(self) -> None:
        self._ties.close()
        super().close()


class _PlannedStage(ModuleStage):
    """A batch's forwards and backwards of generated parts, each of which reads the micro-batch's inputs.

    `number`: of a micro-batch among all of the training.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline,
        inputs_of: Callable[[int], Mapping[str, Tensor]],
        number: Callable[[int], int],
        loss: Callable[[int, Any], Tensor],
    ) -> None:
        super().__init__(pipeline.chunks, pipeline.edges, _no_input, loss, pipeline.loss_chunk)
        self._inputs_of = inputs_of
        self._parts = pipeline.parts
        self._keeper = pipeline.executor.keeper
        self._seed = pipeline.seed
        self._number = number

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Any:
        draws = Draws(self._seed, self._number(unit.micro_batch))
        part, given = self._parts[unit.chunk], self._inputs_of(unit.micro_batch)
        if self._keeper is None:
            return part(given, draws, *(inputs or ()))
        with self._keeper.forward(unit, part.KEEPING, draws) as keep:
            return part(given, draws, *(inputs or ()), keep=keep)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        with users_lines(self._parts[unit.chunk]):
            return super().backward(unit, gradients)

    def backward_input(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        with users_lines(self._parts[unit.chunk]):
            return super().backward_input(unit, gradients)

    def backward_weight(self, unit: Unit) -> None:
        with users_lines(self._parts[unit.chunk]):
            super().backward_weight(unit)


def _no_input(micro_batch: int) -> Tensor:
    raise AssertionError("parts are given all inputs of a micro-batch")


def _edges(parts: tuple[Part, ...], device: torch.device) -> Edges:
    loss = [torch.empty((), requires_grad=True)]
    return Edges(
        [_like(part.RECEIVES, device) for part in parts],
        [loss if part.LAST else _like(part.SENDS, device) for part in parts],
    )


def _like(boundaries: tuple[Boundary, ...], device: torch.device) -> list[Tensor]:
    """Tensors of these shapes, without the memory."""
    return [
        torch.empty((), dtype=one.dtype, device=device).expand(one.shape).requires_grad_(one.gradient)
        for one in boundaries
    ]


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in tensors_of(model).items()}
