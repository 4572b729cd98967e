"""transformers' callbacks in a pipeline: every rank calls them, and all ranks do what any of them asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from evenpipe.torch.hf.loading import transformers

__all__ = ["Callbacks"]

#: What callbacks can ask for, as `TrainerControl` names it.
_ASKED: Final = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Callbacks:
    """The callbacks of one training, and the `state` and `control` that they see.

    transformers' own comes first: it asks for logs, evaluations and checkpoints as the arguments say. Those of the
    arguments' `report_to` follow, and then the user's.
    """

    def __init__(self, args: Any, callbacks: Sequence[Any], model: Any, processing_class: Any, device: torch.device):
        library = transformers()
        first = [
            library.trainer_callback.DefaultFlowCallback,
            *library.integrations.get_reporting_integration_callbacks(args.report_to),
        ]
        self.handler = library.trainer_callback.CallbackHandler(
            [*first, *callbacks], model, processing_class, None, None
        )
        self.state: Any = library.TrainerState(is_world_process_zero=dist.get_rank() == 0)
        self.state.is_local_process_zero = args.local_process_index == 0
        self.control: Any = library.TrainerControl()
        self._args, self._device = args, device
        self.call("on_init_end")

    def begin(self, steps: int, per_epoch: int, optimizer: Any, scheduler: Any) -> None:
        """Start, or go on, with a total of `steps` optimizer steps, `per_epoch` of them an epoch."""
        self.handler.optimizer, self.handler.lr_scheduler = optimizer, scheduler
        self.state.max_steps, self.state.num_train_epochs = steps, -(-steps // per_epoch)
        self.state.train_batch_size = self._args.per_device_train_batch_size
        self.state.compute_steps(self._args, steps)
        self.call("on_train_begin")

    def resume(self, saved: Any) -> None:
        """Go on from a checkpoint's state."""
        for name in ("global_step", "epoch", "log_history", "best_metric", "best_global_step"):
            setattr(self.state, name, getattr(saved, name))

    def call(self, event: str, **more: Any) -> None:
        """Call `event` of each callback."""
        self.control = getattr(self.handler, event)(self._args, self.state, self.control, **more)

    def call_and_agree(self, event: str) -> None:
        """Call `event`; what a callback then asks for on any rank is asked for on all. All ranks call this alike."""
        self.call(event)
        self.agree()

    def agree(self) -> None:
        """Have all ranks ask for what callbacks asked for on any. All ranks call this alike."""
        asked = torch.tensor([float(getattr(self.control, name)) for name in _ASKED], device=self._device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        for name, value in zip(_ASKED, asked.tolist(), strict=True):
            setattr(self.control, name, bool(value))
