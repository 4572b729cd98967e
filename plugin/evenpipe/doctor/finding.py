"""What a check has found."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Verdict", "fine", "noted", "problem", "unseen"]


class Verdict(Enum):
    """How much a finding matters: only a problem makes ``evenpipe doctor`` fail."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"
    UNSEEN = "not looked at"


class Finding(NamedTuple):
    """``said`` is one line; ``remedy`` what to do about it, which a problem always has."""

    check: str
    verdict: Verdict
    said: str
    remedy: str | None = None


def fine(check: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.FINE, said)


def noted(check: str, said: str, remedy: str | None = None) -> Finding:
    """Worth knowing; a run can go well with it."""
    return Finding(check, Verdict.NOTE, said, remedy)


def problem(check: str, said: str, remedy: str) -> Finding:
    """A run would fail, hang or be slow."""
    return Finding(check, Verdict.PROBLEM, said, remedy)


def unseen(check: str, why: str) -> Finding:
    """Could not be looked at, and why."""
    return Finding(check, Verdict.UNSEEN, why)
