"""``evenpipe.costs/1``: what each part of a model takes and saves, and what each stage may hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenpipe.schedule.actions import (
    ACCEPT,
    BACKWARD,
    EVICT,
    FORWARD,
    INPUT_GRADIENT,
    LOAD,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
)
from evenpipe.schedule.passes import awaited_swaps
from evenpipe.schedule.schedule import Fault, Schedule, marked
from evenpipe.schedule.topology import Places, loop, partner, vee
from evenpipe.wording.validation import first_message

__all__ = ["FORMAT", "Part", "Placement", "RunCosts", "check_caps", "held_bytes", "held_on"]

FORMAT: Final = "evenpipe.costs/1"
Placement = Literal["straight", "loop", "vee"]
_Ms = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Speed = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]
#: Of a model on a stage of any size; sums of floats are exact so far.
_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Change = Annotated[int, Field(ge=-(2**50), le=2**50)]
#: Milliseconds; what takes less is nothing.
_LEAST_MS: Final = 1e-6


class Part(BaseModel):
    """One part of the model and one micro-batch: milliseconds of each pass, bytes from the forward's start on.

    ``freed_by_input_gradient_bytes``: what of them is free when the input gradient ends; the rest is when the weight
    gradient does. Less than 0 where the input gradient leaves more than was saved, as where layers are recomputed.
    A whole backward takes both times, and frees all at its end. ``recomputed_bytes``: what of them a forward leaves
    whose part is computed again, as :meth:`recomputed` says; None where that cannot be. ``recompute_ms``: the time that
    this takes; a forward's, if None. ``staying_bytes``: what of saved_bytes cannot leave the stage, as tensors that
    something else holds too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward_ms: _Ms
    input_gradient_ms: _Ms
    weight_gradient_ms: _Ms
    saved_bytes: _Bytes = 1
    freed_by_input_gradient_bytes: _Change = 0
    recomputed_bytes: _Bytes | None = None
    recompute_ms: _Ms | None = None
    staying_bytes: _Bytes = 0

    @model_validator(mode="after")
    def _frees_what_it_saved(self) -> Part:
        if self.freed_by_input_gradient_bytes > self.saved_bytes:
            raise ValueError(
                f"freed_by_input_gradient_bytes={self.freed_by_input_gradient_bytes}: more than saved_bytes="
                f"{self.saved_bytes}"
            )
        if self.recomputed_bytes is not None and self.recomputed_bytes > self.saved_bytes:
            raise ValueError(f"recomputed_bytes={self.recomputed_bytes}: more than saved_bytes={self.saved_bytes}")
        if self.staying_bytes > self.saved_bytes:
            raise ValueError(f"staying_bytes={self.staying_bytes}: more than saved_bytes={self.saved_bytes}")
        return self

    def recomputed(self) -> Part:
        """Return the part computed again right before its input gradient, from where on it keeps all that it saves."""
        assert self.recomputed_bytes is not None
        again_ms = self.forward_ms if self.recompute_ms is None else self.recompute_ms
        most_bytes = self.saved_bytes + self.grown_bytes
        return Part(
            forward_ms=self.forward_ms,
            input_gradient_ms=again_ms + self.input_gradient_ms,
            weight_gradient_ms=self.weight_gradient_ms,
            saved_bytes=self.recomputed_bytes,
            freed_by_input_gradient_bytes=self.recomputed_bytes - most_bytes,
            staying_bytes=min(self.staying_bytes, self.recomputed_bytes),
        )

    @property
    def moving_bytes(self) -> int:
        """Return the saved bytes that an eviction moves."""
        return self.saved_bytes - self.staying_bytes

    @property
    def grown_bytes(self) -> int:
        """By how much an input gradient leaves more than was saved."""
        return max(0, -self.freed_by_input_gradient_bytes)

    def change(self, action: Action) -> int:
        """Return by how many bytes an action of this part changes what its stage holds."""
        return {
            FORWARD: self.saved_bytes,
            INPUT_GRADIENT: -self.freed_by_input_gradient_bytes,
            WEIGHT_GRADIENT: self.freed_by_input_gradient_bytes - self.saved_bytes,
            BACKWARD: -self.saved_bytes,
            LOAD: self.moving_bytes,
            SWAP_IN: self.moving_bytes,
        }.get(action.kind, 0)


