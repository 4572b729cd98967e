"""The one error of this room: arguments under which EvenPipe cannot run."""

__all__ = ["ArgumentError"]


class ArgumentError(ValueError):
    """One line: which flags, why they do not go together, what to do."""
