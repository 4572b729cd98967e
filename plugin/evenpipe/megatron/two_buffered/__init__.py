"""2BW in Megatron: two weight versions, steps finished one iteration later, and a schedule that does not flush."""

from evenpipe.megatron.two_buffered.schedule import StreamSchedule
from evenpipe.megatron.two_buffered.step import StepResult, TwoBuffered

__all__ = ["StepResult", "StreamSchedule", "TwoBuffered"]
