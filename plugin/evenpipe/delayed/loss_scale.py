"""fp16: a batch keeps the loss scale that it began with until its step, while the scaler learns of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LossScale"]


class LossScale:
    """The loss scale of each batch under way; `read` gives the scaler's, `learn` says whether a batch overflowed.

    A step is finished in the middle of the next batch, on each stage at another micro-batch. So what comes of it is for
    the batch after that one, whether or not the stream is drained in between: all stages agree, and so do runs with
    evaluations, saves and resumes.
    """

    def __init__(self, read: Callable[[], Any], learn: Callable[[bool], object]) -> None:
        self._read = read
        self._learn = learn
        self._outcomes: deque[tuple[int, bool]] = deque()  # batches that the scaler has not learnt of, in order
        #: The scale of the batch whose losses are being computed, and of that whose step is to come.
        self.present: Any = 1.0
        self.submitted: Any = 1.0

    @property
    def unlearnt(self) -> list[bool]:
        """Whether the batches overflowed that the scaler has not learnt of: after `drain`, the last one at most."""
        return [overflow for _, overflow in self._outcomes]

    def start_batch(self, batch: int) -> None:
        """The call of `batch` begins, or could: the scaler learns of what came two batches before, and earlier."""
        while self._outcomes and self._outcomes[0][0] <= batch - 2:
            self._learn(self._outcomes.popleft()[1])
        self.present = self._read()

    def submit(self) -> None:
        """The batch ends whose losses were multiplied by the present scale."""
        self.submitted = self.present

    def step_ended(self, batch: int, overflow: bool) -> None:
        """The step of `batch` was made, or skipped since it had a value that is not finite."""
        self._outcomes.append((batch, overflow))

    def restart(self, batch: int, unlearnt: Sequence[bool]) -> None:
        """Go on with `batch` from a checkpoint, whose scaler has not learnt of the batches right before it."""
        self._outcomes = deque(zip(range(batch - len(unlearnt), batch), unlearnt, strict=True))
