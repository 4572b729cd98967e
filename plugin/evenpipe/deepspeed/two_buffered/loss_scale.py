"""fp16: a batch keeps the loss scale that it began with until its step, while the scaler learns of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LossScale"]


class LossScale:
    """The loss scale of DeepSpeed's `optimizer`.

    A step is finished in the middle of the next batch, on each stage at another micro-batch. So what comes of it is
    for the batch after that one, whether or not the stream is drained in between: all stages agree, and runs do too.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._submitted: float = 1.0
        self._to_learn: deque[tuple[int, bool]] = deque()  # batches, and whether their steps were skipped

    def start_batch(self, batch: int) -> None:
        """The call of `batch` begins, or could: the scaler learns of what came two batches before, and earlier."""
        while self._to_learn and self._to_learn[0][0] <= batch - 2:
            self._optimizer._update_scale(self._to_learn.popleft()[1])

    def submit(self) -> None:
        """The losses of the batch that is submitted were multiplied by the present scale."""
        self._submitted = self._optimizer.loss_scale

    @contextmanager
    def as_submitted(self, batch: int) -> Iterator[None]:
        """Inside, the scale is that of `batch`, whose step is finished there."""
        optimizer = self._optimizer
        present, optimizer.loss_scale = optimizer.loss_scale, self._submitted
        # Learnt later. And DeepSpeed would divide the gradients by the next scale in a step that makes it grow.
        optimizer._update_scale = lambda overflow: None
        try:
            yield
        finally:
            del optimizer._update_scale
            optimizer.loss_scale = present
        self._to_learn.append((batch, optimizer.overflow))

    def restart(self, batch: int, skipped: bool) -> None:
        """Go on with `batch` from a checkpoint, before which the last step was made or `skipped`."""
        self._to_learn.clear()
        if batch > 0:
            self._to_learn.append((batch - 1, skipped))
