"""Values that options take, checked while they are parsed, and the files that they name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from evenpipe.cli.parser import STANDARD_OUTPUT, UsageError
from evenpipe.order_search.costs import RunCosts
from evenpipe.report.files import check_writable, is_special
from evenpipe.schedule import ScheduleError

__all__ = [
    "above_zero",
    "bandwidth_gbps",
    "costs_file",
    "duration_ms",
    "durations_ms",
    "gibibytes",
    "group_size",
    "mebibytes",
    "output_file",
    "picture_file",
    "positive",
    "sample_count",
    "seconds",
    "seed",
    "whole",
    "write",
]

_MOST: Final = 10**9
_MOST_SAMPLES: Final = 100_000


def duration_ms(text: str) -> float:
    """Return a finite number of milliseconds, at least 0."""
    value = _number(text, "milliseconds", "2.5")
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no duration; give a finite number of milliseconds, at least 0")
    return value


def durations_ms(text: str) -> tuple[float, ...]:
    """One duration, or several separated by commas."""
    return tuple(duration_ms(part.strip()) for part in text.split(","))


def positive(text: str) -> int:
    """Return a whole number of at least 1, and at most 10⁹, beyond which nothing here is meant."""
    return _whole(text, _MOST)


def sample_count(text: str) -> int:
    """Return the samples of an iteration, at most 100,000: more would take a search minutes, and no run has so many."""
    return _whole(text, _MOST_SAMPLES)


def _whole(text: str, most: int) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    if len(text.lstrip("0")) > 10 or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text} is more than {most:,}: give less")
    return int(text)


def group_size(text: str) -> int:
    """Return a whole number; what the schedule needs of it, the schedule says."""
    if text == "auto":
        raise argparse.ArgumentTypeError("auto is chosen in a run, by `evenpipe train` or a script; give a number")
    return whole(text)


def whole(text: str) -> int:
    """Return a whole number, also one that is too small, which who uses it says."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one such as 2") from None


def gibibytes(text: str) -> float:
    """Return a number of GiB above 0, up to 2**30, which is more than any machine has."""
    value = _above_zero(text, "amount of memory", "GiB", "79.5")
    if value > 2**30:
        raise argparse.ArgumentTypeError(f"{text} is no amount of memory; give GiB, such as 79.5")
    return value


def mebibytes(text: str) -> float:
    """Return a size in MiB, above zero."""
    return _above_zero(text, "size", "MiB", "512")


def seconds(text: str) -> float:
    """Return a number of seconds above 0, up to a day."""
    value = _above_zero(text, "time", "seconds", "10")
    if value > 86_400:
        raise argparse.ArgumentTypeError(f"{text} is more than a day: give seconds, such as 10")
    return value


def seed(text: str) -> int:
    """Return a whole number below 2**32."""
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number below 4294967296, such as 0")
    return int(text)


def costs_file(text: str) -> RunCosts:
    """Return the document ``evenpipe.costs/1`` of that name."""
    try:
        return RunCosts.read(Path(text))
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("costs=")) from None


def above_zero(text: str) -> float:
    """Return a finite number of bytes a millisecond above 0."""
    return _above_zero(text, "speed", "bytes a millisecond", "5e7")


def bandwidth_gbps(text: str) -> float:
    """Return a finite number of 10^9 bytes/s above 0."""
    return _above_zero(text, "bandwidth", "GB/s", "31.5")


def _above_zero(text: str, what: str, unit: str, example: str) -> float:
    value = _number(text, unit, example)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no {what}; give a finite number of {unit} above 0")
    return value


def _number(text: str, unit: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give {unit}, such as {example}") from None


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; ``-`` is standard output."""
    if not text:
        raise argparse.ArgumentTypeError("names no file: give one")
    path = STANDARD_OUTPUT if text == "-" else Path(text)
    if (obstacle := check_writable(path)) is not None:
        raise argparse.ArgumentTypeError(f"{text}: {obstacle}")
    return path


def picture_file(text: str) -> Path:
    """Return an output file whose name says that it is a PNG, or one that is no regular file."""
    path = output_file(text)
    if not text.lower().endswith(".png") and not is_special(path):
        raise argparse.ArgumentTypeError(f"{text}: pictures are PNG; give a name that ends with .png")
    return path


def write(option: str, path: Path | None, made_by: Callable[[Path], None]) -> None:
    """Have the file that `option` asks for, if it does, `made_by` a function; UsageError where it cannot be written."""
    if path is None:
        return
    try:
        made_by(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}; choose a path that can be written") from error
