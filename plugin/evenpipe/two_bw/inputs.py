"""The data iterator of a stage that forwards micro-batches of the next batch, and may have to forward them again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["InputError", "ReadAhead"]

_ENDED: Final = (
    "2bw: the data iterator ended within this batch: give all calls one that goes on without end, or call drain() "
    "before a new one"
)


class InputError(RuntimeError):
    """The data iterator is not as a stream of batches needs it; says so in one line."""


class ReadAhead(Iterator[Any]):
    """Stands before the user's iterator and keeps what has been read of the batch after the present one.

    A forward may read any number of items. Where the iterator ends within the batch ahead, which may never be asked
    for, its last item stands in, and `start_batch` raises InputError if the batch comes. The iterator is the user's to
    keep: a data loader's ends its worker processes when it is let go of, and they must not outlive the training.
    """

    def __init__(self) -> None:
        self._source: Callable[[], Iterator[Any] | None] = _nothing
        self._present = 0  # micro-batches of the present batch that are still to be forwarded
        self._ahead: list[list[Any]] = []  # what each forward of the batch ahead has read
        self._is_ahead = False
        self._again: deque[Any] = deque()
        self._streaming = False
        self._ended = False
        self._last: Any = None

    def start_batch(self, source: Iterator[Any] | None, micro_batches: int) -> None:
        """A batch of so many begins, of which some may have been forwarded; None: this process reads nothing.

        Raises InputError where they must not have been.
        """
        if self._ended:
            raise InputError(_ENDED)
        if source is not self._source():
            if self._ahead:
                raise InputError(
                    f"2bw: this batch was given another data iterator when {len(self._ahead)} micro-batches had been "
                    "read ahead from the one before: give all calls the same, or call drain() before a new one"
                )
            self._again.clear()
            self._source = _weakly(source)
        self._present = micro_batches - len(self._ahead)
        self._ahead = []
        self._streaming = True

    def start_forward(self) -> None:
        """The next reads are for the next micro-batch of the stream, or, outside of one, for anything else."""
        self._is_ahead = self._streaming and self._present == 0
        if self._is_ahead:
            self._ahead.append([])
        elif self._streaming:
            self._present -= 1

    def rewind(self) -> None:
        """The stream has ended with the present batch: items that were read ahead will be read again."""
        self._again.extendleft(item for items in reversed(self._ahead) for item in reversed(items))
        self._ahead = []
        self._is_ahead = self._streaming = self._ended = False

    def standing_before(self, source: Any) -> Any:
        """Return the iterator for an evaluation that was given `source`, which may be the training's."""
        return self if source is not None and source is self._source() else source

    def __next__(self) -> Any:
        source = self._source()
        assert source is not None, "this process reads nothing"
        if self._again:
            item = self._again.popleft()
        else:
            try:
                item = next(source)
            except StopIteration:
                if not self._streaming:
                    raise
                if not self._is_ahead:
                    raise InputError(_ENDED) from None
                self._ended = True
                return self._last
        if self._is_ahead:
            self._ahead[-1].append(item)
        self._last = item
        return item


def _nothing() -> None:
    return None


def _weakly(source: Iterator[Any] | None) -> Callable[[], Iterator[Any] | None]:
    """Return a function that gives `source` as long as its owner keeps it; a built-in iterator is kept here."""
    if source is None:
        return _nothing
    try:
        return weakref.ref(source)
    except TypeError:
        return lambda: source
