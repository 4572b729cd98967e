"""Findings, and checks that make them, each within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Check", "Finding", "Reported", "Verdict", "by_finding", "fine", "noted", "problem", "run_checks", "unseen"]


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


class Reported(NamedTuple):
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def by_finding(by_rank: Mapping[int, Sequence[Finding]]) -> list[Reported]:
    """Return each finding once, with all ranks that have it; checks stay in the order of their first appearance."""
    ranks: dict[Finding, dict[int, None]] = {}
    for rank, findings in sorted(by_rank.items()):
        for finding in findings:
            ranks.setdefault(finding, {})[rank] = None
    checks = list(dict.fromkeys(finding.check for finding in ranks))
    reported = (Reported(finding, tuple(on)) for finding, on in ranks.items())
    return sorted(reported, key=lambda each: checks.index(each.finding.check))


@dataclass(frozen=True)
class Check:
    """One check; ``find`` may block, in which case what it waits for is the finding: ``waits_for``, and ``remedy``."""

    name: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = 10.0
    waits_for: str = "the system"
    remedy: str = "find out why it does not answer (dmesg, the machine's own monitoring)"


def run_checks(checks: Sequence[Check]) -> tuple[list[Finding], bool]:
    """The findings of all, in order; and whether one is still waiting, in a thread that only the process' end ends."""
    found: list[Finding] = []
    waiting = False
    for check in checks:
        those = _within(check)
        waiting |= those is None
        late = f"no answer from {check.waits_for} within {check.seconds:g} s"
        found += [problem(check.name, late, check.remedy)] if those is None else those
    return found, waiting


def _within(check: Check) -> list[Finding] | None:
    found: list[Finding] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.extend(check.find())
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            found.append(problem(check.name, f"cannot be looked at: {said}", check.remedy))
        done.set()

    threading.Thread(target=run, daemon=True, name=f"doctor {check.name}").start()
    return found if done.wait(check.seconds) else None
