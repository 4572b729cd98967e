"""Which candidate a run uses, and when it looks again: Ada-Grouper's auto-tuner (§3.2.2, §4.3, §5.4); and its file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from evenpipe.report.files import write_atomically
from evenpipe.schedule import Link, Program
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes
from evenpipe.tuner.pace import Pace

__all__ = ["HYSTERESIS", "WINDOW", "Retune", "Tuner", "read_state", "save_with", "thinned_out"]

#: No switch for a predicted gain under this part of the present candidate's time.
HYSTERESIS: Final = 0.02
#: Among estimates this close to the best the smallest k wins, which holds the fewest micro-batches.
_TIE: Final = 0.005
#: Samples that are averaged (§4.3), which are those of three measurements.
WINDOW: Final = 15
#: More candidates than these are thinned out.
_FEW: Final = 16
_K_GROWTH: Final = 1.25
#: Of the small JSON file beside what a framework saves.
_FORMAT: Final = "evenpipe.script_tuner/1"


class Retune(NamedTuple):
    """A decision: from `iteration` on, counted from 0, candidate (k, b) is used. Estimates by a candidate's name."""

    iteration: int
    k: int
    b: int
    estimates_ms: dict[str, float]


class Tuner:
    """One run's choice among `candidates` of `schedule`; every rank has one, and rank 0's decides.

    `times` has, for every micro-batch size, what the stages compute: measured once, as nobody preempts devices. What
    messages take is measured again before every decision. `interval` counts iterations between decisions; None: so many
    as take an hour.
    """

    def __init__(
        self,
        schedule: GroupedSchedule,
        candidates: Sequence[Candidate],
        times: Mapping[int, StageTimes],
        interval: int | None,
    ) -> None:
        #: May be replaced, by some of the same sizes, before a decision.
        self.candidates = tuple(candidates)
        self.current: Candidate | None = None
        self._adopted: list[Candidate] = []
        self.retunes: list[Retune] = []
        self._times = dict(times)
        self._pace = Pace(interval)
        #: What the last messages of a candidate took on a link, in ms, oldest first.
        self._windows: dict[tuple[str, Link], list[float]] = {}
        self._next = 0
        #: All its task orders live at once (§3.2.1).
        self.schedule = schedule

    @property
    def used(self) -> tuple[Candidate, ...]:
        """The present candidate, and those of before."""
        present = () if self.current is None else (self.current,)
        return tuple(dict.fromkeys((*present, *self._adopted)))

    def due(self, iteration: int) -> bool:
        """Return whether to measure and decide before `iteration`."""
        return self.current not in self.candidates or iteration >= self._next

    def observe(self, candidate: Candidate, link: Link, message_ms: Sequence[float]) -> None:
        """A measurement: one after the other, messages of `candidate` have taken so long on `link`.

        It joins those of before in the moving average (§4.3), unless all its samples lie on one side of their mean: of
        five, on a network that is as it was, they do so once in sixteen times. Then the network has changed, and only
        what it is now counts. So what is believed never lies outside of what was measured last.
        """
        window = self._windows.get((candidate.name, link), [])
        kept = window[max(0, len(window) + len(message_ms) - WINDOW) :]
        if kept and not min(message_ms) <= fmean(kept) <= max(message_ms):
            kept = []
        self._windows[candidate.name, link] = [*kept, *message_ms]

    def message_ms(self, candidate: Candidate) -> dict[Link, float]:
        """Return what a message of `candidate` takes on each link: the moving average of what was observed."""
        return {link: fmean(window) for (name, link), window in self._windows.items() if name == candidate.name}

    def decide(self, iteration: int) -> tuple[Candidate, list[float], int]:
        """Rank 0's part: the candidate to use from `iteration` on, all estimates in ms, and when to look again."""
        estimates = [self._ordered(candidate)[1] for candidate in self.candidates]
        best = min(estimates)
        smallest_k = next(i for i, ms in enumerate(estimates) if ms <= best * (1 + _TIE))
        chosen = self.candidates[smallest_k]
        if self.current in self.candidates:
            present = self.candidates.index(self.current)
            if estimates[smallest_k] > estimates[present] * (1 - HYSTERESIS):
                chosen = self.current
        return chosen, estimates, self._pace.next_after(iteration)

    def adopt(self, iteration: int, chosen: Candidate, estimates_ms: Sequence[float], following: int) -> Retune:
        """Every rank's part: take over what rank 0 has decided."""
        names = (candidate.name for candidate in self.candidates)
        retune = Retune(iteration, chosen.k, chosen.b, dict(zip(names, estimates_ms, strict=True)))
        self.current, self._next = chosen, following
        self._adopted.append(chosen)
        self.schedule.keep(chosen, self._ordered(chosen)[0])
        self._pace.begin(iteration)
        self.retunes.append(retune)
        return retune

    def state_dict(self) -> dict[str, Any]:
        """Return all that goes into a checkpoint, as JSON has it; the same on every rank."""
        return {
            "candidates": [list(candidate) for candidate in self.candidates],
            "current": None if self.current is None else list(self.current),
            "next": self._next,
            "times": {str(b): [list(of_kind) for of_kind in times] for b, times in self._times.items()},
            "message_ms": [[name, *link, window] for (name, link), window in self._windows.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], iteration: int) -> None:
        """Before `iteration`: go on as the tuner did that gave `state`, whose retunes are not told again.

        An interval that is shorter than what is left of that tuner's counts from here.
        """
        self.candidates = tuple(Candidate(*candidate) for candidate in state["candidates"])
        self.current = None if state["current"] is None else Candidate(*state["current"])
        self._next = state["next"]
        self._next = self._pace.no_later(self._next, iteration)
        self._times = {int(b): StageTimes(*map(tuple, times)) for b, times in state["times"].items()}
        self._windows = {}
        for name, kind, source, target, samples in state["message_ms"]:
            self._windows[name, Link(kind, source, target)] = list(samples)
        if self.current is not None:
            self.schedule.keep(self.current, self._ordered(self.current)[0])

    def _ordered(self, candidate: Candidate) -> tuple[Program, float]:
        return self.schedule.ordered(candidate, self._times[candidate.b], self.message_ms(candidate))


