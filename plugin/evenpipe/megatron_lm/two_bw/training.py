"""2BW in Megatron-LM's scripts: where the two weight versions come in, are saved and are taken up again."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from evenpipe.megatron.supported import MEGATRON_CORE, PARALLEL_STATE, RELEASES, Changes, core_patch, expected, members
from evenpipe.megatron.symbols import training_expected, training_patch
from evenpipe.megatron_lm.hooks import save_patch, set_up_patch
from evenpipe.megatron_lm.log import say, say_on_last_rank, show_figures
from evenpipe.megatron_lm.two_bw.exit import ExitDecision
from evenpipe.two_bw.log import StepLog
from evenpipe.upstream import PRESENT, Patch, PatchSet, UpstreamError
from evenpipe.upstream.ending import end_job

if TYPE_CHECKING:
    from evenpipe.megatron.two_bw import StreamSchedule
    from evenpipe.megatron.two_bw.expert_losses import ExpertLosses
    from evenpipe.schedule import DelayCorrection
    from evenpipe.two_bw.stream import TwoBW

__all__ = ["CALLED", "TwoBWLoop", "two_bw_patches"]

_AND = "logical_and_across_model_parallel_group"
_MAX = "reduce_max_stat_across_model_parallel_group"
_TIMERS = "megatron.core.timers"
_MOE = "megatron.core.transformer.moe"
_EXPERTS: Mapping[str, Changes] = {
    f"{_MOE}.moe_utils:reduce_aux_losses_tracker_across_ranks": {
        "0.14": "(track_names=None)",
        "0.16": "(track_names=None, pg_collection=None)",
        "0.18": None,
    },
    f"{_MOE}.moe_logging:MoEMetricsTracker._sync_metrics": {"0.18": "(self, metric_names, pg_collection=None)"},
}
_JOINING: Final = (
    (
        "hashes",
        "megatron.core.utils:check_param_hashes_across_dp_replicas",
        "a check that replicas have the same weights",
        "(model, cross_check=False)",
    ),
    (
        "stragglers",
        "megatron.core.utils:StragglerDetector.report",
        "a report of --log-straggler",
        "(self, total_flops=0.0, log_interval=0)",
    ),
    ("energy", "megatron.core.energy_monitor:EnergyMonitor.lap", "a reading of --log-energy", "(self)"),
)
"""Functions in which Megatron joins all ranks, at an interval of the user's."""
CALLED: Final = (
    *training_expected(
        "megatron.training:get_signal_handler",
        "megatron.training.dist_signal_handler:DistributedSignalHandler._signal_received",
        "megatron.training.training:_TRAIN_START_TIME",
    ),
    *expected(
        {
            **members(
                PARALLEL_STATE,
                (
                    *("get_pipeline_model_parallel_rank", "get_tensor_model_parallel_rank"),
                    *("get_expert_model_parallel_rank", "get_expert_tensor_parallel_rank"),
                ),
                "()",
            ),
            f"{PARALLEL_STATE}:get_data_parallel_rank": PRESENT,
            f"{PARALLEL_STATE}:get_expert_data_parallel_rank": {
                "0.14": "(partial_expert_data_parallel=False)",
                "0.19": "(with_gtp_remat=True, partial_expert_data_parallel=False)",
            },
            f"{_TIMERS}:Timer._started": PRESENT,
            f"{_TIMERS}:Timers._timers": PRESENT,
        }
    ),
    *expected(
        members(f"{_TIMERS}:Timer", ("_start_time", "_active_time", "_elapsed")),
        "2bw: a timer is read without the barriers that would join all stages",
    ),
)
"""Symbols that are called beside those of `evenpipe.megatron.two_bw`."""


