"""The gradients of tied weights, summed over the stages that share one, in the background."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from evenpipe.deepspeed.two_bw.gradients import Gradients
from evenpipe.runtime.heartbeat import job_timeout, wait_for

__all__ = ["Ties"]


class _Tie(NamedTuple):
    """A tied weight, the ranks that its gradient is summed over, and whether this stage is the first that has it."""

    weight: Tensor
    group: dist.ProcessGroup
    is_first: bool


class Ties:
    """The tied weights of one stage of `engine`; all ranks make one alike.

    A weight is counted in the norm by the first stage that has it, which is the last to end a batch.
    """

    def __init__(self, engine: Any, gradients: Gradients) -> None:
        self._gradients = gradients
        comms: dict[str, Any] = engine.module.tied_comms
        # In the order of stages, which need not be that of ranks.
        is_first = {id(comm["group"]): comm["ranks"][0] == dist.get_rank() for comm in comms.values()}
        summed_over = {id(comm["group"]): comm["group"] for comm in comms.values()}
        if gradients.sharded:
            # A replica keeps other parts of a weight on each stage: so each gives what it has, and zeros for the rest.
            wide = _across_replicas({key: comm["ranks"] for key, comm in comms.items()})
            summed_over = {id(comm["group"]): wide[key] for key, comm in comms.items()}
        self._ties = [
            _Tie(weight, summed_over[id(group)], is_first[id(group)])
            for weight, group in engine.module.get_tied_weights_and_groups()
        ]
        self._own_groups = list(summed_over.values()) if gradients.sharded else []
        self._under_way: list[tuple[_Tie, Tensor, dist.Work]] = []

    def __bool__(self) -> bool:
        return bool(self._ties)

    def start(self) -> None:
        """Give this stage's part of a batch's gradients, which are kept."""
        for tie in self._ties:
            gradient = self._gradients.kept(tie.weight)
            if gradient is not None:
                work = dist.all_reduce(gradient, group=tie.group, async_op=True)
                assert work is not None
                self._under_way.append((tie, gradient, work))

    def finish(self, counted: bool = False) -> None:
        """Wait for all: what is kept are the sums. Nothing to do twice.

        `counted`: of what is counted here only. Other stages have given their part of that, they end a batch earlier.
        """
        under_way, self._under_way = self._under_way, []
        for tie, gradient, work in under_way:
            if tie.is_first or not counted:
                wait_for([work], tie.group, "gradients of tied weights", gradient.device)
                self._gradients.put_back(tie.weight, gradient)
            else:
                self._under_way.append((tie, gradient, work))

    def close(self) -> None:
        """Destroy the groups that were made for this, once nothing is under way; the end of all groups does it too."""
        groups, self._own_groups = self._own_groups, []
        for group in groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)


def _across_replicas(ranks: dict[str, list[int]]) -> dict[str, dist.ProcessGroup]:
    """For each key of this rank's, the group of all ranks, of all replicas, that have it too. All ranks call it."""
    everybody: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, ranks)
    groups = {}
    for key in sorted({key for one in everybody for key in one}):
        members = sorted({rank for one in everybody for rank in one.get(key, ())})
        group = dist.new_group(members, timeout=job_timeout())
        if key in ranks:
            groups[key] = group
    return groups
