"""What is said when a model cannot be had."""

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model cannot be had; the message is one line that names what was asked for and what to do."""
