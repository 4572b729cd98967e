"""2BW without a framework: steps finished one batch later, a stream of batches, and what a checkpoint needs of both."""

from evenpipe.delayed.inputs import InputError, ReadAhead
from evenpipe.delayed.log import StepLog
from evenpipe.delayed.loss_scale import LossScale
from evenpipe.delayed.steps import DelayedSteps, Outcome, StepResult
from evenpipe.delayed.stream import DelayedStream

__all__ = [
    "DelayedSteps",
    "DelayedStream",
    "InputError",
    "LossScale",
    "Outcome",
    "ReadAhead",
    "StepLog",
    "StepResult",
]
