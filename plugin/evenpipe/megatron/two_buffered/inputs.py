"""Inputs that were read ahead can be read again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["ReadAhead"]


class ReadAhead:
    """The data iterator of a stage that forwards micro-batches of the next batch, and may have to forward them again.

    Keeps what each micro-batch has read until its batch is done. Where the source ends within the batch ahead, which
    may never be asked for, that is forwarded with the last input there was, and `start_batch` raises if it comes.
    """

    def __init__(self) -> None:
        self._source: Iterator[Any] = iter(())
        self._read: dict[int, list[Any]] = {}
        self._again: deque[Any] = deque()
        self._reader: list[Any] = []
        self._ahead = False
        self._made_up: int | None = None
        self._micro_batch = 0
        self._last: Any = None

    def start_batch(self, source: Iterator[Any] | None, first: int) -> ReadAhead | None:
        """Go on with `source`, at micro-batch `first`; None where this process reads nothing."""
        if self._made_up is not None:
            raise RuntimeError(f"the data ended before micro-batch {self._made_up} of the run: give the iterator more")
        for micro_batch in [number for number in self._read if number < first]:
            del self._read[micro_batch]
        if source is None:
            return None
        self._source = source
        return self

    def start_forward(self, micro_batch: int, ahead: bool) -> None:
        """What is read next is for `micro_batch`; `ahead`: of the batch after the present one."""
        self._reader = self._read[micro_batch] = []
        self._ahead = ahead
        self._micro_batch = micro_batch

    def rewind(self, first: int) -> None:
        """What has been read for micro-batch `first` and those after it will be read again, from micro-batch 0 on."""
        ahead = sorted((number for number in self._read if number >= first), reverse=True)
        self._again.extendleft(item for number in ahead for item in reversed(self._read[number]))
        self._read.clear()
        self._made_up = None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._again:
            item = self._again.popleft()
        else:
            try:
                item = next(self._source)
            except StopIteration:
                if not self._ahead or self._last is None:
                    raise
                self._made_up = self._micro_batch if self._made_up is None else self._made_up
                return self._last
        self._last = item
        self._reader.append(item)
        return item