class RunCosts(BaseModel):
    """The document: parts in the order of the model, and how they are placed: "straight" has one a stage.

    ``message_ms``: from one stage to another. ``memory_bytes``: a cap for each stage on what parts have saved.
    ``peer_bytes_per_ms``: how fast a stage evicts to its partner, the other way too at once; None where none does.
    ``host_bytes_per_ms``: the same of swaps to the stage's own host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["evenpipe.costs/1"]
    placement: Placement
    parts: Annotated[list[Part], Field(min_length=1)]
    message_ms: _Ms = 0.0
    memory_bytes: list[_Bytes] | None = None
    peer_bytes_per_ms: _Speed | None = None
    host_bytes_per_ms: _Speed | None = None

    @model_validator(mode="after")
    def _takes_time(self) -> RunCosts:
        if max(one.forward_ms + one.input_gradient_ms + one.weight_gradient_ms for one in self.parts) < _LEAST_MS:
            raise ValueError("no part takes any time: give what was measured")
        return self

    @classmethod
    def read(cls, path: Path) -> RunCosts:
        """Raises :class:`ScheduleError`, one line, for a file that is no such document."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            said = error.strerror if isinstance(error, OSError) else "is no text"
            raise ScheduleError(f"costs={path}: {said}: name a document {FORMAT}") from None
        except ValidationError as error:
            raise ScheduleError(f"costs={path}: {first_message(error, 'the file')}: give a document {FORMAT}") from None

    def places(self, stages: int) -> Places:
        """Return where the parts are. Raises :class:`ScheduleError` if they are not as many as stages need."""
        count = len(self.parts)
        chunks = {"straight": 1, "vee": 2}.get(self.placement, max(1, count // stages))
        if count != stages * chunks:
            raise ScheduleError(
                f"costs: {count} parts, and {self.placement} on {stages} stages has {stages * chunks}: give as many"
            )
        return vee(stages) if self.placement == "vee" else loop(stages, chunks)

    def straight(self, stages: int) -> RunCosts:
        """Return the same model with one part a stage, each of as many parts in a row as a stage has."""
        chunks = self.places(stages).chunks
        rows = [self.parts[at : at + chunks] for at in range(0, len(self.parts), chunks)]
        joined = [Part(**{name: _sum(getattr(one, name) for one in row) for name in Part.model_fields}) for row in rows]
        return self.model_copy(update={"placement": "straight", "parts": joined})

    def recomputing(self, positions: Collection[int]) -> RunCosts:
        """Return the costs with these parts computed again. Raises :class:`ScheduleError` for one that cannot be."""
        parts = list(self.parts)
        for position in positions:
            if parts[position].recomputed_bytes is None:
                raise ScheduleError(f"costs: part {position} is computed again: give its recomputed_bytes")
            parts[position] = parts[position].recomputed()
        return self.model_copy(update={"parts": parts})

    def caps(self, stages: int) -> Sequence[float]:
        """Return the bytes that each stage may hold. Raises :class:`ScheduleError` if there is not one for each."""
        given = self.memory_bytes
        if given is None:
            return [float("inf")] * stages
        if len(given) != stages:
            raise ScheduleError(f"costs: memory_bytes has {len(given)} caps for {stages} stages: give one a stage")
        return given


def _sum(numbers: Iterable[Any]) -> Any:
    given = list(numbers)
    return None if None in given else sum(given)


def held_bytes(schedule: Schedule, costs: RunCosts) -> list[list[int]]:
    """Return, per stage, the bytes that it holds after each action, or at a whole backward's turn, if that is more.

    What is evicted, or swapped out, counts until it has to have left. Acceptors keep memory for all that is accepted at
    once, from the start to the end.
    """
    parts = costs.recomputing(schedule.recomputed).parts
    return [held_on(stage, schedule, parts) for stage in range(schedule.stages)]


def held_on(stage: int, schedule: Schedule, parts: Sequence[Part]) -> list[int]:
    """Return one stage's of :func:`held_bytes`; ``parts`` are all of the model's, as ``schedule`` recomputes them."""
    row = schedule.actions[stage]
    each = [(parts[schedule.places.position(stage, action.chunk)], action) for action in row]
    held = accumulate(part.change(action) for part, action in each)
    at_turn = (part.saved_bytes + part.grown_bytes if action.kind == BACKWARD else 0 for part, action in each)
    gone = schedule.residencies[stage].gone.tolist()
    left = [0, *accumulate(part.moving_bytes for part, action in each if action.kind == EVICT)]
    left += left[-1:] * (gone[-1] - len(left) + 1 if gone else 0)  # an acceptor's guests leave its pool as it is
    pool = _pool_bytes(schedule, stage, parts)
    awaited = awaited_swaps(row) if SWAP_OUT in schedule.table.letters else {}
    swapped = accumulate(sum(each[out][0].moving_bytes for out in awaited.get(at, ())) for at in range(len(row)))
    columns = zip(held, at_turn, gone, swapped, strict=True)
    return [pool + now + more - left[went] - out for now, more, went, out in columns]


def _pool_bytes(schedule: Schedule, stage: int, parts: Sequence[Part]) -> int:
    """Return what a stage keeps for what its partner evicts: as many of its largest as there are at once."""
    accepted = accumulate(int(action.kind == ACCEPT) for action in schedule.actions[stage])
    gone = schedule.residencies[stage].gone.tolist()
    guests = max((came - went for came, went in zip(accepted, gone, strict=True)), default=0)
    evictor = partner(stage, schedule.stages)
    sizes = (parts[schedule.places.position(evictor, chunk)].moving_bytes for chunk in range(schedule.chunks))
    return max(0, guests) * max(sizes)


def check_caps(schedule: Schedule, costs: RunCosts) -> None:
    """Prove that no stage ever holds more than its cap; ScheduleError with the action that does marked in a grid."""
    with marked(schedule):
        for stage, (held, cap) in enumerate(zip(held_bytes(schedule, costs), costs.caps(schedule.stages), strict=True)):
            step = next((step for step, now in enumerate(held) if now > cap), None)
            if step is not None:
                raise Fault(
                    f"{schedule.actions[stage][step]} makes {held[step]:,} bytes, and the cap is {cap:,}", stage, step
                )
