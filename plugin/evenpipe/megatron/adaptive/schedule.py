"""A forward-backward function for megatron-core whose group size k and micro-batch size b are chosen while training."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from evenpipe.megatron.adaptive.static_memory import workspace_bytes
from evenpipe.megatron.grad_sync import without_sync
from evenpipe.megatron.random_numbers import random_numbers_kept
from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.megatron.stage import Batch, MegatronStage
from evenpipe.megatron.symbols import LOGGED_LOSSES
from evenpipe.megatron.unsupported import refuse_unsupported
from evenpipe.planner.divisors import divisors
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.schedule import Need, Schedule, Spec
from evenpipe.tuner.dry_run import DryRun
from evenpipe.tuner.group_memory import Measured
from evenpipe.tuner.grouped import GroupedSchedule
from evenpipe.tuner.links import fits_on_all
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.process_memory import Room
from evenpipe.tuner.samples import loader_of, micro_batches_of
from evenpipe.upstream.symbols import locate, module_of

__all__ = ["AdaptiveSchedule", "Tuning"]


class Tuning(NamedTuple):
    """The memory limits, allowed sizes and callbacks that a tuned run is given.

    `limit_bytes` is the memory of every process, and `static_bytes` what this one needs besides activations and links,
    asked once. `interval`: iterations between decisions; None: so many as take an hour. `sizes` is given the loader's
    micro-batches of the first batch (none where this process loads nothing) and their size, and returns the sizes that
    micro-batches may have, None for all; the same on all ranks. `differ`: what micro-batches of a size save is not the
    same, as with packed sequences (experts and lengths that vary are known). `around_batch` is entered with the size
    while a batch is carried out. On all ranks, `log` is given a line for every decision, and `resumed` whether a state
    that was loaded is gone on with.
    """

    limit_bytes: int
    static_bytes: Callable[[], int]
    interval: int | None = None
    sizes: Callable[[Sequence[Any], int], Sequence[int] | None] = lambda loaded, size: None
    differ: bool = False
    around_batch: Callable[[int], AbstractContextManager[Any]] = nullcontext
    log: Callable[[str], None] = lambda line: None
    resumed: Callable[[bool], None] = lambda goes_on: None

    def room(self, executor: Executor) -> Room:
        """Return the limit, and what of it this process holds besides activations and messages."""
        static_bytes = self.static_bytes() + workspace_bytes() + executor.connections.device_bytes
        return Room(self.limit_bytes, static_bytes)


class AdaptiveSchedule(PipelineSchedule):
    """A `PipelineSchedule`, with groups, that cuts each batch into micro-batches of the chosen size.

    The batch has the same samples in the same order under every candidate. Before the first batch every stage rehearses
    alone what its micro-batches take and save; candidates that do not fit are left out, and never run. Between two
    batches, where nothing is under way, all ranks measure their links and rank 0 decides. Where micro-batches differ in
    what they save the largest one so far counts, and each batch is looked at; where their lengths vary, samples are not
    cut anew, and only k is chosen.

    A call raises PlanError, before anything is carried out, where no candidate fits. `iteration` is the number of the
    next batch, from 0; who loads a checkpoint sets it. `tuning` may be replaced before the first batch. `loop` is what
    decides, and `micro_batch_size` the last batch's.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(["groups"])

    def __init__(
        self,
        tuning: Tuning,
        bpipe: bool = False,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        schedule: str | Spec = "kfkb",
    ) -> None:
        super().__init__(schedule, bpipe, observer, measure, connected)
        self.tuning = tuning
        self.iteration = 0
        self.loop = AdaptiveLoop(tuning.interval, tuning.log, tuning.resumed, alone=True)
        self.micro_batch_size = 0
        self._sizes: list[int] = []

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to go on as this one would, as JSON has it; None before a batch.

        It is the same on all ranks.
        """
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch. Where the state is of other batches, memory or limits, candidates are found anew."""
        self.loop.load_state_dict(state)

    def _train(self, **arguments: Any) -> list[Any]:
        call = self._call(**arguments)
        config = call.batch.config
        refuse_unsupported(config, self.bpipe, (), self._sizes_differ(config))
        executor = self._executor(call.pipeline, call.batch)
        if not self.loop.explored or (
            self.loop.due(self.iteration) and self._sizes_of((), arguments, config) != self._sizes
        ):
            arguments = self._measured(arguments, call, executor)
        chosen = self.loop.choose(executor, self.iteration, _samples(arguments))
        if self.micro_batch_size != chosen.b:
            self.micro_batch_size = chosen.b
            executor.forget_sizes()
        self.group_size = chosen.k
        with self.tuning.around_batch(chosen.b):
            losses = super()._train(**_in_micro_batches_of(chosen.b, arguments))
        if self._sizes_differ(config):
            most = executor.counter.largest_saved, executor.counter.largest_sent
            self.loop.note(Measured(0, 0, most[0], 0, most[1], workspace_bytes(), 0), executor, self.iteration)
        self.iteration += 1
        return losses

    def _weighs(self, batch: Batch) -> bool:
        return self._sizes_differ(batch.config)

    def _sizes_differ(self, config: Any) -> bool:
        return self.tuning.differ or super()._sizes_differ(config)

    def _sizes_of(self, loaded: Sequence[Any], arguments: Mapping[str, Any], config: Any) -> list[int]:
        sizes = self.tuning.sizes(loaded, given := arguments["micro_batch_size"])
        if config.variable_seq_lengths:
            return [given]
        return divisors(_samples(arguments)) if sizes is None else list(sizes)

    def _measured(self, arguments: dict[str, Any], call: Call, executor: Executor) -> dict[str, Any]:
        """Have the loop learn of all sizes that matter; the arguments, with what was read for it read again."""
        source = loader_of(arguments["data_iterator"])
        limit_bytes = self.tuning.limit_bytes
        static_bytes = self.tuning.static_bytes() + executor.connections.device_bytes
        loaded = [] if source is None else list(itertools.islice(source, arguments["num_microbatches"]))
        rehearsed = arguments | {"data_iterator": None if source is None else itertools.cycle(loaded)}
        self._sizes = self._sizes_of(loaded, arguments, call.batch.config)
        dry_run = DryRun(
            executor,
            call.pipeline.size(),
            self._weights(list(call.batch.model)),
            fits=lambda nbytes: fits_on_all(static_bytes + nbytes, limit_bytes, executor.device),
        )
        schedule = GroupedSchedule(self.programs, call.pipeline.size())
        with _without_a_trace(call, executor.device):
            differ = self._sizes_differ(call.batch.config)
            self.loop.start(schedule, _samples(arguments), self._sizes, limit_bytes, differ)
            while (size := self.loop.wanted) is not None:
                with self.tuning.around_batch(size):
                    measured = self._rehearsed(dry_run, self._call(**_in_micro_batches_of(size, rehearsed)), executor)
                self.loop.take(measured._replace(static_bytes=static_bytes), executor, self.iteration)
        return arguments if source is None else arguments | {"data_iterator": itertools.chain(loaded, source)}

    def _rehearsed(self, dry_run: DryRun, call: Call, executor: Executor) -> Measured:
        def stage(schedule: Schedule) -> MegatronStage:
            return MegatronStage(call.batch, schedule, call.pipeline.rank(), executor.device, self._release)

        different = call.batch.num_microbatches if self._sizes_differ(call.batch.config) else 0
        return dry_run.measured(stage, workspace_bytes, different)


