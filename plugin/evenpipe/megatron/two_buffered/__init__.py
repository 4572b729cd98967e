"""2BW in Megatron: two weight versions, steps finished one iteration later, and a schedule that does not flush."""

from evenpipe.megatron.two_buffered.optimizer import TwoBuffered
from evenpipe.megatron.two_buffered.stream_schedule import StreamSchedule

__all__ = ["StreamSchedule", "TwoBuffered"]
