"""What goes wrong with a run that is planned: one line that names the argument and the remedy."""

from __future__ import annotations

__all__ = ["EstimateError"]


class EstimateError(ValueError):
    """The run cannot be: its sizes do not divide, or the cluster or the framework has not what it asks for."""
