"""64 stages and 4096 micro-batches: built once, for whoever asks how long such a pipeline takes."""

from __future__ import annotations

from functools import cache
from time import process_time
from typing import NamedTuple

from evenpipe.schedule import Schedule
from tests.schedules import build

__all__ = ["built"]


class Built(NamedTuple):
    """A schedule, and the seconds of processor time that it took to build and verify."""

    schedule: Schedule
    seconds: float


@cache
def built() -> Built:
    """1F1B with BPipe. Clear the cache when done: half a million actions slow the cycle collector down."""
    start = process_time()
    schedule = build("1f1b", 64, 4096, bpipe=True)
    return Built(schedule, process_time() - start)
