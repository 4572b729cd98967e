"""EvenPipe: pipeline parallelism with level memory and fewer bubbles.

`docs/api.md` lists what a program may import, and what stays the same between versions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenpipe.fitting import fit

__all__ = ["__version__", "fit"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import `fit` when it is first asked for: it needs the planner, which a run that trains does not."""
    if name != "fit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evenpipe.fitting import fit

    return fit
