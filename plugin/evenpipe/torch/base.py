"""The base of pipelines of plain torch: a stage's compute, messages, gradients and weights, batch after batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import (
    GAINING,
    DelayCorrection,
    Need,
    Program,
    Spec,
    check_offers,
    find,
    needs_of,
    verify,
    with_swaps,
)
from evenpipe.torch.batches import check_gradients, evaluating, mean_loss
from evenpipe.torch.ties import Ties
from evenpipe.torch.two_bw import PlainGradients, TwoBWTraining, scaled_to
from evenpipe.tuner.process_memory import KeptBytes, static_bytes
from evenpipe.two_bw.gradients import LossScale

__all__ = ["Pipeline", "shares", "stage_in"]


def stage_in(
    program: Program, group: dist.ProcessGroup | None, offers: frozenset[Need], called: str, swap: float | None = None
) -> int:
    """Return which stage of `program` this rank of `group` is.

    Raises ValueError where `program` is not for such a group, or needs more than `called` offers.
    """
    schedule, ranks = program.schedule, dist.get_process_group_ranks(group)
    if len(ranks) != schedule.stages:
        raise ValueError(f"program: is for {schedule.stages} stages, but the group has {len(ranks)} ranks")
    needs = needs_of(schedule)
    # A schedule without flushes goes on after its last batch; only its name says how.
    spec = find(schedule.name) if "stream" in needs else Spec.of(schedule, needs)
    check_offers(spec, offers, called, swap)
    return ranks.index(dist.get_rank())


class Pipeline(ABC):
    """One stage of a pipeline, in a process of its own: parts of a model, and what carries out a program with them.

    Takes what `ModulePipeline` does, with this stage's parts and what passes between them made.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        edges: Edges,
        program: Program,
        group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        measure: bool = False,
        swap: float | None = None,
    ) -> None:
        schedule, ranks = program.schedule, dist.get_process_group_ranks(group)
        places = schedule.places
        self.stage = ranks.index(dist.get_rank())
        self.chunks = list(chunks)
        #: The numbers of this stage's parts, counted from the model's start.
        self.positions = [places.position(self.stage, chunk) for chunk in range(places.chunks)]
        self.is_first, self.is_last = (self.stage == end.stage for end in (places.first, places.last))
        again = [self.chunks[chunk] for chunk in schedule.recomputed_chunks(self.stage)]
        if any(getattr(one, "track_running_stats", False) for chunk in again for one in chunk.modules()):
            raise ValueError(f"program: {schedule.name} computes a part with running statistics again: choose another")
        self.loss_chunk = places.last.chunk if self.is_last else None
        #: Scales losses before their backward: `evenpipe.torch.scaling.PipelineScaler` sets it.
        self.scaler: torch.amp.GradScaler | None = None
        #: Of that scaler, the scale of each batch under way, where batches are not flushed.
        self.loss_scale: LossScale | None = None
        #: Of the micro-batches of the last batch, where the model ends.
        self.losses: list[Tensor] = []
        self.edges = edges
        #: The number of the next batch, and how much larger that of the one after it is: replicas take turns.
        self.batches, self.stride = 0, 1
        self._group = group
        self._training: TwoBWTraining | None = None
        held = (one for like in (*edges.taken, *edges.given) for one in like)
        self.device = device = next((one.device for one in (*self.parameters(), *held)), torch.device("cpu"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        connections = connect(ranks, program.links, backend, device)
        streams = "stream" in needs_of(schedule)
        if swap is not None:
            if streams or not 0 < swap <= 1:
                raise ValueError(f"swap={swap:g}: give a share above 0 and up to 1, and a program that flushes")
            schedule = with_swaps(schedule, GAINING)
        self.program = program = verify(schedule, program.pairs, connections.queues)
        #: Both versions of the weights, where batches are not flushed.
        in_place = "in_place" in needs_of(schedule)
        self.versions = WeightVersions(self.parameters(), in_place=in_place) if streams else None
        weights = [*self.parameters(), *(self.versions.memory if self.versions is not None else ())]
        self.executor = Executor(self.stage, connections, device, weights, observer, measure or program.pairs)
        self.executor.swap(swap)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks of the pipeline; None: all."""
        return self._group

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this stage's parts, for an optimizer."""
        return nn.ModuleList(self.chunks).parameters()  # each once, however many chunks share it

    def close(self) -> None:
        """Destroy the links, once no batch is under way."""
        self.executor.connections.close()

    def two_bw(
        self,
        batches: Iterable[Any],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        clip_grad: float = 0.0,
        replicas: dist.ProcessGroup | None = None,
        delay_correction: DelayCorrection = "none",
    ) -> TwoBWTraining:
        """Train under a schedule without flushes, 2bw or paci: iterate over what is returned, a batch at a time.

        batches: each what `step` takes (of several arguments a tuple); read one ahead. optimizer: of this stage's
        parameters, or several (Muon for matrices and AdamW for the rest). The returned iterator steps them and lets go
        of the gradients: the loop must not. clip_grad: the largest norm of the gradients of all stages; 0: any.
        replicas: the processes with this stage in other pipelines, whose gradients' mean is taken. delay_correction:
        what is done about late gradients (docs/2bw.md), alike on all stages. With a `PipelineScaler`, losses are scaled
        and steps that overflow are skipped. Another call begins anew, with both versions the newest weights. Raises
        ValueError for a program that flushes, and under paci for what makes a step wait for other stages.
        """
        if self.versions is None:
            raise ValueError(f"program: {self.program.schedule.name} flushes after every batch: call step")
        group = self._group if self._group is not None else dist.group.WORLD
        assert group is not None, "torch.distributed has been started"
        if self._training is not None:
            self._training.drain()  # a loop may have left it before its batches ended
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        gradients = PlainGradients(
            self.versions, optimizers, self.squares, group, clip_grad, replicas, self.shared_gradients, self.loss_scale
        )
        self._training = TwoBWTraining(self, batches, gradients, delay_correction)
        return self._training

    @property
    def shared_gradients(self) -> Ties | None:
        """Return the gradient ties of parameters that other stages have a copy of; None where there are none."""
        return None

    @property
    def gradients(self) -> list[Tensor]:
        """Return the gradients that this stage's parameters have: without flushes, those for the step that is due."""
        if self._training is not None and self._training.gradients.kept:
            return self._training.gradients.kept
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def kept_bytes(self, optimizer: torch.optim.Optimizer) -> KeptBytes:
        """Return what this process keeps from batch to batch, `optimizer`'s state included."""
        parameters = list(self.parameters())
        # Counters of steps are numbers, in tensors of no dimension.
        state = [value for each in optimizer.state.values() for value in each.values()]
        kept = [value for value in state if torch.is_tensor(value) and value.dim()]
        static = static_bytes([*parameters, *self.gradients, *kept], [optimizer])
        messages = sum(like.nbytes for edge in (*self.edges.taken, *self.edges.given) for like in edge if like.dim())
        held = 0
        if self._training is not None and not self._training.gradients.update_early(self.stage):
            held = self._training.gradients.held_bytes
        versions = 0 if self.versions is None else self.versions.nbytes
        return KeptBytes(sum(one.nbytes for one in parameters), versions, held, static, messages)

    def squares(self) -> Tensor:
        """Return sums of squares of the gradients by part of the model, in fp64; zero for those of other stages."""
        places = self.program.schedule.places
        found = torch.zeros(len(places.order), dtype=torch.float64, device=self.device)
        for chunk, module in enumerate(self.chunks):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    found[places.position(self.stage, chunk)] += parameter.grad.double().square().sum()
        return found

    def clip_grad_norm(self, limit: float) -> float:
        """Scale all stages' gradients so that their norm is at most `limit`, 0 for any; return the norm before.

        One of several copies of a parameter counts. All ranks of the group call it, between `step` and the optimizer's.
        """
        squares = self.squares()
        # Each is of one stage: whatever order this sum is made in, it is exact.
        dist.all_reduce(squares, group=self._group)
        norm = math.sqrt(sum(squares.tolist()))
        scaled_to(limit, norm, [one.grad for one in self.parameters() if one.grad is not None])
        return norm

    def reduce_gradients(self, replicas: dist.ProcessGroup, *, mean: bool = True) -> None:
        """Give this stage's gradients the mean, or the sum, over the processes with the same stage, before clipping."""
        for gradient in self.gradients if replicas.size() > 1 else ():
            dist.all_reduce(gradient, group=replicas)
            if mean:
                gradient.div_(replicas.size())

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this stage's parameters and buffers, by their names in the uncut model."""

    def gathered(self, mine: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return all stages' `mine`, on the host of the first stage; None elsewhere. All ranks of the group call it.

        Steps that are due are made before.
        """
        if self._training is not None:
            self._training.drain()
        held = {name: one.cpu() if isinstance(one, Tensor) else one for name, one in mine.items()}
        ranks = dist.get_process_group_ranks(self._group)
        found: list[Any] | None = [None] * len(ranks) if self.stage == 0 else None
        dist.gather_object(held, found, dst=ranks[0], group=self._group)
        return None if found is None else {name: one for of_stage in found for name, one in of_stage.items()}

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's part of the loss as its backward takes it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @abstractmethod
    def shared(self, batch: Any) -> Sequence[tuple[Any, ...]]:
        """Return each micro-batch's share of a batch, its weight in the loss last: None where all count the same.

        Raises ValueError where it cannot be shared out.
        """

    @abstractmethod
    def stage_for(self, item: Callable[[int], Any], losses: dict[int, Tensor], first: int) -> ModuleStage:
        """Return a stage whose micro-batch i gets `item(i)`, and leaves its loss in `losses[i]`.

        first: the number, as `batches` counts, of the batch that begins with micro-batch 0.
        """

    def carry_out(self, batch: Any) -> Tensor | None:
        """Carry out a batch of the program; return its mean loss, where the model ends."""
        check_gradients()
        if self.versions is not None:
            raise ValueError(
                f"program: {self.program.schedule.name} does not flush between batches: iterate over "
                "two_bw(batches, optimizer) in place of step"
            )
        losses = dict[int, Tensor]()
        items = self.shared(batch)
        self.executor.run(self.program, self.stage_for(items.__getitem__, losses, self.batches))
        self.losses = [loss for _, loss in sorted(losses.items())]
        self.batches += self.stride
        return mean_loss(self.losses, items) if self.is_last else None

    def forward_only(self, stage: ModuleStage) -> None:
        """Forward a batch's micro-batches in evaluation mode, after all steps that are due."""
        if self._training is not None:
            self._training.drain()
        with evaluating(self.chunks):
            schedule = self.program.schedule
            self.executor.forward_only(schedule.places, schedule.micro_batches, stage)


def shares(name: str, values: Tensor | Sequence[Any], count: int) -> Sequence[Any]:
    """Return each of `count` micro-batches' share of `values`. Raises ValueError where they cannot be shared out."""
    if not isinstance(values, Tensor):
        if len(values) != count:
            raise ValueError(f"{name}: {len(values)} entries for {count} micro-batches: give one for each")
        return values
    if len(values) % count:
        raise ValueError(f"{name}: {len(values)} samples cannot be shared out to {count} micro-batches")
    return values.chunk(count)
