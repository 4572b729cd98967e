"""Megatron's optimizer under 2BW: gradients reduced beside the next forward, held, and stepped with a batch later."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from evenpipe.megatron.two_bw.buckets import say_what_is_under_way
from evenpipe.megatron.two_bw.figures import local_figures
from evenpipe.megatron.two_bw.quantised import Quantised
from evenpipe.megatron.two_bw.routers import Routers
from evenpipe.megatron.without_flushes import refused_without_flushes
from evenpipe.runtime.exchange import JointExchange
from evenpipe.runtime.heartbeat import hearing
from evenpipe.runtime.weight_versions import Alias, WeightVersions
from evenpipe.two_bw.gradients import Gradients, LossScale, Outcome, TiedSums, held_gradient_bytes

__all__ = ["TwoBWOptimizer"]


class TwoBWOptimizer(Gradients):
    """Takes over the optimizer of one stage: W(t+1) = W(t) − ν·∇f(W(t−1)) (PipeDream-2BW §3.1).

    `optimizer.step()` then submits the step of the batch that has just been backwarded, and returns Megatron's triple
    for the step of the batch before: (updated, gradient norm, number of zeros). Gradients are reduced between replicas
    from then on, beside the next forward.

    ::

        schedule = StreamSchedule()
        two_bw = schedule.attach(TwoBWOptimizer(model, optimizer))  # Megatron's, their weights loaded
        ...
        two_bw.drain()  # before anything reads the weights

    `model` is a list of one `DistributedDataParallel` chunk, `optimizer` what `get_megatron_optimizer` returned. Raises
    ValueError for a setting that does not go together with 2BW, in one line that names it.

    in_place: for a schedule that keeps one version (paci); `optimizer.step()` then has nothing left to do.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, in_place: bool = False) -> None:
        self._config = get_model_config(model[0])
        for settings in (self._config, model[0].ddp_config, optimizer.config):
            for refusal in refused_without_flushes(settings, in_place):
                raise ValueError(f"{'paci' if in_place else '2bw'}: {refusal}")
        _check_steps(optimizer)
        self._model = list(model)
        self._optimizer = optimizer
        # Experts that are shared out have an optimizer of their own, which may count in a group of its own. A stage
        # that has none of something takes part with a stub.
        self._counted_in: dict[Any, list[Any]] = {}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            # Replicas that share whole parameters out have parts of the figures.
            group = dist.group.WORLD if _is_layer_wise(optimizer) else part.get_grad_stats_parallel_group()
            counted = self._counted_in.setdefault(group, [])
            if not getattr(part, "is_stub_optimizer", False):
                counted.append(part)
        self._parts = [part for counted in self._counted_in.values() for part in counted]
        self._count_zeros = bool(optimizer.config.log_num_zeros_in_grad)
        scalers = [scaler for part in self._parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
        self._tied = _tied_embedding(self._model)
        self._per_token = bool(self._config.calculate_per_token_loss)
        self._largest_norm: float = getattr(optimizer.config, "grad_norm_skip_threshold", math.inf)  # since 0.19
        self.decides = (
            optimizer.config.clip_grad > 0 or bool(scalers) or self._per_token or math.isfinite(self._largest_norm)
        )
        self.waits = self.decides or self._tied is not None
        if in_place and self.waits:
            raise ValueError("paci: a tied embedding's step waits for another stage's gradient: untie it, or use 2bw")
        self.loss_scale = _loss_scale(scalers) if scalers else None
        self.exchange = JointExchange(list(self._counted_in), 4, torch.device(torch.cuda.current_device()))
        self.routers = Routers(self._model)
        self.quantised = Quantised(self._model)
        self.versions = _weight_versions(self._model, self._parts, self.routers.biases, in_place)
        self._buckets = [
            group for chunk in model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]
        for bucket in self._buckets:
            # Asynchronous whether or not Megatron was told to overlap it with the last backward.
            bucket.ddp_config = dataclasses.replace(bucket.ddp_config, overlap_grad_reduce=True)
            if bucket.ddp_config.num_distributed_optimizer_instances > 1:
                say_what_is_under_way(bucket)
        self._gathers = bool(model[0].ddp_config.overlap_param_gather)
        if self._gathers:
            # Forwards wait for versions, not for what each layer finds under way.
            model[0].disable_forward_pre_hook()
            model[0].start_param_sync = _done_by_two_bw
            model[0].enable_forward_pre_hook = model[0].disable_forward_pre_hook = _done_by_two_bw
        self._tokens: Tensor | None = None  # of the submitted batch, on the last stage
        self._divisor = 1.0  # its gradients', by all stages' figures
        self._own: OwnGradients | None = None
        self._reduced = True  # within the stage
        self._pending = False  # whether a step is still to be made
        self._sums = TiedSums()
        self._stage = 0
        self._finalize: Callable[[Any], object] = lambda groups: None
        self._process_groups: Any = None
        # A training loop zeroes gradients when those of the batch before are still needed.
        self._zero: list[Callable[[], None]] = [chunk.zero_grad_buffer for chunk in self._model]
        self._forget: Callable[[], None] = optimizer.zero_grad

    def take_over(self, submit: Callable[[], Outcome]) -> None:
        """Have Megatron's training loop submit steps, scale each loss for its own batch, and zero nothing by itself."""
        optimizer = self._optimizer
        for chunk in self._model:
            chunk.zero_grad_buffer = _done_by_two_bw
        optimizer.zero_grad = _done_by_two_bw
        optimizer.step = submit
        optimizer.scale_loss = self._scaled
        if self._config.grad_scale_func is not None:
            self._config.grad_scale_func = self._scaled

    def start_stream(self, stage: int, finalize: Callable[[Any], object], process_groups: Any) -> None:
        """The schedule begins a stream: `finalize` is Megatron's `finalize_model_grads` for any process groups."""
        self._stage, self._finalize, self._process_groups = stage, finalize, process_groups
        if self._own is None:
            self._own = OwnGradients(self._model, waits=not self.update_early(stage))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self._parts if part.optimizer is not None]

    @property
    def held_bytes(self) -> int:
        return 0 if self._own is None else self._own.nbytes

    def reduce(self) -> None:
        """Between replicas, unless Megatron has started it during the last backward."""
        for bucket in self._buckets:
            # Since 0.19, one that the next bucket has waited for is finished by now.
            if bucket.grad_reduce_handle is None and not getattr(bucket, "grad_reduce_finished", False):
                bucket.start_grad_sync()
        self._reduced, self._pending = False, True

    def before_first_backward(self) -> None:
        """Make room for a batch's gradients: those of the batch before are held by now."""
        self._end_within_stage()
        assert not self._pending or self._gradients.waits, "a step that does not wait is finished by now"
        for zero in self._zero:
            zero()

    def count(self, tokens: Tensor) -> None:
        """The batch that has been backwarded has so many `tokens` in the loss, none but on the last stage."""
        self._tokens = tokens

    def hold(self) -> Tensor:
        """The figures are those of `local_figures` and the tokens, in each group that counts some."""
        self._end_within_stage()
        embedding = self._process_groups.embd
        with self._gradients.in_place():
            if self._tied is not None and embedding is not None and embedding.size() > 1:
                # It has a bucket of its own at all ends, whose shards are alike: a shard of padding alone has nothing.
                gradient: Tensor = self._tied.main_grad  # type: ignore[attr-defined]
                if gradient.numel() > 0:
                    self._sums.start(gradient, embedding, self._stage == 0)
                self._sums.finish(counted=True)
            scale = None if self.loss_scale is None else self.loss_scale.submitted
            each = [local_figures(parts, scale, self._count_zeros) for parts in self._counted_in.values()]
        for figures in each:
            if self._tokens is not None:
                figures[3] = self._tokens
        return torch.cat(each)

    def outcome(self, rows: list[list[float]]) -> Outcome:
        columns = [*zip(*rows, strict=True)]
        squares, overflows, zeros = map(sum, columns[:3])
        if self._per_token:
            self._divisor = max(columns[3]) or 1.0  # as Megatron, which leaves the gradients of no tokens as they are
        overflow = self.loss_scale is not None and overflows > 0
        norm = None if overflow else math.sqrt(squares) / self._divisor
        skipped = norm is None or norm > self._largest_norm
        return Outcome(not skipped, norm, zeros if self._count_zeros else None)

    def step(self, outcome: Outcome) -> None:
        self._sums.finish()
        for bucket in self._buckets:
            # Have Megatron look again where parameters lie whose shards the ranks gather.
            bucket.cached_param_buffer_shard_list = [None] * len(bucket.buckets)
        if outcome.updated:
            if self._per_token:
                self._gradients.divide(self._divisor)
            with self._gradients.in_place():
                for part in self._parts:
                    with _stepping_with_own(part):
                        self._prepare(part, outcome.grad_norm)
                for part in self._parts:
                    part.step_with_ready_grads()
            if _is_layer_wise(self._optimizer):
                self._optimizer.allgather_params()
            if self._gathers:
                for bucket in self._buckets:
                    bucket.start_param_sync()
        self.routers.step()
        self._forget()
        self._pending = False

    def settle(self) -> None:
        """With `overlap_param_gather`, the replicas' shards of the newest version are gathered until it is used."""
        for bucket in self._buckets if self._gathers else ():
            if bucket.param_gather_handle is not None:
                bucket.param_gather_handle.wait()
                bucket.param_gather_handle = None

    def _prepare(self, optimizer: Any, norm: float | None) -> None:
        """Do what Megatron's optimizers do with gradients that are whole, and finite, before they step."""
        if getattr(optimizer, "grad_scaler", None) is None:
            optimizer.prepare_grads()
        else:
            assert self.loss_scale is not None, "there is a scaler"
            optimizer._copy_model_grads_to_main_grads()
            if gradients := optimizer._collect_main_grad_data_for_unscaling():
                torch._foreach_mul_(gradients, self.loss_scale.submitted.double().reciprocal().float().squeeze())
        parameters, most = optimizer.get_parameters(), optimizer.config.clip_grad
        if most > 0 and parameters:
            decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # from `grad`
            clip_grads.clip_grad_by_total_norm_fp32(parameters, most, norm, decoupled)

    def _end_within_stage(self) -> None:
        """Wait for the replicas, and do what Megatron's `finalize_model_grads` does between ranks of one stage."""
        if self._reduced:
            return
        self._reduced = True
        groups = copy.copy(self._process_groups)
        groups.embd = groups.pos_embd = _GroupOfOne()  # these join stages; None would mean Megatron's own
        with hearing(None, "replicas' gradients"):
            with self.routers.finishing():
                self._finalize(groups)
            if self._tokens is not None and groups.dp_cp.size() > 1:
                dist.all_reduce(self._tokens, group=groups.dp_cp)
        self._gradients.keep()

    @property
    def _gradients(self) -> OwnGradients:
        """The submitted batch's."""
        assert self._own is not None, "the stream has begun"
        return self._own

    def _scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the scale of the batch whose losses are being computed."""
        return loss if self.loss_scale is None else self.loss_scale.present * loss


class OwnGradients:
    """The gradients that this rank's optimizer steps with: all, or the rank's shard if it is distributed.

    With `waits` they have memory of their own, allocated once, where a batch's wait for their step while the next ones
    accumulate; else they are seen where Megatron's buffers have them.
    """

    def __init__(self, model: Sequence[Any], waits: bool) -> None:
        self.waits = waits
        #: What the memory takes.
        self.nbytes = 0
        self._buckets: list[tuple[Tensor, Tensor]] = []
        self._parameters: list[tuple[Any, Tensor, Tensor]] = []
        self._every: list[Tensor] = []
        for buffer in _buffers(model):
            shards, shard = 1, 0
            if buffer.ddp_config.use_distributed_optimizer:
                shards, shard = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            present = [bucket.grad_data.view(shards, -1)[shard] for bucket in buffer.buckets]
            kept = present
            if waits:
                sizes = [part.numel() for part in present]
                kept = list(buffer.grad_data.new_empty(sum(sizes)).split(sizes))
                self.nbytes += held_gradient_bytes(buffer.grad_data.numel(), buffer.grad_data.element_size(), shards)
                self._buckets += zip(present, kept, strict=True)
            self._every += kept
            for bucket, part, own in zip(buffer.buckets, present, kept, strict=True):
                for parameter in bucket.params:
                    whole = parameter.main_grad
                    start = whole.storage_offset() - part.storage_offset()
                    view = own[max(start, 0) : max(start + whole.numel(), 0)]
                    self._parameters.append((parameter, whole, view if shards > 1 else view.view_as(whole)))

    def keep(self) -> None:
        """The gradients are reduced, and make way for the next ones."""
        for present, kept in self._buckets:
            kept.copy_(present)

    def divide(self, divisor: float) -> None:
        """Divide all that the optimizer steps with: losses were sums over tokens."""
        torch._foreach_mul_(self._every, 1 / divisor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `main_grad` is what was kept: if sharded, the part in the rank's shard, in one dimension."""
        for parameter, _, own in self._parameters:
            parameter.main_grad = own
        yield
        for parameter, whole, _ in self._parameters:
            parameter.main_grad = whole


