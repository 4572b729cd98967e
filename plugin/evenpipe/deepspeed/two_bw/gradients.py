"""The gradients and the optimizer of one stage of a DeepSpeed engine, as 2BW reduces, holds and steps with them."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import Tensor

from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.heartbeat import job_timeout
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.two_bw.gradients import Gradients, LossScale, Outcome, TiedSums

__all__ = ["EngineGradients", "experts_of"]


class EngineGradients(Gradients):
    """Those of `engine`, for one kind of optimizer; DeepSpeed has reduced them between replicas when they are taken.

    At the end of a batch, DeepSpeed's own code counts it, moves the learning rate on and calls `optimizer.step`, which
    submits the step: tied weights' gradients and the norm travel in the background.

    `decides`: the step needs the norm over all stages. `weights` are tensors beside the parameters that the optimizer
    reads or writes the weights through. All ranks make one alike.
    """

    #: Whether a step whose norm is no number is skipped.
    skips: ClassVar[bool] = True
    #: Whether each replica keeps a part of them.
    sharded: ClassVar[bool] = False

    def __init__(self, engine: Any, decides: bool, weights: Sequence[Tensor] = ()) -> None:
        self._optimizer = optimizer = engine.optimizer
        #: Which of the stage's model-parallel ranks this is.
        self.shard: int = engine.grid.get_slice_parallel_rank()
        names = {name for weight in engine.module.parameters() if (name := experts_of(weight)) is not None}
        #: By the name of a group of experts, the ranks among which they are dealt out: alike on all ranks of a stage.
        self.experts = {name: groups._get_expert_parallel_group(name) for name in sorted(names)}
        self._device = engine.device
        self._ties = _Ties(engine, self)
        self._sums = TiedSums()
        self._norm = 0.0  # of gradients that are multiplied by the loss scale
        self.versions = WeightVersions(list(engine.module.parameters()), weights)
        # Of one replica's ranks: all stages, and all shards of each.
        self.exchange = Exchange(engine.grid.get_model_parallel_group(), 1, engine.device) if decides else None
        if engine.fp16_enabled():
            self.loss_scale = LossScale(lambda: optimizer.loss_scale, optimizer._update_scale)
        self.decides = decides
        self.waits = decides or bool(self._ties)
        #: Whether the next batch's gradients are added up before the step of these.
        self.held = not self.update_early(engine.stage_id)

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        inner = self._optimizer
        while (within := getattr(inner, "optimizer", None)) is not None:
            inner = within
        return [inner]

    @property
    def held_bytes(self) -> int:
        """As `held_gradient_bytes` says, where steps wait, and what tied weights add."""
        return self._bytes() if self.held else 0

    @abstractmethod
    def reduce(self) -> None:
        """Take the batch's gradients, which have been reduced between replicas, out of the next one's way."""

    def hold(self) -> Tensor:
        """The figure is the sum of squares, of sums over the stages that share a weight."""
        self._ties.start(self._sums)
        self._sums.finish(counted=True)
        return self._squares().view(1)

    def outcome(self, rows: list[list[float]]) -> Outcome:
        self._norm = math.sqrt(sum(squares for (squares,) in rows))
        updated = math.isfinite(self._norm) or not self.skips
        scale = 1.0 if self.loss_scale is None else float(self.loss_scale.submitted)
        return Outcome(updated, self._norm / scale if updated else None, None)

    def step(self, outcome: Outcome) -> None:
        self._sums.finish()
        # The optimizer skips the step where the norm is no number.
        with self._at_its_scale():
            self._step(self._optimizer.step, self._norm)

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss whose backward pass makes these gradients; as it is where DeepSpeed scales it, or nothing has to."""
        return loss

    @contextmanager
    def submitting(self, submit: Callable[[], Outcome]) -> Iterator[None]:
        """Inside, `optimizer.step` calls `submit`."""
        # A learning-rate scheduler of torch's puts a step of its own there, and warns where it is gone or not called.
        own = vars(self._optimizer).get("step")
        self._optimizer.step = functools.wraps(self._optimizer.step)(lambda *_, **__: submit())
        self._optimizer._opt_called = True
        try:
            yield
        finally:
            del self._optimizer.step
            if own is not None:
                self._optimizer.step = own

    def resumed(self, outcome: Outcome) -> None:
        """Have DeepSpeed know of the last step before a resume."""
        if hasattr(self._optimizer, "overflow"):
            self._optimizer.overflow = not outcome.updated

    def close(self) -> None:
        """Let go of what was made for this among the ranks; nothing is under way."""
        self._ties.close()

    @abstractmethod
    def kept(self, weight: Tensor) -> Tensor | None:
        """Return the gradient that is kept for the tied `weight`; None where it has none.

        To be changed in place, for `put_back`; if sharded, with zeros for what other replicas keep.
        """

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        """Take back the `gradient` that `kept` gave for `weight`, which has been changed."""
        assert not self.sharded, "a copy has to be put back"

    @abstractmethod
    def _bytes(self) -> int:
        """Return the memory of gradients while they are held."""

    @abstractmethod
    def _squares(self) -> Tensor:
        """Return the sum of squares of the gradients that this rank counts; not a number if one is none.

        A double of no dimension on the device, so that the host need not wait for the batch's last backward.
        """

    @abstractmethod
    def _step(self, step: Callable[[], Any], norm: float) -> None:
        """Call `step` with the kept gradients in place, and with `norm` as that of the whole model; let go of them."""

    def _norm_of(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the `gradient` of a `weight` that no other stage counts, in fp32, on the device.

        A weight that is not cut among a stage's model-parallel ranks is counted by the first of them, as DeepSpeed does
        it. On the others the norm is 0, or not a number: an overflow that only they have is one too. Experts are dealt
        out among all of these ranks.
        """
        norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        own = self.shard == 0 or is_model_parallel_parameter(weight) or is_moe_param(weight)
        return norm if own else norm * 0

    def _sum_of_squares(self, norms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sum of squares of weights' `norms`, a double; of experts, over all ranks that have others.

        The first of a stage's model-parallel ranks counts that of experts, which all of them know.
        """
        total = self._squared([norm for weight, norm in norms if experts_of(weight) is None])
        for name, group in self.experts.items():
            of_experts = self._squared([norm for weight, norm in norms if experts_of(weight) == name])
            dist.all_reduce(of_experts, group=group)
            total = total + (of_experts if self.shard == 0 else of_experts * 0)
        return total

    def _squared(self, norms: list[Tensor]) -> Tensor:
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(norms).double().square().sum()

    @contextmanager
    def _at_its_scale(self) -> Iterator[None]:
        """Inside, the loss scale is that of the submitted batch, and stays it."""
        if self.loss_scale is None:
            yield
            return
        optimizer = self._optimizer
        present, optimizer.loss_scale = optimizer.loss_scale, self.loss_scale.submitted
        # Learnt later. And DeepSpeed would divide the gradients by the next scale in a step that makes it grow.
        optimizer._update_scale = lambda overflow: None
        try:
            yield
        finally:
            del optimizer._update_scale
            optimizer.loss_scale = present


def experts_of(weight: Any) -> str | None:
    """Return the name of the group of experts that `weight` is of; None for one that all replicas have."""
    return weight.group_name if is_moe_param(weight) else None


class _Tie(NamedTuple):
    """A tied weight, the ranks that its gradient is summed over, and whether this stage is the first that has it."""

    weight: Tensor
    group: dist.ProcessGroup
    is_first: bool


class _Ties:
    """The tied weights of one stage of `engine`; all ranks make one alike."""

    def __init__(self, engine: Any, gradients: EngineGradients) -> None:
        self._gradients = gradients
        comms: dict[str, Any] = engine.module.tied_comms
        # In the order of stages, which need not be that of ranks.
        is_first = {id(comm["group"]): comm["ranks"][0] == dist.get_rank() for comm in comms.values()}
        summed_over = {id(comm["group"]): comm["group"] for comm in comms.values()}
        if gradients.sharded:
            # A replica keeps other parts of a weight on each stage: so each gives what it has, and zeros for the rest.
            # Model-parallel ranks of a stage keep a tie each, of other parts of the weight.
            of_shard = {f"{key}/{gradients.shard}": comm for key, comm in comms.items()}
            wide = _across_replicas({key: comm["ranks"] for key, comm in of_shard.items()})
            summed_over = {id(comm["group"]): wide[key] for key, comm in of_shard.items()}
        self._ties = [
            _Tie(weight, summed_over[id(group)], is_first[id(group)])
            for weight, group in engine.module.get_tied_weights_and_groups()
        ]
        self._own_groups = list(summed_over.values()) if gradients.sharded else []

    def __bool__(self) -> bool:
        return bool(self._ties)

    def start(self, sums: TiedSums) -> None:
        """Give this stage's part of a batch's gradients, which are kept."""
        for tie in self._ties:
            gradient = self._gradients.kept(tie.weight)
            if gradient is not None:
                put_back = functools.partial(self._gradients.put_back, tie.weight)
                sums.start(gradient, tie.group, tie.is_first, put_back)

    def close(self) -> None:
        """Destroy the groups that were made for this, once nothing is under way; the end of all groups does it too."""
        groups, self._own_groups = self._own_groups, []
        for group in groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)


def _across_replicas(ranks: dict[str, list[int]]) -> dict[str, dist.ProcessGroup]:
    """For each key of this rank's, the group of all ranks, of all replicas, that have it too. All ranks call it."""
    of_ranks: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, ranks)
    groups = {}
    for key in sorted(set().union(*of_ranks)):
        members = sorted(set().union(*(keys.get(key, ()) for keys in of_ranks)))
        group = dist.new_group(members, timeout=job_timeout())
        if key in ranks:
            groups[key] = group
    return groups