class TwoBWLoop:
    """A script's training with 2BW. `args` are Megatron's, `schedule` is the one that its loop is given.

    accepts_one_version: go on from a checkpoint of 2BW whose older weights cannot be had.

    Make it once arguments are known, and apply what it patches::

        training = TwoBWLoop(schedule, args)
        training.patches().apply()

    What Megatron would re-run after a suspicious result is switched off: a stream of batches cannot be wound back.
    """

    def __init__(
        self,
        schedule: StreamSchedule,
        args: Namespace,
        accepts_one_version: bool = False,
        delay_correction: DelayCorrection = "none",
    ) -> None:
        self.args = args
        self._accepts_one_version = accepts_one_version
        self._delay_correction: DelayCorrection = delay_correction
        self._saved_with_2bw: bool | None = None
        self._schedule = schedule
        self._two_bw: TwoBW | None = None
        self._expert_losses: ExpertLosses | None = None
        self._steps: StepLog | None = None
        self._exit: ExitDecision | None = None
        # Its barriers would join all stages in every iteration.
        args.barrier_with_L1_time = False
        if args.rerun_mode != "disabled":
            if args.rank == 0:
                say(
                    f"{schedule.programs.spec.name}: --rerun-mode {args.rerun_mode} is disabled, as a stream of "
                    "batches cannot be run again; a loss that is no number still ends the run"
                )
            args.rerun_mode = "disabled"

    def patches(self) -> PatchSet:
        """Return the patches that give Megatron's training loop two weight versions."""
        series = MEGATRON_CORE.series(RELEASES)
        return PatchSet("2bw", [patch for patch in two_bw_patches(self) if series in patch.versions], CALLED)

    def step_log(self) -> StepLog | None:
        """Return the lines that follow Megatron's log; None before there is an optimizer."""
        return self._steps

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Called by all ranks when Megatron has made model and optimizer, and loaded what was to be loaded."""
        from evenpipe.megatron.two_bw import TwoBWOptimizer
        from evenpipe.megatron.two_bw.expert_losses import ExpertLosses
        from evenpipe.megatron_lm.two_bw.checkpoint import resume
        from evenpipe.two_bw.side_file import SideFileError

        if optimizer is None:
            return  # --skip-train
        if optimizer.is_stub_optimizer:
            raise ValueError(
                f"--evenpipe-schedule {self._schedule.programs.spec.name}: this stage has no parameters to train: "
                "choose another --pipeline-model-parallel-layout, or --evenpipe-schedule 1f1b"
            )
        try:
            takes_over = TwoBWOptimizer(model, optimizer, self._schedule.in_place)
        except UpstreamError as error:
            end_job(str(error))
        if self.args.num_experts is not None:
            self._expert_losses = ExpertLosses()
        self._two_bw = two_bw = self._schedule.attach(takes_over, self._expert_losses, self._delay_correction)
        try:
            resumed = resume(
                self.args, model, two_bw, self._saved_with_2bw, accepts_one_version=self._accepts_one_version
            )
        except SideFileError as error:
            end_job(str(error))
        self._steps = StepLog(
            two_bw, self.args.iteration, say_on_last_rank, say, show_figures, means=True, resumed=resumed
        )
        self._exit = ExitDecision(self.args, two_bw, self._steps.close)

    def check_loaded_args(
        self, original: Callable[..., Any], checkpoint_args: Namespace, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of Megatron's check of the arguments of the run that saved what this one goes on from."""
        from evenpipe.megatron_lm.two_bw.checkpoint import has_two_versions

        self._saved_with_2bw = has_two_versions(checkpoint_args)
        return original(checkpoint_args, *args, **kwargs)

    def sum_expert_losses(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of Megatron's sum of them over all ranks, in every iteration."""
        if self._expert_losses is None:
            return original(*args, **kwargs)
        return self._expert_losses.summed(original, *args, **kwargs)

    def decide_exit(self, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """In place of Megatron's decision whether to stop."""
        decide = functools.partial(original, *args, **kwargs)
        return decide() if self._exit is None else self._exit.made_by(decide)

    def timed(self, original: Callable[..., Any], timer: Any, barrier: bool = False) -> Any:
        """In place of a timer's start or stop, which waits for the whole device; with a barrier, for all ranks too."""
        if barrier:
            self.interrupt()
            return original(timer, barrier)
        with _waiting_for_compute_only():
            return original(timer, barrier)

    def log_timers(
        self, original: Callable[..., None], timers: Any, names: Sequence[str], *args: Any, **given: Any
    ) -> None:
        """In place of a log of timers, which gathers their times from all ranks."""
        if self.args.timing_log_level > 0:
            self.interrupt()
            original(timers, names, *args, **given)
        elif started := [name for name in names if name in timers._timers]:
            original(timers, started, *args, **given)

    def norm_of_parameters(self, original: Callable[..., float], *args: Any, **kwargs: Any) -> float | None:
        """In place of the norm, which is taken in every iteration, and logged in the first and at each interval."""
        iteration = self.args.curr_iteration
        if iteration != self.args.iteration and (iteration + 1) % self.args.log_interval:
            return None
        self.interrupt()
        return original(*args, **kwargs)

    def interrupted(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Interrupt the stream before `original`, in which all ranks wait for each other."""
        self.interrupt()
        return original(*args, **kwargs)

    def interrupt(self) -> None:
        """Called by all ranks before they wait for each other: finish the step, and let go of what is under way.

        A stage that evicts may be amid transfers that its partner would take part in only in its next iteration.
        """
        if self._two_bw is not None:
            self._two_bw.drain()

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """Called by all ranks in the place of Megatron's saving, which is `write`."""
        from evenpipe.megatron_lm.two_bw.checkpoint import save

        if self._two_bw is None or self._exit is None:
            return write()
        self.interrupt()
        with self._exit.with_users_flags():
            return save(iteration, model, self._two_bw, folder, write)


def two_bw_patches(training: Any) -> list[Patch]:
    """Return the patches of every release, without a look at the installed one or at `training`."""
    interrupted = functools.partial(TwoBWLoop.interrupted, training)
    return [
        set_up_patch(
            training, "two-versions", "2bw: the first place that has model and optimizer, with what was loaded"
        ),
        save_patch(training, "2bw: both weight versions are saved, when the submitted step is finished"),
        training_patch(
            "saved-arguments",
            "megatron.training.checkpointing:check_checkpoint_args",
            functools.partial(TwoBWLoop.check_loaded_args, training),
            "2bw: a checkpoint's arguments say whether an older weight version goes with it",
        ),
        training_patch(
            "exit",
            "megatron.training.training:checkpoint_and_decide_exit",
            functools.partial(TwoBWLoop.decide_exit, training),
            "2bw: all ranks are asked in every iteration whether to stop, which joins all stages",
        ),
        training_patch(
            "date",
            "megatron.training.training:print_datetime",
            interrupted,
            "2bw: a barrier before Megatron exits, at which nothing may be under way",
        ),
        training_patch(
            "save-and-time",
            "megatron.training.training:save_checkpoint_and_time",
            interrupted,
            "2bw: before it saves, Megatron waits for the whole device (since 0.17); nothing may be under way then",
        ),
        training_patch(
            "lengths",
            "megatron.training.training:consume_seqlen_stats_in_iteration",
            _lengths_unknown,
            "2bw: lengths of packed sequences are summed over all ranks in every iteration, for the logged throughput",
        ),
        *(
            core_patch(
                name,
                symbol,
                interrupted,
                f"2bw: {what} joins all stages; nothing may be under way then, and weights are the newest",
                signature,
                rebinds=True,
            )
            for name, symbol, what, signature in _JOINING
        ),
        *(
            core_patch(
                f"timer-{name}",
                f"{_TIMERS}:Timer.{name}",
                functools.partial(TwoBWLoop.timed, training),
                "2bw: timers stop, with barriers, before Megatron evaluates or saves; nothing may be under way then; "
                "others wait for the whole device, and so for what is yet to be received",
                "(self, barrier=False)",
            )
            for name in ("start", "stop")
        ),
        *(
            core_patch(
                "experts",
                symbol,
                functools.partial(TwoBWLoop.sum_expert_losses, training),
                "2bw: auxiliary losses of experts are summed over all stages in every iteration, which joins them",
                signatures,
            )
            for symbol, signatures in _EXPERTS.items()
        ),
        # A rank itself says at once what Megatron-LM reduces over all stages in every iteration. The finished step's
        # success, norm and count of zeros come out of one exchange, and the learning rate is the same on all stages (a
        # stage without parameters is refused).
        *(
            training_patch(
                name,
                f"{module}:{function}",
                lambda original, value, group=None: value,
                f"2bw: {what} of the finished step is known on all stages, and asking joins them (0.19 asks the "
                "model's pg_collection.mp: of whatever group, the host waits for the device's answer)",
            )
            # The functions moved when utils became a package.
            for module in ("megatron.training.utils", "megatron.training.utils.common_utils")
            for name, function, what in (("success", _AND, "success"), ("norm", _MAX, "the norm"))
        ),
        core_patch(
            "interval",
            f"{_TIMERS}:Timer.elapsed",
            _without_barrier,
            "2bw: two barriers and a wait for the whole device at each log interval join all stages",
            "(self, reset=True, barrier=False)",
        ),
        *(
            core_patch(
                f"timers-{name}",
                f"{_TIMERS}:Timers.{name}",
                functools.partial(TwoBWLoop.log_timers, training),
                "2bw: times are gathered from all ranks at each log interval, of older releases' timers that were "
                "never started too; nothing may be under way then",
                f"(self, names, {own}, normalizer=1.0, reset=True, barrier=False)",
            )
            for name, own in (("log", "rank=None"), ("write", "writer, iteration"))
        ),
        *(
            training_patch(
                "params-norm",
                f"{module}:calc_params_l2_norm",
                functools.partial(TwoBWLoop.norm_of_parameters, training),
                "2bw: the norm of parameters joins all stages, in every iteration though one is logged",
            )
            for module in ("megatron.training.utils", "megatron.training.utils.common_utils")
        ),
    ]


def _lengths_unknown(original: Callable[..., Any]) -> tuple[None, None]:
    """Return what Megatron does where nothing is packed: it then counts each row as one whole sequence."""
    return None, None


@contextmanager
def _waiting_for_compute_only() -> Iterator[None]:
    import torch

    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = _wait_for_compute
    try:
        yield
    finally:
        torch.cuda.synchronize = synchronize


def _wait_for_compute(device: Any = None) -> None:
    """Wait for this stage's compute, and not for what it is to receive, on streams of its own."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.current_stream(device).synchronize()


def _without_barrier(original: Callable[..., float], timer: Any, reset: bool = True, barrier: bool = False) -> float:
    """A reading that is not to be aligned over ranks is Megatron's own."""
    if not (barrier and timer._started):
        return original(timer, reset, barrier)
    _wait_for_compute()
    now = time.time()
    passed = now - timer._start_time
    timer._start_time = now
    timer._active_time += passed
    total = timer._elapsed + passed
    timer._elapsed = 0.0 if reset else total
    return float(total)
