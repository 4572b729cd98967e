"""Carries looks out, each within a time limit: none of them can hold up the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evenpipe.doctor.finding import Finding, problem

__all__ = ["Look", "look_at"]


@dataclass(frozen=True)
class Look:
    """One check; ``find`` may block, in which case what it waits for is the finding: ``waits_for``, and ``remedy``."""

    check: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = 10.0
    waits_for: str = "the system"
    remedy: str = "find out why it does not answer (dmesg, the machine's own monitoring)"


def look_at(looks: Sequence[Look]) -> tuple[list[Finding], bool]:
    """The findings of all, in order; and whether one is still waiting, in a thread that only the process' end ends."""
    found: list[Finding] = []
    waiting = False
    for look in looks:
        those = _within(look)
        waiting |= those is None
        late = f"no answer from {look.waits_for} within {look.seconds:g} s"
        found += [problem(look.check, late, look.remedy)] if those is None else those
    return found, waiting


def _within(look: Look) -> list[Finding] | None:
    found: list[Finding] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.extend(look.find())
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            found.append(problem(look.check, f"cannot be looked at: {said}", look.remedy))
        done.set()

    threading.Thread(target=run, daemon=True, name=f"doctor {look.check}").start()
    return found if done.wait(look.seconds) else None
