"""Decisions as lines for people."""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.tuner.tuner import Retune

__all__ = ["Teller"]


class Teller:
    """Says of each decision what it is in place of; `before` is the (k, b) that is used until the first."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.before: tuple[int, int] | None = None
        self._say = say

    def retuned(self, retune: Retune, seconds: float) -> None:
        """`seconds` is how long it took."""
        now, before = (retune.k, retune.b), self.before
        was = "" if before is None else " (as before)" if before == now else f" (was k={before[0]}, b={before[1]})"
        estimates = ", ".join(f"{name} {ms:,.{1 if ms < 100 else 0}f} ms" for name, ms in retune.estimates_ms.items())
        self._say(
            f"iteration {retune.iteration + 1}: k={retune.k}, b={retune.b}{was}; estimates: {estimates}; "
            f"links measured in {seconds:.1f} s"
        )
        self.before = now
