"""The schedules that benchmarks of training compare, each put in Megatron's place for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
from evenpipe.megatron.train_engine.learner import Learner
from evenpipe.megatron.two_bw import StreamSchedule, TwoBWOptimizer
from evenpipe.upstream import PatchSet

__all__ = ["installed", "patches_for"]


def patches_for(schedule: str, learner: Learner) -> PatchSet:
    """What has EvenPipe's `schedule` train `learner`; call it once for a learner."""
    if schedule != "2bw":
        return in_place_of_megatron(PipelineSchedule(schedule))
    stream = StreamSchedule()
    optimizer = TwoBWOptimizer(learner.replica.chunks, learner.optimizer)
    stream.attach(optimizer, delay_correction=learner.options.delay_correction)
    return in_place_of_megatron(stream)


@contextmanager
def installed(patches: PatchSet | None) -> Iterator[None]:
    """`patches`, if any, applied inside."""
    if patches is None:
        yield
        return
    patches.apply()
    yield
    patches.revert()
