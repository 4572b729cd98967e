"""Values that options take, checked while they are parsed."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

__all__ = [
    "bandwidth_gbps",
    "duration_ms",
    "durations_ms",
    "gibibytes",
    "group_size",
    "output_file",
    "picture_file",
    "positive",
]


def duration_ms(text: str) -> float:
    """A finite number of milliseconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give milliseconds, such as 2.5") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no duration; give a finite number of milliseconds, at least 0")
    return value


def durations_ms(text: str) -> tuple[float, ...]:
    """One duration, or several separated by commas."""
    return tuple(duration_ms(part.strip()) for part in text.split(","))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def group_size(text: str) -> int:
    """A whole number; what the schedule needs of it, the schedule says."""
    if text == "auto":
        raise argparse.ArgumentTypeError("auto is chosen in a run, by `evenpipe train` or a script; give a number")
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one such as 2") from None


def gibibytes(text: str) -> float:
    """A finite number of GiB above 0."""
    return _above_zero(text, "amount of memory", "GiB", "79.5")


def bandwidth_gbps(text: str) -> float:
    """A finite number of 10^9 bytes/s above 0."""
    return _above_zero(text, "bandwidth", "GB/s", "31.5")


def _above_zero(text: str, what: str, unit: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give {unit}, such as {example}") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no {what}; give a finite number of {unit} above 0")
    return value


def output_file(text: str) -> Path:
    """A path at which a file can be written, found out before any work is done."""
    path = Path(text)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}; create it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the name of a file in it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: folder {folder} cannot be written; choose another")
    return path


def picture_file(text: str) -> Path:
    """An output file whose name says that it is a PNG."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text}: pictures are PNG; give a name that ends with .png")
    return output_file(text)
