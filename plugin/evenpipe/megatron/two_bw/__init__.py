"""2BW in Megatron: two weight versions, steps finished one iteration later, and a schedule that does not flush."""

from evenpipe.megatron.two_bw.optimizer import TwoBWOptimizer
from evenpipe.megatron.two_bw.stream_schedule import StreamSchedule

__all__ = ["StreamSchedule", "TwoBWOptimizer"]