@contextmanager
def _without_a_trace(call: Call, device: torch.device) -> Iterator[None]:
    """Afterwards gradients are zero, and random numbers go on as if nothing had been drawn; nothing is logged.

    Buffers are as before: routers count in theirs what the experts' bias, or a loss of the whole batch, goes by.
    """
    chunks: Sequence[Any] = call.batch.model
    parallel_state.get_global_memory_buffer().buffer.clear()  # it grows, but never shrinks
    before = [(buffer, buffer.clone()) for chunk in chunks for buffer in chunk.module.buffers()]
    with random_numbers_kept(device), without_sync(call.batch.config):
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    clear_aux_losses_tracker()
    for symbol in LOGGED_LOSSES:
        # A release may not have the module, and a model not use it.
        if module_of(symbol) in sys.modules and "values" in (sums := locate(symbol).value):
            sums["values"].zero_()


def _samples(arguments: Mapping[str, Any]) -> int:
    """In the batch, of this replica."""
    return int(arguments["micro_batch_size"] * arguments["num_microbatches"])


def _in_micro_batches_of(size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the same samples in micro-batches of `size`, which divides the batch."""
    return {
        **arguments,
        "micro_batch_size": size,
        "num_microbatches": _samples(arguments) // size,
        "data_iterator": micro_batches_of(size, arguments["micro_batch_size"], loader_of(arguments["data_iterator"])),
    }
