"""Megatron-LM's scripts under an order or a group size that the run's own times decide, and what is saved of these."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from evenpipe.megatron.symbols import ADAPTIVE
from evenpipe.megatron.unsupported import packs, why_one_size
from evenpipe.megatron_lm.checks import spec_of
from evenpipe.megatron_lm.hooks import Training, save_patch, set_up_patch, with_values
from evenpipe.megatron_lm.log import say, say_on_last_rank
from evenpipe.megatron_lm.partition import layer_kinds
from evenpipe.megatron_lm.saved_state import SavedState
from evenpipe.schedule import AUTO, SEARCHED, ScheduleError
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag
from evenpipe.tuner.group_memory import PlanError
from evenpipe.tuner.process_memory import limit_bytes
from evenpipe.tuner.samples import LossWeights, loader_of
from evenpipe.upstream import PatchSet
from evenpipe.upstream.ending import end_job

if TYPE_CHECKING:
    from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule
    from evenpipe.megatron.capped import CappedSchedule
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.megatron.searched import SearchedSchedule
    from evenpipe.runtime.executor import Observer

__all__ = ["TUNED", "MeasuredTraining", "measured_patches", "training_for"]

#: What times and memory of parts depend on, beside the layout.
_SETTINGS: Final = ("virtual_pipeline_model_parallel_size", "num_experts", "expert_model_parallel_size", "fp8")
#: What a plan under a cap depends on beside: how much attention saves, and what gradients and the optimizer hold.
_KINDS: Final = (
    *("attention_backend", "use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("accumulate_allreduce_grads_in_fp32", "fp32_residual_connection"),
)


def _settings(args: Namespace) -> dict[str, Any]:
    from evenpipe.megatron.recomputing import RULED_OUT_BY

    names = (*_SETTINGS, "cuda_graph_impl", *RULED_OUT_BY)
    return {name: getattr(args, name, None) for name in names} | {"layout": layer_kinds(args)}


def _capped_settings(args: Namespace) -> dict[str, Any]:
    # JSON has no words for enumerations and types of numbers.
    return _settings(args) | {name: str(getattr(args, name, None)) for name in _KINDS}


def _placed_settings(args: Namespace) -> dict[str, Any]:
    needs = spec_of(EvenPipeConfig.of(schedule=AUTO), args).needed(args.virtual_pipeline_model_parallel_size or 1)
    return _settings(args) | {"placed": sorted(needs)}


_AUTO: Final = "--group-size auto"
_ANEW: Final = f"{_AUTO}: what was saved is of other batches or memory: tunes anew"
_UNEVEN: Final = "samples count different tokens in the loss: add --calculate-per-token-loss, if the script honours it"
TUNED: Final = SavedState(
    _AUTO, "evenpipe_tuner", "goes on tuning as it was saved", "has no tuner's state of these settings: tunes anew"
)
_SEARCHED: Final = SavedState(
    f"{flag('schedule')} {SEARCHED}",
    "evenpipe_searched",
    "trains by the order that was saved",
    "has no order of these settings: searches anew",
    _settings,
)
_CHOSEN: Final = SavedState(
    f"{flag('schedule')} {AUTO}",
    "evenpipe_auto",
    "trains by the schedule that was chosen",
    "has no choice for these settings: chooses again",
    _placed_settings,
)

_CAPPED: Final = SavedState(
    f"{flag('swap')} auto",
    "evenpipe_capped",
    "trains by the plan that was saved",
    "has no plan for these settings: measures again",
    _capped_settings,
)


class MeasuredTraining:
    """A script's training by what it measures. `args` are Megatron's; `saved` is its state beside checkpoints.

    Make it once arguments are known, have Megatron's loop call it in the place of its forward-backward function, and
    apply `measured_patches`. Where nothing fits the memory, the job ends with one line.
    """

    def __init__(
        self,
        config: EvenPipeConfig,
        args: Namespace,
        saved: SavedState,
        schedule: AdaptiveSchedule | SearchedSchedule | CappedSchedule,
    ) -> None:
        self.args = args
        self.schedule = schedule
        self._saved = saved
        self._asked = saved.asked if config.memory_gib is None else f"--memory-gib {config.memory_gib:g}"
        self._memory_gib = config.memory_gib

    def __call__(self, **arguments: Any) -> list[Any]:
        """One batch, as Megatron's own function would."""
        # Megatron may run an iteration again, which is to be cut as before.
        self.schedule.iteration = self.args.curr_iteration
        try:
            return self.schedule(**arguments)
        except (PlanError, ScheduleError) as error:
            end_job(f"{self._asked}: {error}")

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        if optimizer is None:
            return  # --skip-train
        from evenpipe.megatron.adaptive.static_memory import static_bytes

        limit = limit_bytes(self._memory_gib, torch.device(torch.cuda.current_device()))
        self.schedule.tuning = self.schedule.tuning._replace(
            limit_bytes=limit, static_bytes=lambda: static_bytes(model, optimizer)
        )
        if (state := self._saved.resumed(self.args, limit)) is not None:
            self.schedule.load_state_dict(state)

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        state = self.schedule.state_dict() if self.args.rank == 0 else None
        return write() if state is None else self._saved.save(self.args, iteration, folder, state, write)


