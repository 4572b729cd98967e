"""An iteration on the simulator's clock: the verified program, with the times of stages and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from evenpipe.schedule import Program, Programs, Size
from evenpipe.simulate import Costs, simulate

__all__ = ["Simulated", "simulated"]

_BATCHES: Final = 3  # of a stream: its start, its end, and one between


class Simulated(NamedTuple):
    """Milliseconds of an iteration, the stages' peaks of saved bytes, and the program these are of."""

    makespan_ms: float
    saved_bytes: tuple[int, ...]
    program: Program


def simulated(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    """A batch of ``size``, or of a stream the time by which one more batch makes it longer.

    A long batch is not walked to its end: once the simulator shows that further micro-batches of the schedule's period
    add the same time each and hold no more, they are counted.
    """
    spec = programs.spec
    if "stream" in spec.needs:
        few, many = (_run(programs, size._replace(batches=n), costs, unit_bytes) for n in (_BATCHES, _BATCHES + 1))
        return many._replace(makespan_ms=many.makespan_ms - few.makespan_ms)
    period = _period(size)
    m = size.micro_batches
    tried = 2 * size.stages + m % period
    while tried + 2 * period < m:
        sizes = [size._replace(micro_batches=tried + n * period) for n in range(3)]
        if spec.bound(spec.fitted(sizes[0])) != spec.bound(spec.fitted(size)):
            break
        found = [_run(programs, one, costs, unit_bytes) for one in sizes]
        first, second = (found[n + 1].makespan_ms - found[n].makespan_ms for n in range(2))
        if abs(first - second) <= 1e-9 * found[2].makespan_ms:
            more = (m - sizes[2].micro_batches) // period
            return found[2]._replace(makespan_ms=found[2].makespan_ms + more * second)
        tried *= 2
    return _run(programs, size, costs, unit_bytes)


def _period(size: Size) -> int:
    """Micro-batches after which a schedule does the same again: a group, or with several chunks a round of stages."""
    return max(size.group_size, size.stages if size.chunks > 1 else 1)


def _run(programs: Programs, size: Size, costs: Costs, unit_bytes: Sequence[Sequence[int]]) -> Simulated:
    program = programs(size)
    found = simulate(program, costs, unit_bytes)
    return Simulated(found.makespan_ms, tuple(stage.peak_bytes for stage in found.stages), program)
