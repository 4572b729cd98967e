"""Megatron's optimizer under 2BW: steps that are submitted in one iteration and finished in the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from evenpipe.megatron.refusals import refused_with_two_versions
from evenpipe.megatron.two_buffered.gradients import HeldGradients, Reduction, local_figures, tied_embedding
from evenpipe.megatron.two_buffered.loss_scales import LossScales
from evenpipe.megatron.two_buffered.memory import forget_shards, weight_versions
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.step_settings import as_submitted, settings_of

__all__ = ["Settled", "StepResult", "TwoBuffered"]


class StepResult(NamedTuple):
    """What came of the step of `batch`, counted from 0 since the weights were made or loaded.

    `grad_norm` is None where the step was skipped.
    """

    batch: int
    updated: bool
    grad_norm: float | None
    num_zeros: float | None


#: (updated, gradient norm, number of zeros), as Megatron's optimizers return it.
_Triple = tuple[bool, float | None, float | None]


class Settled(NamedTuple):
    """What a stage learns from a stream's first call. `groups` are the process groups, under the name of `argument`."""

    stage: int
    finalize: Callable[..., Any]
    argument: str
    groups: Any


class _Submitted(NamedTuple):
    """A step that is not finished, with the learning rate and weight decay of its own iteration, a parameter group."""

    batch: int
    settings: list[dict[str, Any]]


