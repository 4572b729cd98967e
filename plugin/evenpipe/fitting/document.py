"""The document of answers to a run, as a command prints it and a program gets it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel

from evenpipe.fitting.answers import Answers

__all__ = ["SAME_BITS", "TITLES", "Answer", "Fit", "FitError", "Found"]

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
