"""What is said when stages cannot be written or read."""

__all__ = ["StageCodeError"]


class StageCodeError(ValueError):
    """A stage's code cannot be written or read; the message is one line that names the file and what to do."""
