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

__all__ = ["ModulePipeline"]


class ModulePipeline:
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
        schedule, ranks = program.schedule, dist.get_process_group_ranks(group)
        if len(ranks) != schedule.stages:
            raise ValueError(f"program: is for {schedule.stages} stages, but the group has {len(ranks)} ranks")
        check_offers(Spec.of(schedule, needs_of(schedule)), ENGINES["module"].offers, "ModulePipeline")
        self.stage = ranks.index(dist.get_rank())
        places = schedule.places
        self.chunks = [part(places.position(self.stage, chunk)) for chunk in range(places.chunks)]
        self.is_first, self.is_last = (self.stage == end.stage for end in (places.first, places.last))
        self._loss_chunk = places.last.chunk if self.is_last else None
        #: Of the micro-batches of the last batch, where the model ends.
        self.losses: list[Tensor] = []
        self._loss = loss
        between = boundary if callable(boundary) else lambda position: [boundary]
        positions = [places.position(self.stage, chunk) for chunk in range(places.chunks)]
        self._edges = Edges(
            [between(position - 1) if position else [] for position in positions],
            [between(position) if position + 1 < len(places.order) else [] for position in positions],
        )
        held = (one for like in (*self._edges.taken, *self._edges.given) for one in like)
        device = next((one.device for one in (*held, *self.parameters())), torch.device("cpu"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        queue = one_queue(group, device)
        self._program = program = verify(schedule, program.pairs, queue)
        connections = connect(ranks, program.links, backend, device, queue)
        self.executor = Executor(self.stage, connections, device, self.parameters(), observer, measure or program.pairs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this stage's parts, for an optimizer."""
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def step(self, inputs: Tensor | Sequence[Tensor] = (), targets: Tensor | Sequence[Any] = ()) -> Tensor | None:
        """Forward and backward of a batch; gradients of its mean loss are added to `parameter.grad`.

        `inputs` are read where the model starts, `targets` where it ends: a tensor of whose first dimension every
        micro-batch has an equal share, or a sequence with an entry a micro-batch. Returns the mean loss where the model
        ends, None elsewhere. Raises ValueError where they cannot be shared out.
        """
        count, found = self._program.schedule.micro_batches, dict[int, Tensor]()
        first = _shares("inputs", inputs, count) if self.is_first else ()
        last = _shares("targets", targets, count) if self.is_last else ()

        def share_of_loss(micro_batch: int, output: Any) -> Tensor:
            loss = self._loss(output, last[micro_batch])
            found[micro_batch] = loss.detach()
            return loss / count

        stage = ModuleStage(self.chunks, self._edges, first.__getitem__, share_of_loss, self._loss_chunk)
        self.executor.run(self._program, stage)
        self.losses = [loss for _, loss in sorted(found.items())]
        return torch.stack(self.losses).mean() if self.is_last else None

    def close(self) -> None:
        """Destroy the links, once no batch is under way."""
        self.executor.connections.close()


def _shares(name: str, values: Tensor | Sequence[Any], count: int) -> Sequence[Any]:
    """What each of `count` micro-batches gets of `values`."""
    if not isinstance(values, Tensor):
        if len(values) != count:
            raise ValueError(f"{name}: {len(values)} entries for {count} micro-batches: give one for each")
        return values
    if len(values) % count:
        raise ValueError(f"{name}: {len(values)} samples cannot be shared out to {count} micro-batches")
    return values.chunk(count)