class AdaptiveTraining(MeasuredTraining):
    """A script's training with --group-size auto."""

    schedule: AdaptiveSchedule

    def __init__(
        self,
        config: EvenPipeConfig,
        args: Namespace,
        observer: Observer | None,
        connected: Callable[[PipelineSchedule], None],
    ) -> None:
        from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning

        self._weights: LossWeights | None = None
        self._one_size: str | None = None
        self._warned = False
        tuning = Tuning(
            limit_bytes=0,  # known when the devices are
            static_bytes=int,
            interval=config.retune_interval,
            sizes=self._sizes,
            differ=packs(args),
            # A process that is sent its data by another one of its tensor-parallel group makes room for so many.
            around_batch=lambda size: with_values(args, micro_batch_size=size),
            log=say_on_last_rank,
            resumed=lambda goes_on: None if goes_on else say_on_last_rank(_ANEW),
        )
        schedule = AdaptiveSchedule(tuning, config.bpipe, observer, connected=connected, schedule=config.spec)
        super().__init__(config, args, TUNED, schedule)

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """One batch, as Megatron's own function would."""
        if forward_only:
            return self.schedule(forward_only=True, **arguments)
        if self._weights is not None and (source := loader_of(arguments["data_iterator"])) is not None:
            arguments = arguments | {"data_iterator": self._weights.watch(source)}
        losses = super().__call__(**arguments)
        self._warn()
        return losses

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        # BERT's loss is a mean over each micro-batch's tokens, whatever Megatron is told.
        per_token = self.args.calculate_per_token_loss and not _is_bert(model)
        self._weights = None if per_token or why_one_size(self.args) is not None else LossWeights()
        super().set_up(model, optimizer)

    def _sizes(self, loaded: Sequence[Any], given: int) -> Sequence[int] | None:
        reason = why_one_size(self.args)
        if self._weights is not None and not self._weights.even(torch.device(torch.cuda.current_device())):
            reason = _UNEVEN
        if reason is None:
            return None
        if reason != self._one_size:
            self._one_size = reason
            say_on_last_rank(f"{_AUTO}: micro-batches stay of --micro-batch-size {given} samples: {reason}")
        return [given]

    def _warn(self) -> None:
        """Once: the first batch did not show what its size may be."""
        given, uneven = self.args.micro_batch_size, self._weights is not None and not self._weights.even_here
        if uneven and self.schedule.micro_batch_size != given and not self._warned:
            self._warned = True
            say(
                f"warning: from iteration {self.schedule.iteration} on samples count different tokens in the loss, "
                f"which until the next decision is not what it is with --micro-batch-size {given} alone: add "
                "--calculate-per-token-loss"
            )


def training_for(
    config: EvenPipeConfig,
    args: Namespace,
    observer: Observer | None,
    connected: Callable[[PipelineSchedule], None],
) -> MeasuredTraining:
    """Return the training by what it measures that these settings ask for."""
    # Imported here: a run does not pay for what others measure.
    from evenpipe.megatron.adaptive.schedule import Tuning

    if config.group_size == "auto":
        return AdaptiveTraining(config, args, observer, connected)
    if config.swap == "auto":
        from evenpipe.megatron.capped import CappedSchedule

        tuning = Tuning(0, int, log=lambda line: say_on_last_rank(f"{_CAPPED.asked}: {line}"))
        capped = CappedSchedule(
            tuning, config.spec, observer, connected=connected, group_size=config.group_size, bpipe=config.bpipe
        )
        ordered = {"schedule": config.spec.name, "group_size": config.group_size, "partners": config.bpipe}
        saved = _CAPPED._replace(more=lambda args: _capped_settings(args) | ordered)
        return MeasuredTraining(config, args, saved, capped)
    if config.schedule == AUTO:
        from evenpipe.megatron.chosen import ChosenSchedule

        tuning = Tuning(0, int, log=lambda line: say(f"{AUTO}: {line}") if args.rank == 0 else None)
        chosen = ChosenSchedule(tuning, observer, connected=connected, schedule=spec_of(config, args))
        return MeasuredTraining(config, args, _CHOSEN, chosen)
    from evenpipe.megatron.searched import SearchedSchedule

    tuning = Tuning(0, int, config.retune_interval, log=lambda line: say_on_last_rank(f"{SEARCHED}: {line}"))
    return MeasuredTraining(
        config, args, _SEARCHED, SearchedSchedule(tuning, observer, connected=connected, swaps=config.swap is not None)
    )


def measured_patches(training: Training) -> PatchSet:
    """Return what calls `training` with Megatron's model, optimizer and checkpoints."""
    asked = f"{_AUTO}, {_SEARCHED.asked}, {_CHOSEN.asked}, {_CAPPED.asked}"
    model_and_optimizer = f"{asked}: the first place that has model and optimizer, whose memory counts"
    set_up = set_up_patch(training, "model-and-optimizer", model_and_optimizer)
    save = save_patch(training, f"{asked}: what has been measured and decided is saved beside what Megatron saves")
    return PatchSet("measured", [set_up, save], ADAPTIVE)


def _is_bert(model: Sequence[Any]) -> bool:
    from megatron.core.models.bert.bert_model import BertModel

    return any(isinstance(module, BertModel) for chunk in model for module in chunk.modules())
