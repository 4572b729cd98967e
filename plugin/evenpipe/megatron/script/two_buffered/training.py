"""2BW in Megatron-LM's scripts: where the two weight versions come in, are saved and are taken up again."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.script.hooks import save_patch, set_up_patch
from evenpipe.megatron.script.two_buffered.answers import known_to_all
from evenpipe.megatron.script.two_buffered.exit import ExitQuestions
from evenpipe.megatron.script.two_buffered.log import StepLog
from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES, since
from evenpipe.megatron.training_supported import training_patch
from evenpipe.upstream import Patch, PatchSet

if TYPE_CHECKING:
    from evenpipe.megatron.two_buffered import StreamSchedule, TwoBuffered

__all__ = ["TwoBufferedTraining", "two_buffered_patches"]


class TwoBufferedTraining:
    """A script's training with 2BW. `args` are Megatron's, `schedule` is the one that its loop is given.

    Make it once arguments are known, and apply what it patches::

        training = TwoBufferedTraining(schedule, args)
        training.patches().apply()

    What Megatron would re-run after a suspicious result is switched off: a stream of batches cannot be wound back.
    """

    def __init__(self, schedule: StreamSchedule, args: Namespace) -> None:
        self.args = args
        self._schedule = schedule
        self._buffers: TwoBuffered | None = None
        self.steps = StepLog(args)
        self.exit_questions = ExitQuestions(args, self.steps.close)
        # Its barriers would join all stages in every iteration.
        args.barrier_with_L1_time = False
        if args.rerun_mode != "disabled":
            if args.rank == 0:
                print(
                    f" [evenpipe] 2bw: --rerun-mode {args.rerun_mode} is disabled, as a stream of batches cannot be "
                    "run again; a loss that is no number still ends the run",
                    flush=True,
                )
            args.rerun_mode = "disabled"

    def patches(self) -> PatchSet:
        """What gives Megatron's training loop two weight versions."""
        series = MEGATRON_CORE.series(RELEASES)
        return PatchSet("2bw", [patch for patch in two_buffered_patches(self) if series in patch.versions])

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        from evenpipe.megatron.script.two_buffered.checkpoint import resume
        from evenpipe.megatron.two_buffered import TwoBuffered

        if optimizer is None:
            return  # --skip-train
        if optimizer.is_stub_optimizer:
            raise ValueError(
                "--evenpipe-schedule 2bw: this stage has no parameters to train: choose another "
                "--pipeline-model-parallel-layout, or --evenpipe-schedule 1f1b"
            )
        self._buffers = TwoBuffered(model, optimizer)
        resumed = resume(self.args, model, self._buffers)
        self._schedule.attach(self._buffers)
        self.steps.begin(self._buffers, resumed)

    def interrupt(self) -> None:
        """Called by all ranks before they wait for each other: finish the step, and let go of what is under way.

        A stage that evicts may be amid transfers that its partner would take part in only in its next iteration.
        """
        if self._buffers is not None:
            self._buffers.drain()

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        from evenpipe.megatron.script.two_buffered.checkpoint import save

        if self._buffers is None:
            return write()
        self.interrupt()
        with self.exit_questions.as_given():
            return save(iteration, model, self._buffers, folder, write)


def two_buffered_patches(training: Any) -> list[Patch]:
    """What :class:`TwoBufferedTraining` applies; made without looking at what is installed."""
    return [
        set_up_patch(
            training, "two-versions", "2bw: the first place that has model and optimizer, with what was loaded"
        ),
        save_patch(training, "2bw: both weight versions are saved, when the submitted step is finished"),
        training_patch(
            "exit",
            "megatron.training.training:checkpoint_and_decide_exit",
            functools.partial(_asked_in_the_background, training=training),
            "2bw: all ranks are asked in every iteration whether to stop, which joins all stages",
        ),
        training_patch(
            "date",
            "megatron.training.training:print_datetime",
            functools.partial(_interrupting, training=training),
            "2bw: a barrier before Megatron exits, at which nothing may be under way",
        ),
        *(
            Patch(
                f"timer-{name}",
                (f"megatron.core.timers:Timer.{name}",),
                MEGATRON_CORE,
                since({"0.14": "(self, barrier=False)"}),
                functools.partial(_interrupting, training=training),
                "2bw: timers stop, with barriers, before Megatron evaluates or saves; nothing may be under way then",
            )
            for name in ("start", "stop")
        ),
        *known_to_all(),
    ]


def _interrupting(original: Callable[..., Any], training: TwoBufferedTraining) -> Callable[..., Any]:
    @functools.wraps(original)
    def interrupting(*args: Any, **kwargs: Any) -> Any:
        training.interrupt()
        return original(*args, **kwargs)

    return interrupting


def _asked_in_the_background(original: Callable[..., Any], training: TwoBufferedTraining) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        return training.exit_questions.ask(functools.partial(original, *args, **kwargs))

    return checkpoint_and_decide_exit
