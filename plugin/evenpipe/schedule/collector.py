"""Keep Python's cycle collector out of the way while schedules are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_cycle_collector"]


@contextmanager
def without_cycle_collector() -> Iterator[None]:
    """Pause it: schedules are millions of tuples without cycles, and walking them takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
