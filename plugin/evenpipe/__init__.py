"""EvenPipe: pipeline parallelism with level memory and fewer bubbles.

`docs/api.md` lists what a program may import, and what stays the same between versions.
"""

__all__ = ["__version__"]

__version__ = "0.2.0"
