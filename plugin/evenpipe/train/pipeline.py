"""ModulePipeline: one stage of a pipeline of plain `nn.Module`s, trained under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.connections import connect
from evenpipe.runtime.device_queues import one_queue
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import Program, Spec, check_offers, needs_of, verify
from evenpipe.train.engines import ENGINES

__all__ = ["ModulePipeline", "Pipeline", "shares", "stage_in"]


def stage_in(program: Program, group: dist.ProcessGroup | None, engine: str, called: str) -> int:
    """Which stage of `program` this rank of `group` is.

    Raises ValueError where `program` is not for such a group, or needs what `engine`, to be called `called`, lacks.
    """
    schedule, ranks = program.schedule, dist.get_process_group_ranks(group)
    if len(ranks) != schedule.stages:
        raise ValueError(f"program: is for {schedule.stages} stages, but the group has {len(ranks)} ranks")
    check_offers(Spec.of(schedule, needs_of(schedule)), ENGINES[engine].offers, called)
    return ranks.index(dist.get_rank())


class Pipeline:
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
    ) -> None:
        schedule, ranks = program.schedule, dist.get_process_group_ranks(group)
        places = schedule.places
        self.stage = ranks.index(dist.get_rank())
        self.chunks = list(chunks)
        self.is_first, self.is_last = (self.stage == end.stage for end in (places.first, places.last))
        self.loss_chunk = places.last.chunk if self.is_last else None
        #: Of the micro-batches of the last batch, where the model ends.
        self.losses: list[Tensor] = []
        self.edges = edges
        held = (one for like in (*edges.taken, *edges.given) for one in like)
        self.device = device = next((one.device for one in (*self.parameters(), *held)), torch.device("cpu"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        queue = one_queue(group, device)
        self.program = program = verify(schedule, program.pairs, queue)
        connections = connect(ranks, program.links, backend, device, queue)
        self.executor = Executor(self.stage, connections, device, self.parameters(), observer, measure or program.pairs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this stage's parts, for an optimizer."""
        return nn.ModuleList(self.chunks).parameters()  # each once, however many chunks share it

    def close(self) -> None:
        """Destroy the links, once no batch is under way."""
        self.executor.connections.close()

    def carry_out(self, stage: ModuleStage, found: dict[int, Tensor]) -> Tensor | None:
        """A batch of the program; the mean of the losses that the stage has `found`, by micro-batch, if any."""
        self.executor.run(self.program, stage)
        self.losses = [loss for _, loss in sorted(found.items())]
        return torch.stack(self.losses).mean() if self.is_last else None


class ModulePipeline(Pipeline):
    """One stage of a pipeline, in a process of its own: forwards, backwards and messages of every batch.

    part: gives the part of the model at a position, counted from the model's start; called for those that `program`
    places on this stage, and no others. A part takes tensors, one by one, and returns one or a tuple of them, the last
    part what `loss` takes.
    program: what `evenpipe.schedule.build` returns, for as many stages as `group` has ranks.
    loss: `loss(output, target)` of a micro-batch, a scalar.
    boundary: a tensor like the one that passes from part to part for one micro-batch, or a function that gives those
    that leave the part at a position; their device is the parts'. Whole numbers travel without gradients.
    group: the ranks of the pipeline, stage by stage; all ranks, if left out.
    observer: is told of every action; with `measure`, `executor.counter` knows what this stage saves.

    Where backwards are split, weights get their gradients without autograd's accumulation: hooks on it, such as those
    of DistributedDataParallel, are not called.

    All ranks of the group make it alike. Raises ValueError where `program` is not for such a group, or needs what
    this engine does not offer.
    """

    def __init__(
        self,
        part: Callable[[int], nn.Module],
        program: Program,
        loss: Callable[[Any, Any], Tensor],
        boundary: Tensor | Callable[[int], Sequence[Tensor]],
        group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        measure: bool = False,
    ) -> None:
        stage, places = stage_in(program, group, "module", "ModulePipeline"), program.schedule.places
        positions = [places.position(stage, chunk) for chunk in range(places.chunks)]
        last = len(places.order) - 1

        def between(position: int) -> list[Tensor]:
            """What leaves the part at `position`."""
            if position == last:
                return [torch.empty((), requires_grad=True)]
            like = boundary(position) if callable(boundary) else [boundary]
            return [one.detach().requires_grad_(one.is_floating_point()) for one in like]

        edges = Edges(
            [between(position - 1) if position else [] for position in positions],
            [between(position) for position in positions],
        )
        super().__init__([part(position) for position in positions], edges, program, group, observer, measure)
        self._loss = loss

    def step(self, inputs: Tensor | Sequence[Tensor] = (), targets: Tensor | Sequence[Any] = ()) -> Tensor | None:
        """Forward and backward of a batch; gradients of its mean loss are added to `parameter.grad`.

        `inputs` are read where the model starts, `targets` where it ends: a tensor of whose first dimension every
        micro-batch has an equal share, or a sequence with an entry a micro-batch. Returns the mean loss where the model
        ends, None elsewhere. Raises ValueError where they cannot be shared out.
        """
        count, found = self.program.schedule.micro_batches, dict[int, Tensor]()
        first = shares("inputs", inputs, count) if self.is_first else ()
        last = shares("targets", targets, count) if self.is_last else ()

        def share_of_loss(micro_batch: int, output: Any) -> Tensor:
            loss = self._loss(output, last[micro_batch])
            found[micro_batch] = loss.detach()
            return loss / count

        stage = ModuleStage(self.chunks, self.edges, first.__getitem__, share_of_loss, self.loss_chunk)
        return self.carry_out(stage, found)


def shares(name: str, values: Tensor | Sequence[Any], count: int) -> Sequence[Any]:
    """What each of `count` micro-batches gets of `values`."""
    if not isinstance(values, Tensor):
        if len(values) != count:
            raise ValueError(f"{name}: {len(values)} entries for {count} micro-batches: give one for each")
        return values
    if len(values) % count:
        raise ValueError(f"{name}: {len(values)} samples cannot be shared out to {count} micro-batches")
    return values.chunk(count)