class TwoBuffered:
    """Takes over the optimizer of one stage: W(t+1) = W(t) − ν·∇f(W(t−1)) (PipeDream-2BW §3.1).

    `optimizer.step()` *submits* the step of the batch that has just been backwarded, and returns Megatron's triple for
    the step of the batch before: (updated, gradient norm, number of zeros). Gradients are reduced between replicas from
    then on, beside the next forward. Before the next batch's first backward this process *tells* the others its part
    of the norm; and the step is *finished* where the schedule has its update. What a stage then needs of others has
    been under way for long: nothing waits for another stage's compute.

    ::

        schedule = StreamSchedule()
        schedule.attach(TwoBuffered(model, optimizer))      # model, optimizer: Megatron's, their weights loaded

    `model` is a list of one `DistributedDataParallel` chunk, `optimizer` what `get_megatron_optimizer` returned.
    `finished` is the last step of which everything is known. Raises ValueError for a setting that does not go together
    with 2BW, in one line that names it.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        self.model = list(model)
        for settings in (get_model_config(self.model[0]), self.model[0].ddp_config, optimizer.config):
            for setting, value, reason, remedy in refused_with_two_versions(settings):
                raise ValueError(f"2bw: {setting}{value} {reason}: {remedy}")
        # The one that is forwarded and backwarded, or will be next; the first that runs on two equal versions is 0.
        self.batch = 0
        self.finished: StepResult | None = None
        self._loaded_at = 0
        # Nothing is to be told before the first step is finished; schedules of the learning rate count it as made.
        self._told_last: _Triple = (True, None, None)
        self._optimizers = [
            one
            for one in getattr(optimizer, "chained_optimizers", [optimizer])
            if not getattr(one, "is_stub_optimizer", False)
        ]
        self._config = optimizer.config
        self.loss_scales = LossScales(self._optimizers)
        self._parameters = [p for chunk in self.model for p in chunk.parameters() if p.requires_grad]
        self.versions = weight_versions(self.model, self._optimizers, self._parameters)
        self._reduction = Reduction(self.model)
        self._tied = tied_embedding(self.model)
        group = (self._optimizers[0] if self._optimizers else optimizer).get_grad_stats_parallel_group()
        self._exchange = Exchange(group, 3, torch.device(torch.cuda.current_device()))
        self._settled: Settled | None = None
        self._held: HeldGradients | None = None
        self._submitted: _Submitted | None = None
        self._told = False
        self._unknown: int | None = None  # a batch whose step is finished, but not what all processes told of it
        self._break_off: Callable[[], None] = lambda: None
        # A training loop zeroes gradients when those of the batch before are still needed.
        self._zero: list[Callable[[], None]] = [chunk.zero_grad_buffer for chunk in self.model]
        self._forget: Callable[[], None] = optimizer.zero_grad
        for chunk in self.model:
            chunk.zero_grad_buffer = _done_by_us
        optimizer.zero_grad = _done_by_us
        optimizer.step = self.submit
        optimizer.scale_loss = self.loss_scales.scale_loss
        config = get_model_config(self.model[0])
        if config.grad_scale_func is not None:
            config.grad_scale_func = self.loss_scales.scale_loss

    @property
    def submitted(self) -> int:
        """Steps that have been submitted since the weights were made or loaded."""
        return self.batch - self._loaded_at

    @property
    def parameter_bytes(self) -> int:
        """This process' trainable parameters, in their own dtype."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)

    @property
    def versions_peak(self) -> int:
        """The most weight versions that there have been at once."""
        return self.versions.peak

    @property
    def weight_version_bytes(self) -> int:
        """The memory of the second version: the parameters, or the flat buffers that they lie in."""
        return self.versions.nbytes

    @property
    def held_gradient_bytes(self) -> int:
        """The second gradient buffer, where there is one."""
        return self._held.nbytes if self._held is not None else 0

    @property
    def update_early(self) -> bool:
        """Whether the step can be finished before the next batch's first backward, and needs no second gradient buffer.

        Stage 0 is the last to end a batch: it never waits for another stage's compute. The others do not have to if
        neither a norm, nor an overflow, nor a tied embedding's other end decides what the step is.
        """
        assert self._settled is not None, "the schedule settles it"
        return self._settled.stage == 0 or not (self._answers_decide or self._tied is not None)

    def settle(self, settled: Settled, break_off: Callable[[], None]) -> None:
        """Called by the schedule before each of its streams; `break_off` ends it."""
        self._settled = settled
        self._break_off = break_off
        if self._held is None and not self.update_early:
            self._held = HeldGradients(self.model)

    def start_call(self) -> None:
        """The call of `batch` begins."""
        self.loss_scales.start_batch(self.batch)

    def before_first_backward(self) -> None:
        """Of a batch: the gradients of the one before make way."""
        self._tell()
        assert self._submitted is None or self._held is not None, "a step that does not wait is finished by now"
        for zero in self._zero:
            zero()

    def submit(self) -> _Triple:
        """In place of `optimizer.step()`, after all backwards of a batch."""
        self._learn()
        assert self._submitted is None, "the schedule finishes one step before the next is submitted"
        self._submitted = _Submitted(self.batch, [settings_of(group) for group in self._groups()])
        self.batch += 1
        self._told = False
        self._reduction.start()
        return self._told_last

    @torch.no_grad()
    def finish(self) -> None:
        """Write the weights of the submitted step over the older version; nothing to do without one."""
        if self._submitted is None:
            return
        self._tell()
        (batch, settings), self._submitted = self._submitted, None
        self._reduction.finish_embedding()
        self._unknown = batch
        skipped = False
        if self._answers_decide:
            self._learn()
            assert self.finished is not None
            skipped = not self.finished.updated
        with self.versions.writing(), as_submitted(self._groups(), settings):
            forget_shards(self.model)
            if not skipped:
                self._step(batch)
        self.loss_scales.step_ended(batch, skipped)
        self._forget()

    def drain(self) -> None:
        """Finish the submitted step, drop what has been forwarded of the next batch, and leave the newest weights.

        All ranks call it, between two batches. What had been read for the dropped forwards will be read again.
        """
        self._break_off()
        self.finish()
        self._learn()
        self.versions.use(self.versions.latest)

    def state_dict(self) -> dict[str, Any]:
        """After `drain`: what a checkpoint needs beside Megatron's own, which has the newest weights."""
        before = self.versions.tensors(self.batch - 1) if self.batch > 0 else self._parameters
        return {"told_last": list(self._told_last), "before": [_on_host(tensor) for tensor in before]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint whose newest weights have been loaded; None: both versions are these.

        Raises ValueError for weights of other shapes.
        """
        before = None if state is None else state["before"]
        if before is not None and [tensor.shape for tensor in before] != [one.shape for one in self._parameters]:
            raise ValueError("the older weight version in the checkpoint has other shapes than this stage's parameters")
        self._told_last = (True, None, None) if state is None else tuple(state["told_last"])
        # Version 0 is the older one: batch 1 runs on it.
        self.batch = self._loaded_at = 0 if before is None else 1
        self.finished = None
        self.versions.restart(self.batch, before)

    @property
    def _answers_decide(self) -> bool:
        """Whether a step depends on what other processes tell."""
        return self._config.clip_grad > 0 or self.loss_scales.any

    def _tell(self) -> None:
        """End the stage's own reductions of the submitted batch, and start what joins it with other stages."""
        if self._submitted is None or self._told:
            return
        self._told = True
        assert self._settled is not None
        stage, finalize, argument, groups = self._settled
        self._reduction.finish_within_stage(finalize, argument, groups)
        if self._held is not None:
            self._held.keep()
        if self._tied is not None and groups.embd is not None and groups.embd.size() > 1:
            with self._where_gradients_are():
                self._reduction.start_embedding(self._tied.main_grad, groups.embd)  # type: ignore[attr-defined]
            if stage == 0:
                # It counts the sum; the other end has given its part by now.
                self._reduction.finish_embedding()
        scale = self.loss_scales.of(self._submitted.batch)
        self._exchange.start(local_figures(self._optimizers, scale, self._config.log_num_zeros_in_grad))

    def _learn(self) -> None:
        """What all processes have told of the step that is finished, or about to be."""
        if self._unknown is None:
            return
        batch, self._unknown = self._unknown, None
        rows = self._exchange.finish()
        skipped = self.loss_scales.any and any(overflow for _, overflow, _ in rows)
        norm = math.sqrt(sum(squares for squares, _, _ in rows))
        zeros = sum(zeros for _, _, zeros in rows) if self._config.log_num_zeros_in_grad else None
        self._told_last = (not skipped, None if skipped else norm, zeros)
        self.finished = StepResult(batch - self._loaded_at, *self._told_last)

    def _step(self, batch: int) -> None:
        """What Megatron's optimizers do with gradients that are whole."""
        with self._where_gradients_are():
            for one in self._optimizers:
                self.loss_scales.prepare(one, batch)
                parameters = one.get_parameters()
                if one.config.clip_grad > 0 and parameters:
                    assert self.finished is not None
                    assert self.finished.grad_norm is not None
                    clip_grads.clip_grad_by_total_norm_fp32(parameters, one.config.clip_grad, self.finished.grad_norm)
            for one in self._optimizers:
                one.step_with_ready_grads()

    def _where_gradients_are(self) -> AbstractContextManager[None]:
        """Inside, parameters' `main_grad` is the submitted batch's."""
        return self._held.in_place() if self._held is not None else nullcontext()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that takes no memory of a device."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())


def _done_by_us(*_: Any, **__: Any) -> None:
    """TwoBuffered zeroes gradients itself, when nothing needs them any more."""
