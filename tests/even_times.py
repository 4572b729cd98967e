"""Times that this machine did not measure, for tests of what a run does with a searched order, and not of when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenpipe.simulate.searched import searched
from evenpipe.tuner import searching

__all__ = ["even_times"]

_MS = dict.fromkeys(("forward_ms", "input_gradient_ms", "weight_gradient_ms"), 2.0)


@contextmanager
def even_times(units: float = 3.4, link: str = "peer_bytes_per_ms") -> Iterator[None]:
    """Have a run search for stages that take the same, and that hold so many micro-batches.

    Others leave by the `link`, of those that the run has measured, each in the time of a forward.
    """

    def of_even_times(costs: Any, *size: Any, **more: Any) -> Any:
        assert getattr(costs, link) > 0
        parts = [part.model_copy(update=_MS | {"recomputed_bytes": None}) for part in costs.parts]
        caps = [int(units * part.saved_bytes) for part in parts]
        given = {"parts": parts, "message_ms": 0.6, "memory_bytes": caps}
        speeds = {"peer_bytes_per_ms": None, "host_bytes_per_ms": None, link: parts[0].saved_bytes / 2}
        return searched(costs.model_copy(update=given | speeds), *size, **more)

    searching.searched = of_even_times  # type: ignore[attr-defined]
    try:
        yield
    finally:
        searching.searched = searched  # type: ignore[attr-defined]
