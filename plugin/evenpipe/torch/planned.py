"""PlannedPipeline: one stage of a plain model that `evenpipe partition` has cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.problem import PartitionError
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.host_memory import check_hosts
from evenpipe.runtime.precisions import autocast_dtype, autocasting, precision_name
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Unit
from evenpipe.stage_code import (
    Boundary,
    Draws,
    Part,
    State,
    compare_with_plan,
    load_parts,
    sizes_on_host,
    tensors_of,
    users_lines,
)
from evenpipe.torch.base import Pipeline, shares, stage_in
from evenpipe.torch.batches import Evaluation, Shown, Tokens, WithoutDropout, mean_loss, share_of, weights_of
from evenpipe.torch.offers import PLANNED_OFFERS
from evenpipe.torch.ties import Ties

__all__ = ["PlannedPipeline"]

#: By which a model of Hugging Face's divides the sum over a micro-batch's tokens.
_COUNT: Final = "num_items_in_batch"


class PlannedPipeline(Pipeline):
    """One stage of a cut model, in a process of its own: forwards, backwards and messages of every batch.

    plan: what `evenpipe partition --out` wrote, with the code of its stages beside it.
    model: the model that it is of, uncut; this stage takes those parameters and buffers of it that it uses.
    device: of this stage; where the model is, if left out. What the stage uses is copied there, and nothing else, so
    that the model may stay on the CPU, or on the meta device with `state`: its state dict, or the path of a
    safetensors file, of a folder with one, or of the index of several. A stage reads its own tensors alone.
    seed: of random numbers, which depend on it, on the micro-batch and on the operation alone.
    group: the ranks of the pipeline, stage by stage; all ranks, if left out.
    job: the ranks whose swaps add up on a host, all of which make their pipelines now; those of `group`, if left out.
    observer: is told of every action. With `measure`, `executor.counter` knows what this stage saves, and `truth` what
    all stages took. Stage files that do more than tensor operations, or that changed, are executed with `trust` only.

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
        job: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        measure: bool = False,
        trust: bool = False,
        device: torch.device | str | None = None,
        state: State | None = None,
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
        stage = stage_in(program, group, PLANNED_OFFERS, "PlannedPipeline")
        device = next((one.device for one in model.parameters()), torch.device("cpu")) if device is None else device
        device = torch.empty(0, device=device).device  # cuda is cuda:N
        if device.type == "meta":
            raise PartitionError(f"{path}: the model is on the meta device: give device=, and state= for its values")
        parts = load_parts(path, stage, model, trust, device, state)
        super().__init__(parts, _edges(parts, device), program, group, observer, measure)
        self.parts = parts
        #: Bytes of what this stage has on its host at once, storage by storage.
        self.host_sizes = sizes_on_host(parts, self.program.schedule.actions[stage])
        try:
            check_hosts(self.host_sizes, group if job is None else job)
        except ValueError as error:
            raise PartitionError(f"{path}: {error}") from error
        if any(part.KEEPING.nodes for part in parts):
            self.executor.keeper = keeper = Keeper(self.executor.store, self.device)
            self.executor.connections.compare(keeper.link.named)
            keeper.link.memory.reserve(self.host_sizes)
            if self.host_sizes:
                self.executor.observer.remark(keeper.link.memory.held_line(stage))
        self.seed = seed
        #: Every name that a parameter or a buffer has in the model, and the first of them.
        self._names = _first_names(model)
        of_parts = ((name, one) for part in parts for name, one in tensors_of(part).items())
        self._own = {self._names[name]: one for name, one in of_parts if name in self._names}
        self._parameters = {name: one for name, one in self._own.items() if isinstance(one, nn.Parameter)}
        read = [name for part in parts for name in (*part.INPUTS, *part.UNREAD)]
        gathered: list[tuple[list[str], list[str]]] = [([], []) for _ in ranks]
        dist.all_gather_object(gathered, (list(self._own), read), group=group)
        held = [names for names, _ in gathered]
        #: The arguments that the model was traced with.
        self._inputs = list(dict.fromkeys(name for _, of_stage in gathered for name in of_stage))
        self._owner = {name: stage for stage, names in reversed(list(enumerate(held))) for name in names}
        whole = model.state_dict()
        unused = {name: one for name, one in whole.items() if self._names.get(name) not in self._owner}
        self._unused = {name: one for name, one in unused.items() if not one.is_meta}
        parameters = dict(model.named_parameters())
        tied = {name for name, one in parameters.items() if one.requires_grad}
        self._ties = Ties([tied.intersection(names) for names in held], self._parameters, stage, ranks, device)
        self._saved = list(whole)
        self._learned = [name for name in parameters if name in self._owner]

    def step(
        self, batch: Mapping[str, Tensor], *, tokens: Tokens | None = None, total: float | None = None
    ) -> Tensor | None:
        """Forward and backward of a batch; gradients of its mean loss are added to `parameter.grad`.

        batch: the arguments of the model's forward, alike on all ranks; every micro-batch gets an equal share of each
        one's first dimension. Returns the mean of the micro-batches' losses where the model ends, None elsewhere: where
        each is a mean over tokens, and their numbers differ, that is not the mean over all tokens. It is with `tokens`:
        how many each micro-batch has; they weigh by their share of `total`, or of their sum. Of a model that was traced
        with `num_items_in_batch`, which divides its loss, losses are added up. Raises ValueError where the batch cannot
        be shared out, has what the plan's model was not traced with, or is of other shapes.
        """
        with self._ties.summed():
            return self.carry_out((batch, tokens, total))

    def evaluate(
        self, batch: Mapping[str, Tensor], *, tokens: Tokens | None = None, total: float | None = None
    ) -> Evaluation:
        """Forward a batch, as `step` takes it, without gradients, under any schedule.

        Without dropout, and with batch norm's running figures; what else forward does by `self.training` is as it was
        traced. `outputs` are what the model returns beside its loss, where that is computed on the way to it, such as
        `logits`: by name, on the stage that computes it. All ranks of the group call it; under 2bw all steps that are
        due are made first.
        """
        items, shown = self.shared((batch, tokens, total)), Shown()
        stage = _PlannedStage(self, lambda one: items[one][0], lambda one: one, lambda one, output: output[0], shown)
        self.forward_only(stage)
        losses = list(stage.losses.values())
        return Evaluation(mean_loss(losses, items) if self.is_last else None, losses, shown.whole)

    def shared(self, batch: Any) -> Sequence[tuple[Mapping[str, Tensor], float | None]]:
        """Return each micro-batch's arguments and its weight; `batch` is what `step` takes, a tuple of several."""
        count = self.program.schedule.micro_batches
        batch, tokens, total = (*batch, None, None)[:3] if isinstance(batch, tuple) else (batch, None, None)
        weights = weights_of(tokens, total, count)
        if _COUNT in batch and _COUNT in self._inputs:
            if tokens is not None:
                raise ValueError(f"tokens: {_COUNT} of the batch weighs its loss already: give one of them")
            weights = [1.0] * count
        for name, one in batch.items():
            if name not in self._inputs:
                known = ", ".join(self._inputs)
                raise ValueError(
                    f"batch[{name!r}]: the plan's model has no such input, it was traced with {known}: leave it out, "
                    f"or make a plan with it{', or give tokens= in its place' if name == _COUNT else ''}"
                )
            if not isinstance(one, Tensor):
                kind = type(one).__name__
                raise ValueError(f"batch[{name!r}] is a {kind}: give tensors only; anything else is as in the plan")
        of_inputs = {name: shares(name, one, count) if one.dim() else [one] * count for name, one in batch.items()}
        given = [{name: of_all[number] for name, of_all in of_inputs.items()} for number in range(count)]
        return list(zip(given, weights, strict=True))

    def stage_for(self, item: Callable[[int], Any], losses: dict[int, Tensor], first: int) -> ModuleStage:
        """Return the stage; its random numbers are those of batch `first` and of the batches after it."""
        count, stride = self.program.schedule.micro_batches, self.stride

        def share_of_loss(micro_batch: int, output: tuple[Tensor]) -> Tensor:
            [loss] = output
            losses[micro_batch] = loss.detach()
            return self.scaled(share_of(loss, item(micro_batch)[1], count))

        def number(micro_batch: int) -> int:
            return (first + micro_batch // count * stride) * count + micro_batch % count

        return _PlannedStage(self, lambda one: item(one)[0], number, share_of_loss)

    @property
    def shared_gradients(self) -> Ties:
        return self._ties

    def squares(self) -> Tensor:
        """Return sums of squares by parameter of the model, each counted on the first stage that has it."""
        found = torch.zeros(len(self._learned), dtype=torch.float64, device=self.device)
        for number, name in enumerate(self._learned):
            gradient = self._parameters[name].grad if self._owner[name] == self.stage else None
            if gradient is not None:
                found[number] = gradient.double().square().sum()
        return found

    def numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Return this stage's parameters, with their numbers in the whole model."""
        return ((number, self._parameters[name]) for number, name in enumerate(self._learned) if name in self._own)

    def truth(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return what the plan says of every stage's time and memory, and what the last batch took: a line a stage.

        For the first stage; nothing elsewhere. All ranks of the group call it after `optimizer`'s step, with gradients
        in place. Memory is saved activations, parameters, gradients, optimizer, and a message each way. Raises
        ValueError without `measure`.
        """
        if not self.executor.measure:
            raise ValueError("truth: nothing was measured: make the PlannedPipeline with measure=True")
        kept, mine = self.kept_bytes(optimizer), StageFigures.of(self.executor)
        held = mine.peak_bytes + kept.static_bytes + kept.weight_version_bytes + kept.message_bytes
        figures = per_stage(mine._replace(peak_bytes=held), self.stage, self.plan.stage_count, self.device, self._group)
        return compare_with_plan(self.plan, figures) if self.stage == 0 else []

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's parameters and buffers, by the names that they have in the model."""
        return {name: one.detach() for name, one in self._own.items()}

    def own_state(self) -> dict[str, Tensor]:
        """Return those of `state_dict` that the model's has too, and no earlier stage: all stages' are the model's."""
        saved = {self._names.get(name) for name in self._saved}
        mine = self.state_dict().items()
        return {name: one for name, one in mine if name in saved and self._owner[name] == self.stage}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters with the first of their names in the model."""
        yield from self._parameters.items()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Return the uncut model's, on the host of the first stage; None elsewhere. All ranks of the group call it."""
        whole = self.gathered(self.own_state())
        if whole is None:
            return None
        whole |= {name: one.cpu() for name, one in self._unused.items()}
        return {name: whole[name if name in whole else self._names[name]] for name in self._saved}

    def _is_saved(self, name: str) -> bool:
        """Return whether the model's `state_dict` has this parameter or buffer, under whatever name."""
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

    `number`: of a micro-batch among all of the training. `shown`: evaluates, and is given what the model returns.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline,
        inputs_of: Callable[[int], Mapping[str, Tensor]],
        number: Callable[[int], int],
        loss: Callable[[int, Any], Tensor],
        shown: Shown | None = None,
    ) -> None:
        recording = pipeline.executor.recording(pipeline.program) if shown is None else None
        super().__init__(pipeline.chunks, pipeline.edges, _no_input, loss, pipeline.loss_chunk, recording)
        self._inputs_of = inputs_of
        self._parts = pipeline.parts
        self._shown = shown
        self._keeper = pipeline.executor.keeper
        self._seed = pipeline.seed
        self._number = number
        self._autocast = pipeline.plan.origin.autocast
        self._device_type = pipeline.device.type

    def compute(self, unit: Unit, inputs: list[Tensor] | None) -> Any:
        draws = Draws(self._seed, self._number(unit.micro_batch))
        part, given = self._parts[unit.chunk], self._inputs_of(unit.micro_batch)
        with autocasting(self._device_type, self._checked_autocast()):
            if self._shown is not None:
                with WithoutDropout():
                    return part(given, draws, *(inputs or ()), keep=self._shown)
            if self._keeper is None:
                return part(given, draws, *(inputs or ()))
            with self._keeper.forward(unit, part.KEEPING, draws) as keep:
                return part(given, draws, *(inputs or ()), keep=keep)

    def _checked_autocast(self) -> torch.dtype | None:
        """Return the dtype of the torch.autocast that is on. Raise ValueError where it was another in the trace."""
        dtype = autocast_dtype(self._device_type)
        if (found := precision_name(dtype)) != self._autocast:
            now, was = (f"torch.autocast of {one}" if one else "no torch.autocast" for one in (found, self._autocast))
            raise ValueError(
                f"step is called under {now}, and the plan was made under {was}: trace the model and train it alike"
            )
        return dtype

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
