"""How long each node's forward and backward take: computed for a device that is named, or measured on this one."""

from evenpipe.partition.timing.measured import Measured
from evenpipe.partition.timing.roofline import Roofline, RooflineError
from evenpipe.partition.timing.source import NodeTimes, TimeSource

__all__ = ["Measured", "NodeTimes", "Roofline", "RooflineError", "TimeSource"]
