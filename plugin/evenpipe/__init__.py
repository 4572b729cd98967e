"""EvenPipe: pipeline parallelism with level memory and fewer bubbles."""

__version__ = "0.1.0"
