"""An iteration on the simulator's clock: the verified program, with the times of stages and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from evenpipe.schedule import Programs, Size
from evenpipe.simulate import Costs, simulate

__all__ = ["Simulated", "simulated"]

_BATCHES: Final = 3  # of a stream: its start, its end, and one between
#: Micro-batches times parts that are walked to the end where the pace is not the slowest stage's: half a second.
_WALKED: Final = 30_000
#: Rounds of a long batch of that kind by which its pace is taken, which goes up and down by less than one micro-batch.
_ROUNDS: Final = 16
_SPAN_OF_STREAM: Final = 32  # micro-batches instead: it is not flushed, and has reached its pace
_ROUNDING: Final = 1e-9


class Simulated(NamedTuple):
    """Milliseconds of an iteration, the stages' peaks of saved bytes, and how many weight versions they hold."""

    makespan_ms: float
    saved_bytes: tuple[int, ...]
    weight_versions: int


def simulated(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    """A batch of ``size``, or of a stream the time by which one more batch makes it longer.

    A long batch is not walked to its end, as long as its stages hold no more than those of a shorter one. Where
    messages are free, and each further period of the schedule adds what the slowest stage takes for it, more of them do
    too: a way through the batch that adds more there is not. Else the pace swings around its mean, or is not reached
    yet, and only batches beyond thousands of micro-batches are cut short: to a thousandth.
    """
    stream = "stream" in programs.spec.needs
    walk = partial(_added if stream else _run, programs, costs=costs, unit_bytes=unit_bytes)
    period = max(size.group_size, size.stages if size.chunks > 1 else 1)
    free = not any(any(wire) for wire in (*costs.wires.values(), *costs.links.values()))
    if free and (steady := _counted_on(programs, size, walk, period)) is not None:
        pace = period * max(map(sum, zip(costs.forward_ms, costs.backward_ms, strict=True)))
        if all(abs(step - pace) <= _ROUNDING * pace for step in steady.steps):
            return steady.found
    batches, span = (2 * _BATCHES + 1, max(size.stages, _SPAN_OF_STREAM)) if stream else (1, _ROUNDS * size.stages)
    if size.micro_batches * size.stages * size.chunks * batches > _WALKED:
        mean = _counted_on(programs, size, walk, period * span)
        if mean is not None:
            return mean.found
    return walk(size)


class _CountedOn(NamedTuple):
    """A batch that adds to shorter ones what two periods more have added to them, one by one: the `steps`."""

    found: Simulated
    steps: tuple[float, float]


def _counted_on(programs: Programs, size: Size, walk: Callable[[Size], Simulated], period: int) -> _CountedOn | None:
    """None where the batch is not longer than these, or its stages hold more."""
    settled = 0 if programs.spec.settled is None else programs.spec.settled(size)
    least = max(2 * size.stages, 2 * period, settled)
    first = least + (size.micro_batches - least) % period
    short = [size._replace(micro_batches=first + n * period) for n in range(3)]
    if short[2].micro_batches >= size.micro_batches or programs.spec.bound(short[0]) != programs.spec.bound(size):
        return None
    runs = [walk(one) for one in short]
    steps = (runs[1].makespan_ms - runs[0].makespan_ms, runs[2].makespan_ms - runs[1].makespan_ms)
    more = (size.micro_batches - short[2].micro_batches) // period
    return _CountedOn(runs[2]._replace(makespan_ms=runs[2].makespan_ms + more * sum(steps) / 2), steps)


def _added(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    """What one more batch of a stream adds."""
    few, many = (_run(programs, size._replace(batches=n), costs, unit_bytes) for n in (_BATCHES, _BATCHES + 1))
    return many._replace(makespan_ms=many.makespan_ms - few.makespan_ms)


def _run(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    program = programs(size)
    found = simulate(program, costs, unit_bytes)
    saved = tuple(stage.peak_bytes for stage in found.stages)
    return Simulated(found.makespan_ms, saved, program.schedule.weight_versions)
