"""The one error of this room: an upstream that is not what EvenPipe was written against."""

__all__ = ["UpstreamError"]


class UpstreamError(RuntimeError):
    """An upstream package differs from what was recorded; one line: symbol, found, expected, what to do."""
