"""Megatron's optimizer under 2BW: steps that are submitted in one iteration and finished in the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from evenpipe.megatron.two_bw.gradients import (
    OwnGradients,
    Reduction,
    bucket_groups,
    buffers,
    local_figures,
    stepping_with_own,
    tied_embedding,
)
from evenpipe.megatron.unsupported import refused_with_two_versions
from evenpipe.runtime.exchange import JointExchange
from evenpipe.runtime.weight_versions import Alias, WeightVersions
from evenpipe.two_bw.steps import LossScale, Outcome, TwoBWSteps

__all__ = ["TwoBWOptimizer"]


class TwoBWOptimizer(TwoBWSteps):
    """Takes over the optimizer of one stage: W(t+1) = W(t) − ν·∇f(W(t−1)) (PipeDream-2BW §3.1).

    `optimizer.step()` submits the step of the batch that has just been backwarded, and returns Megatron's triple for
    the step of the batch before: (updated, gradient norm, number of zeros). Gradients are reduced between replicas from
    then on, beside the next forward.

    ::

        schedule = StreamSchedule()
        schedule.attach(TwoBWOptimizer(model, optimizer))      # model, optimizer: Megatron's, their weights loaded

    `model` is a list of one `DistributedDataParallel` chunk, `optimizer` what `get_megatron_optimizer` returned. Raises
    ValueError for a setting that does not go together with 2BW, in one line that names it.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        model_config = get_model_config(model[0])
        for settings in (model_config, model[0].ddp_config, optimizer.config):
            for refusal in refused_with_two_versions(settings):
                raise ValueError(f"2bw: {refusal}")
        self.model = list(model)
        # Experts that are shared out have an optimizer of their own, which may count in a group of its own. A stage
        # that has none of something takes part with a stub.
        self._counted_in: dict[Any, list[Any]] = {}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            counted = self._counted_in.setdefault(part.get_grad_stats_parallel_group(), [])
            if not getattr(part, "is_stub_optimizer", False):
                counted.append(part)
        self._optimizers = [part for counted in self._counted_in.values() for part in counted]
        self._count_zeros = bool(optimizer.config.log_num_zeros_in_grad)
        self._tied = tied_embedding(self.model)
        scalers = [scaler for one in self._optimizers if (scaler := getattr(one, "grad_scaler", None)) is not None]
        decides = optimizer.config.clip_grad > 0 or bool(scalers)
        super().__init__(
            _weight_versions(self.model, self._optimizers),
            JointExchange(list(self._counted_in), 3, torch.device(torch.cuda.current_device())),
            _loss_scale(scalers) if scalers else None,
            decides=decides,
            waits=decides or self._tied is not None,
        )
        self._reduction = Reduction(self.model)
        self._own: OwnGradients | None = None
        self._reduced = True  # within the stage
        self._stage = 0
        self._finalize: Callable[[Any], object] = lambda groups: None
        self._process_groups: Any = None
        # A training loop zeroes gradients when those of the batch before are still needed.
        self._zero: list[Callable[[], None]] = [chunk.zero_grad_buffer for chunk in self.model]
        self._forget: Callable[[], None] = optimizer.zero_grad
        for chunk in self.model:
            chunk.zero_grad_buffer = _done_by_two_bw
        optimizer.zero_grad = _done_by_two_bw
        optimizer.step = self.submit
        optimizer.scale_loss = self._scaled
        if model_config.grad_scale_func is not None:
            model_config.grad_scale_func = self._scaled

    @property
    def held_gradient_bytes(self) -> int:
        """As `two_bw.held` says, where steps wait."""
        return 0 if self._own is None else self._own.nbytes

    def start_stream(self, stage: int, finalize: Callable[[Any], object], process_groups: Any) -> None:
        """The schedule begins a stream: `finalize` is Megatron's `finalize_model_grads` for any process groups."""
        self._stage, self._finalize, self._process_groups = stage, finalize, process_groups
        if self._own is None:
            self._own = OwnGradients(self.model, waits=not self.update_early(stage))

    def before_first_backward(self) -> None:
        """Of a batch: the gradients of the one before make way."""
        self._finish_within_stage()
        assert self._settings is None or self._gradients.waits, "a step that does not wait is finished by now"
        for zero in self._zero:
            zero()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def _start_reducing(self) -> None:
        self._reduction.start()
        self._reduced = False

    def _finish_within_stage(self) -> None:
        if self._reduced:
            return
        self._reduced = True
        self._reduction.finish_within_stage(self._finalize, self._process_groups)
        self._gradients.keep()

    def _figures(self) -> Tensor:
        self._finish_within_stage()
        embedding = self._process_groups.embd
        with self._gradients.in_place():
            if self._tied is not None and embedding is not None and embedding.size() > 1:
                self._reduction.start_embedding(self._tied.main_grad, embedding)  # type: ignore[attr-defined]
                if self._stage == 0:
                    # It counts the sum; the other ends have given their parts by now.
                    self._reduction.finish_embedding()
            scale = None if self._loss_scale is None else self._loss_scale.submitted
            return torch.cat([local_figures(some, scale, self._count_zeros) for some in self._counted_in.values()])

    def _finish_reducing(self) -> None:
        self._reduction.finish_embedding()

    def _outcome(self, rows: list[list[float]]) -> Outcome:
        squares, overflows, zeros = (sum(column) for column in zip(*rows, strict=True))
        skipped = self._loss_scale is not None and overflows > 0
        return Outcome(not skipped, None if skipped else math.sqrt(squares), zeros if self._count_zeros else None)

    def _step(self, update: bool) -> None:
        for group in bucket_groups(self.model):
            # Have Megatron look again where the parameters are of which each rank gathers the others' shards.
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
        if update:
            with self._gradients.in_place():
                for one in self._optimizers:
                    self._prepare(one)
                for one in self._optimizers:
                    one.step_with_ready_grads()
        self._forget()

    def _prepare(self, optimizer: Any) -> None:
        """What Megatron's optimizers do with gradients that are whole, and finite, before they step."""
        if getattr(optimizer, "grad_scaler", None) is None:
            with stepping_with_own(optimizer):
                optimizer.prepare_grads()
        else:
            assert self._loss_scale is not None, "there is a scaler"
            with stepping_with_own(optimizer):
                optimizer._copy_model_grads_to_main_grads()
            if gradients := optimizer._collect_main_grad_data_for_unscaling():
                torch._foreach_mul_(gradients, self._loss_scale.submitted.double().reciprocal().float().squeeze())
        parameters, most = optimizer.get_parameters(), optimizer.config.clip_grad
        if most > 0 and parameters:
            clip_grads.clip_grad_by_total_norm_fp32(parameters, most, self.outcome.grad_norm)

    @property
    def _gradients(self) -> OwnGradients:
        """The submitted batch's."""
        assert self._own is not None, "the stream has begun"
        return self._own

    def _scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the scale of the batch whose losses are being computed."""
        return loss if self._loss_scale is None else self._loss_scale.present * loss


def _loss_scale(scalers: Sequence[Any]) -> LossScale:
    def learn(overflow: bool) -> None:
        for scaler in scalers:
            scaler.update(overflow)

    return LossScale(lambda: scalers[0].scale.clone(), learn)


def _weight_versions(model: Sequence[Any], optimizers: Sequence[Any]) -> WeightVersions:
    """Two versions of trainable parameters, and of all that Megatron's buffers and optimizers see of their memory."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters() if parameter.requires_grad]
    shards = [
        tensor
        for one in optimizers
        for name in ("shard_float16_groups", "shard_fp32_groups")
        for group in getattr(one, name, None) or ()
        for tensor in group
    ]
    stepped = [tensor for one in optimizers for tensor in one.get_parameters()]
    aliases = [Alias(owner, "param_data") for buffer in buffers(model) for owner in (buffer, *buffer.buckets)]
    return WeightVersions(parameters, [*shards, *stepped], aliases)


def _done_by_two_bw(*_: Any, **__: Any) -> None:
    """TwoBWOptimizer zeroes gradients itself, when nothing needs them any more."""
