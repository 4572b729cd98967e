"""The data iterator of a stage that reads micro-batches of the next batch, and may have to read them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["InputError", "ReadAhead"]

_ENDED = (
    "2bw: the data iterator ended within this batch: give all calls one that goes on, such as "
    "deepspeed.utils.RepeatingLoader, or call engine.drain() before a new one"
)


class InputError(Exception):
    """The data iterator is not as a stream of batches needs it; says so in one line."""


class ReadAhead:
    """Stands before the user's iterator and keeps what has been read of the batch after the present one.

    Where the iterator ends within that batch, which may never be asked for, its last item stands in, and `start_batch`
    raises InputError if the batch comes.
    """

    def __init__(self) -> None:
        self._source: Iterator[Any] | None = None
        self._present = 0  # micro-batches of the present batch that are still to be read
        self._ahead: deque[Any] = deque()
        self._again: deque[Any] = deque()
        self._streaming = False
        self._ended = False
        self._last: Any = None

    def start_batch(self, source: Iterator[Any] | None, micro_batches: int) -> None:
        """A batch of so many begins, of which some may have been read. Raises InputError where they must not be."""
        if self._ended:
            raise InputError(_ENDED)
        if source is not self._source:
            if self._ahead:
                raise InputError(
                    f"2bw: train_batch was given another data iterator when {len(self._ahead)} micro-batches had been "
                    "read ahead from the one before: give all calls the same, or call engine.drain() before a new one"
                )
            self._again.clear()
            self._source = source
        self._present = micro_batches - len(self._ahead)
        self._ahead.clear()
        self._streaming = True

    def rewind(self) -> None:
        """The stream has ended with the present batch: what has been read ahead will be read again."""
        self._again.extendleft(reversed(self._ahead))
        self._ahead.clear()
        self._streaming = self._ended = False

    def read(self, source: Iterator[Any]) -> Any:
        """The next item of `source`: training's, or whatever an evaluation reads from."""
        if source is not self._source:
            return next(source)
        ahead = self._streaming and self._present == 0
        if self._again:
            item = self._again.popleft()
        else:
            try:
                item = next(source)
            except StopIteration:
                if not self._streaming:
                    raise
                if not ahead:
                    raise InputError(_ENDED) from None
                self._ended = True
                return self._last
        if ahead:
            self._ahead.append(item)
        elif self._streaming:
            self._present -= 1
        self._last = item
        return item