@contextmanager
def _stepping_with_own(optimizer: Any) -> Iterator[None]:
    """Inside, `optimizer` takes `main_grad` for its own shard of a gradient, and not for all of it."""
    if not hasattr(optimizer, "_get_model_param_range_map"):
        yield
        return
    ranges = optimizer._get_model_param_range_map
    optimizer._get_model_param_range_map = lambda parameter: {"param": ranges(parameter)["param"].normalize()}
    yield
    del optimizer._get_model_param_range_map


def _check_steps(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose steps cannot be made one by one from gradients that are held."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        if not hasattr(part, "step_with_ready_grads"):
            raise ValueError(
                f"2bw: {type(part).__name__} prepares gradients and steps in one, while 2bw counts the gradients of "
                "all stages in between: use an optimizer with step_with_ready_grads"
            )
    for part in (optimizer, *parts):
        if _is_layer_wise(part) and (part is not optimizer or getattr(part, "use_buffer_param_sync", False)):
            raise ValueError(
                f"2bw: {type(part).__name__} reduces gradients into shards of whole parameters, each as it is shaped, "
                "and 2bw holds shards that are cut anywhere: leave --use-distributed-optimizer out"
            )


def _is_layer_wise(optimizer: Any) -> bool:
    """Return whether replicas step some of the parameters each, and then give them to each other."""
    return hasattr(optimizer, "allgather_params")


def _loss_scale(scalers: Sequence[Any]) -> LossScale:
    def learn(overflow: bool) -> None:
        for scaler in scalers:
            scaler.update(overflow)

    return LossScale(lambda: scalers[0].scale.clone(), learn)


def _weight_versions(
    model: Sequence[Any], optimizers: Sequence[Any], biases: Sequence[Tensor], in_place: bool
) -> WeightVersions:
    """Two versions of trainable parameters, all that Megatron's buffers and optimizers see of them, and `biases`."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters() if parameter.requires_grad]
    shards = [
        tensor
        for optimizer in optimizers
        for name in ("shard_float16_groups", "shard_fp32_groups")
        for group in getattr(optimizer, name, None) or ()
        for tensor in group
    ]
    stepped = [tensor for optimizer in optimizers for tensor in optimizer.get_parameters()]
    aliases = [Alias(owner, "param_data") for buffer in _buffers(model) for owner in (buffer, *buffer.buckets)]
    return WeightVersions(parameters, [*shards, *stepped], aliases, biases, in_place)


def _done_by_two_bw(*_: Any, **__: Any) -> None:
    """Gradients are zeroed when nothing needs them any more, and weights gathered into the version that is next."""


def _buffers(model: Sequence[Any]) -> list[Any]:
    """All flat buffers of Megatron's DDP chunks; those of experts that are shared out have replicas of their own."""
    return [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


class _GroupOfOne:
    """As much of a process group as Megatron asks of one with nothing to reduce."""

    def size(self) -> int:
        return 1


def _tied_embedding(model: Sequence[Any]) -> Tensor | None:
    """The weight that the first stage shares with others, on each of them; None elsewhere, and for untied models.

    There it is the output layer's, or the embedding of multi-token prediction.
    """
    shared = (weight for weight in model[0].parameters() if getattr(weight, "shared_embedding", False))
    return next((weight for weight in shared if weight.requires_grad), None)