def thinned_out(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """`candidates`, in order of k; if they are many, fewer: of those of one size, k then grows by a quarter at least.

    A pipeline of thousands of micro-batches has as many group sizes, and next to each other they take the same time.
    """
    if len(candidates) <= _FEW:
        return tuple(candidates)
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.b != kept[-1].b or candidate.k >= _K_GROWTH * kept[-1].k:
            kept.append(candidate)
    return tuple(kept)


def save_with(
    write: Callable[[], Any],
    state: Any,
    settings: Mapping[str, Any],
    beside: Path,
    inside: Path,
    log: Callable[[str], None],
) -> Any:
    """Let `write` save a checkpoint once `state` is on disk; what it returns.

    What says which checkpoint is the latest moves on within `write`, or later, so a checkpoint that can be loaded has
    both. Frameworks want their own folder empty, so the state stays at `beside` until they are done, then it moves to
    `inside`. A state that cannot be written costs a tuning anew, as `log` is told.
    """
    content = {"format": _FORMAT, "settings": _as_json(settings), "state": state}
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(beside, json.dumps(content))
    except OSError as error:
        log(f"{beside}: {error.strerror}: a resumed run will tune anew")
        return write()
    result = write()
    # It is found beside, too.
    with contextlib.suppress(OSError):
        inside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(beside, inside)
    return result


def read_state(paths: Iterable[Path], settings: Mapping[str, Any], limit_bytes: int) -> dict[str, Any] | None:
    """Return the state in the first of `paths` saved under these settings and this limit; None where there is none."""
    wanted = {"format": _FORMAT, "settings": _as_json(settings)}
    for path in paths:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        state: Any = content.get("state") if isinstance(content, dict) else None
        if isinstance(state, dict) and wanted.items() <= content.items() and state.get("limit_bytes") == limit_bytes:
            return state
    return None


def _as_json(settings: Mapping[str, Any]) -> Any:
    """As JSON gives them back: tuples are lists there."""
    return json.loads(json.dumps(settings))
