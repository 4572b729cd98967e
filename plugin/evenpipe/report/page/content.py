"""What a page reads and shows: documents as far as it reads them, and plain values for the template and the charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from evenpipe.schedule import Schedule, ScheduleError, parse
from evenpipe.simulate import Costs, MemoryPoint, Simulation, Span, Wire

__all__ = ["Drawn", "Pairs", "RunDocument", "SimulationDocument", "Table", "View", "amount", "milliseconds", "percent"]

#: Names and values, in their order.
Pairs = Sequence[tuple[str, str]]


class Table(NamedTuple):
    """Rows of text; the first cell of each names its row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawn(NamedTuple):
    """A batch in time: actions of each stage, and what it holds. ``sized``: whether the bytes are known.

    name: "measured" or "predicted".
    """

    name: str
    stages: Sequence[Sequence[Span]]
    memory: Sequence[Sequence[MemoryPoint]]
    sized: bool

    @classmethod
    def of(cls, simulation: Simulation, sized: bool) -> Drawn:
        return cls("predicted", simulation.timeline, [stage.memory for stage in simulation.stages], sized)

    @property
    def actions(self) -> int:
        return sum(map(len, self.stages))


class View(NamedTuple):
    """One thing that is looked at. ``drawn``: what is measured comes first.

    facts: what it comes to. summary: how much of the time is lost, in a sentence. explained: more on that. tables: what
    else there is. notes: what else is to be known of what is shown, before all. commands: to be copied.
    """

    title: str
    facts: Pairs
    drawn: Sequence[Drawn]
    stages: Table
    explained: Sequence[str] = ()
    tables: Sequence[Table] = ()
    settings: Pairs = ()
    versions: Pairs = ()
    summary: str = ""
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def amount(nbytes: float) -> str:
    """Return bytes as people read them."""
    power = min(4, max(0, (int(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def milliseconds(ms: float) -> str:
    """Return a time as people read it: four digits, or all before the point."""
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.4g} ms"


def percent(share: float, digits: int = 0) -> str:
    """Return a share, in [0, 1]."""
    return f"{100 * share:.{digits}f} %"


_Ms = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0)]
_Memory = list[list[tuple[_Ms, int, int]]]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Span(_Part):
    action: str
    start_ms: _Ms
    end_ms: _Ms

    @field_validator("action")
    @classmethod
    def _is_one(cls, text: str) -> str:
        parse(text)
        return text


class _Costs(_Part):
    forward_ms: tuple[_Ms, ...]
    backward_ms: tuple[_Ms, ...]
    weight_gradient_ms: tuple[_Ms, ...] | None = None
    parts_ms: tuple[tuple[tuple[_Ms, _Ms, _Ms], ...], ...] | None = None
    wires: dict[Literal["forward", "backward", "evict", "load", "swap out", "swap in"], tuple[_Ms, _Ms, _Ms]] = {}
    synchronous_transfers: bool = False


class _Stages(_Part):
    """The part that both documents have: a batch in time."""

    timeline: Annotated[list[list[_Span]], Field(min_length=1)]
    memory: _Memory = []

    def spans(self) -> list[list[Span]]:
        """By stage, in order of their start."""
        rows = [[Span(parse(one.action), one.start_ms, one.end_ms) for one in row] for row in self.timeline]
        return [sorted(row, key=lambda span: span.start_ms) for row in rows]

    def held(self) -> list[list[MemoryPoint]]:
        """By stage; empty where the document does not say."""
        return [[MemoryPoint(*point) for point in row] for row in self.memory]


class _SimulatedStage(_Part):
    busy_ms: _Ms
    idle_ms: _Ms
    peak_live: _Bytes


class SimulationDocument(_Stages):
    """``evenpipe.simulation/1``; older ones have no schedule and no costs."""

    format: Literal["evenpipe.simulation/1"]
    makespan_ms: _Ms
    bubble_fraction: _Ms
    stages: list[_SimulatedStage]
    schedule_text: str | None = Field(None, alias="schedule")
    costs: _Costs | None = None
    unit_bytes: list[list[_Bytes]] | None = None

    @field_validator("schedule_text")
    @classmethod
    def _is_schedule(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                Schedule.parse(text)
            except ScheduleError as error:
                raise ValueError(f"is no schedule: {error}") from error
        return text

    @property
    def schedule(self) -> Schedule | None:
        return None if self.schedule_text is None else Schedule.parse(self.schedule_text)

    def simulated_costs(self) -> Costs | None:
        """Raises SimulationError for times that cannot be."""
        if self.costs is None:
            return None
        given = self.costs
        halves = given.weight_gradient_ms
        return Costs(
            given.forward_ms,
            given.backward_ms,
            {kind: Wire(*wire) for kind, wire in given.wires.items()},
            synchronous_transfers=given.synchronous_transfers,
            # All zero: no backward was split, so that nothing is known of halves.
            weight_gradient_ms=halves if halves is not None and any(halves) else None,
            parts_ms=given.parts_ms,
        )


class _MeasuredStage(_Part):
    peak_live: _Bytes
    peak_saved_bytes: _Bytes
    evicted_bytes: _Bytes
    parameter_bytes: _Bytes
    weight_version_bytes: _Bytes = 0
    static_bytes: _Bytes
    message_bytes: _Bytes = 0
    predicted_peak_bytes: _Bytes


class RunDocument(_Stages):
    """``evenpipe.run/1``."""

    format: Literal["evenpipe.run/1"]
    title: str
    losses: list[float | None]
    losses_hex: list[str] | None = None
    weights_sha256: str | None = None
    iteration_ms: Annotated[list[_Ms], Field(min_length=1)]
    first_iteration: int
    stages: Annotated[list[_MeasuredStage], Field(min_length=1)]
    retunes: list[dict[str, Any]]
    predicted: SimulationDocument
    settings: dict[str, Any]
    versions: dict[str, str]
    device: str
