"""An iteration on the simulator's clock: the verified program, with the times of stages and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from evenpipe.schedule import Programs, Size
from evenpipe.simulate import Costs, simulate

__all__ = ["Simulated", "simulated"]

_BATCHES: Final = 3  # of a stream: its start, its end, and one between
#: Micro-batches times parts that are walked to the end where messages take time: half a second.
_WALKED: Final = 30_000
#: Rounds of a long batch of that kind by which its pace is taken, which goes up and down by less than one micro-batch.
_ROUNDS: Final = 16


class Simulated(NamedTuple):
    """Milliseconds of an iteration, the stages' peaks of saved bytes, and how many weight versions they hold."""

    makespan_ms: float
    saved_bytes: tuple[int, ...]
    weight_versions: int


def simulated(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    """A batch of ``size``, or of a stream the time by which one more batch makes it longer.

    A long batch is not walked to its end, as long as its stages hold no more than those of a shorter one: a stage's
    pace is that of the slowest, so that each further period of the schedule adds the same. Where messages take time,
    the pace swings around its mean, and only batches beyond thousands of micro-batches are cut short: to a thousandth.
    """
    spec, m = programs.spec, size.micro_batches
    if "stream" in spec.needs:
        few, many = (_run(programs, size._replace(batches=n), costs, unit_bytes) for n in (_BATCHES, _BATCHES + 1))
        return many._replace(makespan_ms=many.makespan_ms - few.makespan_ms)
    free = not any(any(wire) for wire in (*costs.wires.values(), *costs.links.values()))
    period = max(size.group_size, size.stages if size.chunks > 1 else 1)
    if not free:
        period *= _ROUNDS * size.stages
    first = 2 * max(size.stages, period) + m % period
    short = [size._replace(micro_batches=first + n * period) for n in range(3)]
    walked = not free and m * size.stages * size.chunks <= _WALKED
    if walked or short[2].micro_batches >= m or spec.bound(short[0]) != spec.bound(size):
        return _run(programs, size, costs, unit_bytes)
    found = [_run(programs, one, costs, unit_bytes) for one in short]
    steps = [found[n + 1].makespan_ms - found[n].makespan_ms for n in range(2)]
    if free and abs(steps[0] - steps[1]) > 1e-9 * found[2].makespan_ms:
        return _run(programs, size, costs, unit_bytes)
    more = (m - short[2].micro_batches) // period
    return found[2]._replace(makespan_ms=found[2].makespan_ms + more * sum(steps) / 2)


def _run(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    program = programs(size)
    found = simulate(program, costs, unit_bytes)
    saved = tuple(stage.peak_bytes for stage in found.stages)
    return Simulated(found.makespan_ms, saved, program.schedule.weight_versions)
