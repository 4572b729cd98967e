"""Adaptive kFkB in Megatron-LM's scripts: what it may use, what it may cut, what it logs, and what is saved of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from evenpipe.megatron.script.hooks import save_patch, set_up_patch, with_values
from evenpipe.megatron.script.log import say, say_on_last_rank
from evenpipe.megatron.script.saved_state import SavedState
from evenpipe.megatron.symbols import ADAPTIVE
from evenpipe.megatron.unsupported import packs, why_one_size
from evenpipe.planner.group_memory import PlanError
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.tuner.process_memory import limit_bytes
from evenpipe.tuner.samples import LossWeights, loader_of
from evenpipe.upstream import PatchSet
from evenpipe.upstream.ending import end_job

if TYPE_CHECKING:
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.runtime.executor import Observer

__all__ = ["SAVED", "AdaptiveTraining", "adaptive_patches"]

_AUTO: Final = "--group-size auto"
_ANEW: Final = f"{_AUTO}: what was saved is of other batches or memory: tunes anew"
_UNEVEN: Final = "samples count different tokens in the loss: add --calculate-per-token-loss, if the script honours it"
SAVED: Final = SavedState(
    _AUTO, "evenpipe_tuner", "goes on tuning as it was saved", "has no tuner's state of these settings: tunes anew"
)


class AdaptiveTraining:
    """A script's training with --group-size auto. `args` are Megatron's, `config` is what EvenPipe was asked for.

    Make it once arguments are known, have Megatron's loop call it in the place of its forward-backward function, and
    apply `adaptive_patches`. Where no candidate fits, the job ends with one line.
    """

    def __init__(
        self,
        config: EvenPipeConfig,
        args: Namespace,
        observer: Observer | None,
        connected: Callable[[PipelineSchedule], None],
    ) -> None:
        from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning

        self.args = args
        self._config = config
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
        self.schedule = AdaptiveSchedule(tuning, config.bpipe, observer, connected=connected, schedule=config.spec)

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """One batch, as Megatron's own function would."""
        if forward_only:
            return self.schedule(forward_only=True, **arguments)
        # Megatron may run an iteration again, which is to be cut as before.
        self.schedule.iteration = self.args.curr_iteration
        if self._weights is not None and (source := loader_of(arguments["data_iterator"])) is not None:
            arguments = arguments | {"data_iterator": self._weights.watch(source)}
        try:
            losses = self.schedule(**arguments)
        except PlanError as error:
            given = self._config.memory_gib
            end_job(f"{_AUTO if given is None else f'--memory-gib {given}'}: {error}")
        self._warn()
        return losses

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        from evenpipe.megatron.adaptive.static_memory import static_bytes

        if optimizer is None:
            return  # --skip-train
        # BERT's loss is a mean over each micro-batch's tokens, whatever Megatron is told.
        per_token = self.args.calculate_per_token_loss and not _is_bert(model)
        self._weights = None if per_token or why_one_size(self.args) is not None else LossWeights()
        limit = limit_bytes(self._config.memory_gib, torch.device(torch.cuda.current_device()))
        self.schedule.tuning = self.schedule.tuning._replace(
            limit_bytes=limit, static_bytes=lambda: static_bytes(model, optimizer)
        )
        if (state := SAVED.resumed(self.args, limit)) is not None:
            self.schedule.load_state_dict(state)

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        state = self.schedule.state_dict() if self.args.rank == 0 else None
        return write() if state is None else SAVED.save(self.args, iteration, folder, state, write)

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


def adaptive_patches(training: AdaptiveTraining) -> PatchSet:
    """Return what calls `training` with Megatron's model, optimizer and checkpoints."""
    model_and_optimizer = f"{_AUTO}: the first place that has model and optimizer, whose memory counts"
    saved = f"{_AUTO}: what has been measured and decided is saved beside what Megatron saves"
    set_up = set_up_patch(training, "model-and-optimizer", model_and_optimizer)
    return PatchSet("auto", [set_up, save_patch(training, saved)], ADAPTIVE)


def _is_bert(model: Sequence[Any]) -> bool:
    from megatron.core.models.bert.bert_model import BertModel

    return any(isinstance(module, BertModel) for chunk in model for module in chunk.modules())
