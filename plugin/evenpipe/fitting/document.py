"""The document of answers to a run, as a command prints it and a program gets it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from evenpipe.fitting.answers import Answers
from evenpipe.planner.run import Run
from evenpipe.planner.search.search import EQUAL, Planned

__all__ = ["NOTHING_TO_GAIN", "SAME_BITS", "TITLES", "Answer", "Fit", "FitError", "Found", "gaining", "settings_of_run"]

Written = TypeVar("Written", bound=Hashable)

#: What an answer is, by its name, in the order in which they are shown.
TITLES: Final = MappingProxyType(
    {
        "least": "least change that fits",
        "stock": "fastest with Megatron's schedules",
        "evenpipe": "fastest with EvenPipe's",
        "sized": "fastest with the same t, p, c and e",
        "narrower": "fastest with fewer bits",
    }
)
NOTHING_TO_GAIN: Final = "nothing to gain: no other run that fits is faster by more than 2 %"
#: Aspects whose changes leave every bit of losses and weights as it was.
SAME_BITS: Final = frozenset(("allocator", "offload", "overlap", "recompute", "schedule"))


class FitError(ValueError):
    """A run that cannot be read or answered; the message is one line: what was wrong, and the remedy."""


class Answer(BaseModel):
    """One answer: what it needs and takes, whether losses stay, and what it changes.

    names: of the answer, or of several that are the same. memory_gib: of the fullest stage. warnings: of memory.
    added, removed: flags and variables, or the keys of a configuration; ``command``: the whole line; of settings, the
    flags that say the same. changes: Megatron's arguments by name, or the fields of a provider, or the keys of a
    configuration of DeepSpeed's, with their new values. environment: variables to set. evenpipe: arguments of
    `PipelineSchedule` or of Bridge's callback, or the section; empty under the framework's own schedule.
    """

    names: list[str]
    memory_gib: float
    iteration_ms: float
    tokens_per_second_per_gpu: float
    uncertainty: dict[str, float | str | None]
    loss: str
    warnings: list[str]
    added: list[str]
    removed: list[str]
    command: list[str]
    changes: dict[str, Any]
    environment: dict[str, str]
    evenpipe: dict[str, Any]


class Fit(BaseModel):
    """The document of ``evenpipe fit --json``. now: an ``evenpipe.estimate/1`` of the run as it is."""

    format: Literal["evenpipe.fit/1"] = "evenpipe.fit/1"
    now: dict[str, Any]
    answers: list[Answer]
    notes: list[str]

    def answer(self, name: str | None = None) -> Answer | None:
        """Return the answer of this name; without one, the least change or, if the run fits, the fastest.

        The fastest in fewer bits is returned without being named only if it is the only one.
        """
        if name is not None and name not in TITLES:
            raise FitError(f"{name!r} is no answer: choose one of {', '.join(TITLES)}")
        if name is None:
            least = self.answer("least")
            alike = [one for one in self.answers if one.names != ["narrower"]] or self.answers
            return least or min(alike, key=lambda one: one.iteration_ms, default=None)
        return next((one for one in self.answers if name in one.names), None)


class Found(NamedTuple):
    """The answers as runs, and as what is shown."""

    answers: Answers
    fit: Fit


def gaining(
    found: Answers, names: Iterable[str], written: Callable[[Run], Written]
) -> list[tuple[Written, Planned, list[str]]]:
    """Return each answer once, as it is written, with its run and all its names.

    If the run as it is fits, these are only the answers that are faster by 2 %.
    """
    now = found.now.estimate
    limit = now.iteration_ms / EQUAL if now.fits else float("inf")
    shown: dict[Written, tuple[Planned, list[str]]] = {}
    for name in names:
        one: Planned | None = getattr(found, name)
        if one is not None and one.estimate.iteration_ms < limit:
            before = shown.get(form := written(one.run), (one, []))[1]
            shown[form] = one, [*before, name]
    return [(form, one, each) for form, (one, each) in shown.items()]


def settings_of_run(run: Run) -> dict[str, Any]:
    """Return EvenPipe's settings for a run: arguments of `PipelineSchedule`, or keys of DeepSpeed's section."""
    grouped = {"group_size": run.group_size} if run.group_size > 1 else {}
    return {"schedule": run.spec.name} | ({"bpipe": True} if run.bpipe else {}) | grouped
