"""Adaptive kFkB in Megatron-LM's scripts: what it may use, what it may cut, what it says, and what is saved of it."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from evenpipe.megatron.script.adaptive.checks import why_one_size
from evenpipe.megatron.script.hooks import save_patch, set_up_patch
from evenpipe.settings import EvenPipeConfig
from evenpipe.upstream import Patch, PatchSet

if TYPE_CHECKING:
    from evenpipe.megatron.adaptive.loss_weights import LossWeights
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.megatron.script.adaptive.schedule import ScriptSchedule
    from evenpipe.runtime.executor import Observer

__all__ = ["AdaptiveTraining", "adaptive_patches"]

_UNEVEN: Final = "samples count different tokens in the loss: add --calculate-per-token-loss, if the script honours it"


class AdaptiveTraining:
    """A script's training with --group-size auto. `args` are Megatron's, `config` is what EvenPipe was asked for.

    Make it once arguments are known, have Megatron's loop use its `schedule`, and apply what it patches.
    """

    def __init__(
        self,
        config: EvenPipeConfig,
        args: Namespace,
        observer: Observer | None,
        connected: Callable[[PipelineSchedule], None],
    ) -> None:
        from evenpipe.megatron.adaptive.schedule import Tuning
        from evenpipe.megatron.script.adaptive.schedule import ScriptSchedule, micro_batch_size
        from evenpipe.tuner.told import Teller

        self.args = args
        self._config = config
        self._static_bytes: Callable[[], int] = int
        self._weights: LossWeights | None = None
        self._teller = Teller(_say)
        self._one_size: str | None = None
        tuning = Tuning(
            limit_bytes=0,  # known when the devices are
            static_bytes=lambda: self._static_bytes(),
            interval=config.retune_interval,
            sizes=self._sizes,
            around_batch=functools.partial(micro_batch_size, args),
            retuned=self._teller.retuned,
            resumed=self._resumed,
        )
        self.schedule: ScriptSchedule = ScriptSchedule(tuning, args, config.bpipe, observer, connected)

    def patches(self) -> PatchSet:
        """What tells it of Megatron's model, optimizer and checkpoints."""
        return PatchSet("auto", adaptive_patches(self))

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        import torch

        from evenpipe.megatron.adaptive.loss_weights import LossWeights
        from evenpipe.megatron.adaptive.static_memory import static_bytes
        from evenpipe.megatron.script.adaptive.checkpoint import resumed
        from evenpipe.tuner.limit import limit_bytes

        if optimizer is None:
            return  # --skip-train
        self._static_bytes = functools.partial(static_bytes, model, optimizer)
        # BERT's loss is a mean over each micro-batch's tokens, whatever Megatron is told.
        per_token = self.args.calculate_per_token_loss and not _is_bert(model)
        self._weights = None if per_token or why_one_size(self.args) is not None else LossWeights()
        limit = limit_bytes(self._config.memory_gib, torch.device(torch.cuda.current_device()))
        self.schedule.attach(limit, self._weights)
        state = resumed(self.args, limit)
        if state is not None:
            self._teller.before = tuple(state["tuner"]["current"][:2])
            self.schedule.load_state_dict(state)

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        from evenpipe.megatron.script.adaptive.checkpoint import save

        state = self.schedule.state_dict() if self.args.rank == 0 else None
        return write() if state is None else save(self.args, iteration, folder, state, write)

    def _sizes(self, loaded: Sequence[Any], given: int) -> Sequence[int] | None:
        import torch

        reason = why_one_size(self.args)
        if self._weights is not None and not self._weights.even(torch.device(torch.cuda.current_device())):
            reason = _UNEVEN
        if reason is None:
            return None
        if reason != self._one_size:
            self._one_size = reason
            _say(f"--group-size auto: micro-batches stay of --micro-batch-size {given} samples: {reason}")
        return [given]

    def _resumed(self, goes_on: bool) -> None:
        if not goes_on:
            self._teller.before = None
            _say("--group-size auto: what was saved is of other batches or memory: tunes anew")


def adaptive_patches(training: Any) -> list[Patch]:
    """What :class:`AdaptiveTraining` applies; made without looking at what is installed."""
    return [
        set_up_patch(
            training,
            "model-and-optimizer",
            "--group-size auto: the first place that has model and optimizer, whose memory counts",
        ),
        save_patch(
            training, "--group-size auto: what has been measured and decided is saved beside what Megatron saves"
        ),
    ]


def _is_bert(model: Sequence[Any]) -> bool:
    from megatron.core.models.bert.bert_model import BertModel

    return any(isinstance(module, BertModel) for chunk in model for module in chunk.modules())


def _say(line: str) -> None:
    from megatron.training import print_rank_last

    print_rank_last(f" [evenpipe] {line}")
