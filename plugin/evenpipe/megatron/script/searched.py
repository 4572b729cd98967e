"""A schedule searched for the run's own times in Megatron-LM's scripts: its memory, its log, and what it saves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from evenpipe.megatron.script.hooks import save_patch, set_up_patch
from evenpipe.megatron.script.log import say_on_last_rank
from evenpipe.megatron.script.partition import layer_kinds
from evenpipe.megatron.script.saved_state import SavedState
from evenpipe.megatron.symbols import STATIC_MEMORY
from evenpipe.schedule import SEARCHED, ScheduleError
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag
from evenpipe.tuner.process_memory import limit_bytes
from evenpipe.upstream import PatchSet
from evenpipe.upstream.ending import end_job

if TYPE_CHECKING:
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.runtime.executor import Observer

__all__ = ["SearchedTraining", "searched_patches"]

_ASKED: Final = f"{flag('schedule')} {SEARCHED}"
_MEMORY: Final = flag("memory_gib")
#: What times and memory of parts depend on, beside the layout.
_SETTINGS: Final = ("virtual_pipeline_model_parallel_size", "num_experts", "expert_model_parallel_size", "fp8")


def _settings(args: Namespace) -> dict[str, Any]:
    return {name: getattr(args, name, None) for name in _SETTINGS} | {"layout": layer_kinds(args)}


_SAVED: Final = SavedState(
    _ASKED,
    "evenpipe_searched",
    "trains by the order that was saved",
    "has no order of these settings: searches anew",
    _settings,
)


class SearchedTraining:
    """A script's training with --evenpipe-schedule searched. `args` are Megatron's, `config` is what was asked for.

    Make it once arguments are known, have Megatron's loop call it in the place of its forward-backward function, and
    apply `searched_patches`. Where no order fits the memory, the job ends with one line.
    """

    def __init__(
        self,
        config: EvenPipeConfig,
        args: Namespace,
        observer: Observer | None,
        connected: Callable[[PipelineSchedule], None],
    ) -> None:
        from evenpipe.megatron.searched import SearchedSchedule, Searching

        self.args = args
        self._config = config
        searching = Searching(0, int, config.retune_interval, self._say)
        self.schedule = SearchedSchedule(searching, observer, connected=connected)

    def __call__(self, **arguments: Any) -> list[Any]:
        """One batch, as Megatron's own function would."""
        self.schedule.iteration = self.args.curr_iteration
        try:
            return self.schedule(**arguments)
        except ScheduleError as error:
            given = self._config.memory_gib
            end_job(f"{_ASKED if given is None else f'{_MEMORY} {given}'}: {error}")

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        from evenpipe.megatron.adaptive.static_memory import static_bytes, workspace_bytes

        if optimizer is None:
            return  # --skip-train
        limit = limit_bytes(self._config.memory_gib, torch.device(torch.cuda.current_device()))
        self.schedule.searching = self.schedule.searching._replace(
            limit_bytes=limit, static_bytes=lambda: static_bytes(model, optimizer) + workspace_bytes()
        )
        if (state := _SAVED.resumed(self.args, limit)) is not None:
            self.schedule.load_state_dict(state)

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        state = self.schedule.state_dict() if self.args.rank == 0 else None
        return write() if state is None else _SAVED.save(self.args, iteration, folder, state, write)

    def _say(self, line: str) -> None:
        say_on_last_rank(f"{SEARCHED}: {line}")


def searched_patches(training: SearchedTraining) -> PatchSet:
    """Return what calls `training` with Megatron's model, optimizer and checkpoints."""
    model_and_optimizer = f"{_ASKED}: the first place that has model and optimizer, whose memory counts"
    saved = f"{_ASKED}: the order is saved beside what Megatron saves"
    set_up = set_up_patch(training, "model-and-optimizer", model_and_optimizer)
    return PatchSet("searched", [set_up, save_patch(training, saved)], STATIC_MEMORY)
