"""The gradients of tied weights, summed over the stages that share one, in the background."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients

__all__ = ["Ties"]


class Ties:
    """The tied weights of one stage of `engine`; all ranks make one alike."""

    def __init__(self, engine: Any, gradients: Gradients) -> None:
        self._gradients = gradients
        comms: dict[str, Any] = engine.module.tied_comms
        self._weights: list[tuple[Tensor, dist.ProcessGroup]] = engine.module.get_tied_weights_and_groups()
        if gradients.sharded:
            # A replica keeps other parts of a weight on each stage: so each gives what it has, and zeros for the rest.
            wide = _across_replicas({key: comm["ranks"] for key, comm in comms.items()})
            found = {id(comm["group"]): wide[key] for key, comm in comms.items()}
            self._weights = [(weight, found[id(group)]) for weight, group in self._weights]
        self.any = bool(self._weights)
        # A tied weight is counted by the first stage that has it.
        self.counted_here = any(min(comm["ranks"]) == dist.get_rank() for comm in comms.values())
        self._under_way: list[tuple[Tensor, Tensor, dist.Work]] = []

    def start(self) -> None:
        """Give this stage's part of a batch's gradients, which are kept."""
        for weight, group in self._weights:
            gradient = self._gradients.kept(weight)
            if gradient is not None:
                work = dist.all_reduce(gradient, group=group, async_op=True)
                assert work is not None
                self._under_way.append((weight, gradient, work))

    def finish(self) -> None:
        """Wait for the others': what is kept are the sums. Nothing to do twice."""
        for weight, gradient, work in self._under_way:
            work.wait()
            self._gradients.put_back(weight, gradient)
        self._under_way = []


def _across_replicas(ranks: dict[str, list[int]]) -> dict[str, dist.ProcessGroup]:
    """For each key of this rank's, the group of all ranks, of all replicas, that have it too. All ranks call it."""
    everybody: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, ranks)
    groups = {}
    for key in sorted({key for one in everybody for key in one}):
        members = sorted({rank for one in everybody for rank in one.get(key, ())})
        group = dist.new_group(members)
        if key in ranks:
            groups[key] = group
    return groups
