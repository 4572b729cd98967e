"""The hint after an unknown name: the known one that is most like it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` if one of the known names is close, else all of them.

    The cutoff is a similarity from 0 to 1, as :func:`difflib.get_close_matches` has it; upper and lower case are alike.
    """
    known = list(known)
    folded = {one.casefold(): one for one in reversed(known)}  # 1F1B is 1f1b
    close = get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return f"did you mean {folded[close[0]]}?" if close else f"choose one of {', '.join(known)}"
