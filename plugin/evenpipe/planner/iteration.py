"""Seconds of an iteration: stages, hand-overs, the program on the simulator's clock, and the end of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.kernels import Kernels, Links
from evenpipe.planner.operations.operation import Operation, Parameters, Pass
from evenpipe.planner.operations.parts import Block, Blocks, Part
from evenpipe.planner.run import Run
from evenpipe.schedule import Program, Programs, Size
from evenpipe.simulate import Costs, Simulation, period_ms, simulate

__all__ = [
    "HandOver",
    "PartTime",
    "Simulated",
    "batch_end",
    "embeddings_end",
    "hand_over",
    "kinds_of",
    "message_bytes_of",
    "part_times",
    "simulated",
]


class PartTime(NamedTuple):
    """Seconds of one part of the pipeline for one micro-batch; ``weights`` is the part of backward nobody waits for."""

    forward: float
    backward: float
    weights: float


def part_times(parts: Sequence[Part], blocks: Blocks, kernels: Kernels) -> list[PartTime]:
    """One of each part; backward has in it what is recomputed."""

    @cache
    def of(block: Block) -> PartTime:
        operations, again = blocks.operations[block], blocks.recomputed(block).operations
        weights = kernels.seconds(work for one in operations for work in one.weight_gradient)
        backward: list[tuple[Operation, Pass]] = []
        for one in operations:
            backward += [(one, "backward"), (one, "weight_gradient")]
        backward += [(one, "forward") for one in again]
        return PartTime(kernels.started((one, "forward") for one in operations), kernels.started(backward), weights)

    return [
        PartTime(*(sum(of(block)[field] * count for block, count in part.items()) for field in range(3)))
        for part in parts
    ]


_MS: Final = 1e3


class HandOver(NamedTuple):
    """Milliseconds. A message is on its way for the first two beside compute, or ``wait_ms`` in its sender's way."""

    latency_ms: float
    transmit_ms: float
    wait_ms: float


def message_bytes_of(model: Model, run: Run) -> float:
    """Return the activations of a micro-batch between two layers, of one tensor-parallel group."""
    return run.element_bytes * model.sequence // run.context * run.micro_batch * model.hidden


def hand_over(model: Model, run: Run, links: Links) -> HandOver:
    """Return the times of a hand-over under ``run``'s schedule.

    Where the framework blocks, the sender waits for the whole message, and the link counts as free.
    """
    sent = message_bytes_of(model, run) / (run.tensor if run.sequence_parallel or run.divided_messages else 1)
    latency, transmit = (_MS * seconds for seconds in links.message(sent))
    if run.message_ms is not None:
        transmit, latency = run.message_ms, 0.0
    if run.spec.name not in (run.blocking or ()):
        return HandOver(latency, transmit, 0.0)
    return HandOver(0.0, 0.0, transmit + latency + (run.hand_over_us or 0.0) / _MS)


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


def simulated(
    programs: Programs,
    size: Size,
    costs: Costs,
    unit_bytes: Sequence[Sequence[int]],
    left_bytes: Sequence[Sequence[int]] | None = None,
) -> Simulated:
    """Return a batch of ``size``, or of a stream the time by which one more batch makes it longer.

    A long batch is not walked to its end, as long as its stages hold no more than those of a shorter one. Where that
    becomes steady (`period_ms`), each further period adds the same. Else, where messages are free, it does if it adds
    what the slowest stage takes for it: a way through the batch that adds more there is not. Under BPipe, where
    partners wait for each other, a period is as many micro-batches as there are stages, since the pace swings within
    that. Where it swings around its mean, or is not reached yet, only batches beyond thousands of micro-batches are cut
    short: to a thousandth.
    """
    stream = "stream" in programs.spec.needs
    on_clock = partial(simulate, costs=costs, unit_bytes=unit_bytes, left_bytes=left_bytes)
    period = max(size.group_size, size.stages if size.chunks > 1 or programs.bpipe else 1)
    if not (stream or programs.bpipe) and (steady := _steady(programs, size, on_clock, period)) is not None:
        return steady
    walk = partial(_added if stream else _run, programs, on_clock=on_clock)
    free = not any(any(wire) for wire in (*costs.wires.values(), *costs.links.values()))
    if free and (steps := _counted_on(programs, size, walk, period)) is not None:
        pace = period * max(map(sum, zip(costs.forward_ms, costs.backward_ms, strict=True)))
        if all(abs(step - pace) <= _ROUNDING * pace for step in steps.steps):
            return steps.found
    batches, span = (2 * _BATCHES + 1, max(size.stages, _SPAN_OF_STREAM)) if stream else (1, _ROUNDS * size.stages)
    if size.micro_batches * size.stages * size.chunks * batches > _WALKED:
        mean = _counted_on(programs, size, walk, period * span)
        if mean is not None:
            return mean.found
    return walk(size)


#: Times the stages, or the period: micro-batches of a batch that is steady between its start and its end, mostly; and
#: of one that is nearly always, which is tried where the whole is at least twice as long.
_STEADY: Final = (4, 12)


def _steady(programs: Programs, size: Size, on_clock: Callable[[Program], Simulation], period: int) -> Simulated | None:
    """Return a batch by a shorter one's steady part; None where it has none, or is not shorter."""
    for times in _STEADY:
        short = _shorter(programs, size, times * max(size.stages, period), period)
        if short is None or (times > _STEADY[0] and 2 * short.micro_batches > size.micro_batches):
            return None
        program = programs(short)
        simulation = on_clock(program)
        step = period_ms(program, simulation, period)
        if step is not None:
            more = (size.micro_batches - short.micro_batches) // period
            return _result(program, simulation)._replace(makespan_ms=simulation.makespan_ms + more * step)
    return None


def _shorter(programs: Programs, size: Size, least: int, period: int) -> Size | None:
    """Return a batch of ``least`` micro-batches or some more, whole periods shorter; None where it holds less."""
    settled = 0 if programs.spec.settled is None else programs.spec.settled(size)
    first = max(least, settled)
    short = size._replace(micro_batches=first + (size.micro_batches - first) % period)
    fits = short.micro_batches < size.micro_batches and programs.spec.bound(short) == programs.spec.bound(size)
    return short if fits else None


class _CountedOn(NamedTuple):
    """A batch that adds to shorter ones what two periods more have added to them, one by one: the `steps`."""

    found: Simulated
    steps: tuple[float, float]


def _counted_on(programs: Programs, size: Size, walk: Callable[[Size], Simulated], period: int) -> _CountedOn | None:
    """None where the batch is not longer than these, or its stages hold more."""
    first = _shorter(programs, size, 2 * max(size.stages, period), period)
    if first is None or first.micro_batches + 2 * period >= size.micro_batches:
        return None
    short = [first._replace(micro_batches=first.micro_batches + n * period) for n in range(3)]
    runs = [walk(one) for one in short]
    steps = (runs[1].makespan_ms - runs[0].makespan_ms, runs[2].makespan_ms - runs[1].makespan_ms)
    more = (size.micro_batches - short[2].micro_batches) // period
    return _CountedOn(runs[2]._replace(makespan_ms=runs[2].makespan_ms + more * sum(steps) / 2), steps)


def _added(programs: Programs, size: Size, on_clock: Callable[[Program], Simulation]) -> Simulated:
    """Return what one more batch of a stream adds."""
    few, many = (_run(programs, size._replace(batches=n), on_clock) for n in (_BATCHES, _BATCHES + 1))
    return many._replace(makespan_ms=many.makespan_ms - few.makespan_ms)


def _run(programs: Programs, size: Size, on_clock: Callable[[Program], Simulation]) -> Simulated:
    program = programs(size)
    return _result(program, on_clock(program))


def _result(program: Program, found: Simulation) -> Simulated:
    saved = tuple(stage.peak_bytes for stage in found.stages)
    return Simulated(found.makespan_ms, saved, program.schedule.weight_versions)


#: What Adam in mixed precision reads and writes a parameter: gradient, copy, norm, clipping and both weights; and how
#: often each byte of its two moments.
_STEP_BYTES, _OF_MOMENTS = 34, 6


def embeddings_end(embedding: float, run: Run, links: Links) -> float:
    """Return the seconds in which two stages sum the gradients of so many parameters that both have a copy of."""
    return links.between_ends(0 if run.lora_rank else embedding * run.gradient_bytes)


def kinds_of(parameters: Parameters, run: Run) -> Sequence[tuple[float, float, int, bool]]:
    """Return, of other parameters and of experts', how many there are, how many of them a run may quantize, how many
    ranks have the same, and whether they are experts'.
    """
    return (
        (parameters.shared, parameters.narrow, run.replicas, False),
        (parameters.expert, parameters.expert, run.expert_replicas, True),
    )


def batch_end(parameters: Parameters, run: Run, kernels: Kernels, forward: float, backward: float) -> float:
    """Return the seconds that the end of a batch takes on one stage, without `embeddings_end`.

    ``forward``, ``backward``: the stage's seconds for a micro-batch. Where the run overlaps them, reductions hide
    behind the last micro-batch's backward, all-gathers behind the first one's forward. Those of experts and those of
    all else hide behind the same compute.
    """
    parameters = parameters.trained if run.lora_rank else parameters
    reduced = gathered = stepped = 0.0
    narrow = run.quantization if run.quantized_parameters and not run.lora_rank else None
    for count, quantized, size, experts in kinds_of(parameters, run):
        if not count:
            continue
        # An all-reduce is a reduce-scatter and a gathering; ZeRO-1 gathers parameters instead of gradients, and Muon
        # beside them, since it shares out whole matrices.
        rings = 2 if not run.sharded_optimizer or run.optimizer == "muon" else 1
        ring = 0.0 if run.shards_gradients else (size - 1) / size  # else after every micro-batch
        reduced += rings * kernels.links.reduction(ring * count * run.gradient_bytes, experts)
        ring = 0.0 if run.shards_parameters else (size - 1) / size
        if run.sharded_optimizer and narrow is None:
            gathered += kernels.links.reduction(ring * count * run.element_bytes, experts)
        elif run.sharded_optimizer and narrow is not None and narrow.in_the_open:
            stepped += kernels.links.reduction(ring * count * run.element_bytes, experts)
            stepped += kernels.moved(narrow.cast_bytes * quantized)
        elif run.sharded_optimizer and narrow is not None:
            whole = run.element_bytes * (count - quantized) + (narrow.gathered_bytes or 0) * quantized
            gathered += kernels.links.reduction(ring * whole, experts)
        own = count / (size if run.sharded_optimizer else 1)
        on_host = run.optimizer_offload * own
        stepped += kernels.moved((_STEP_BYTES + _OF_MOMENTS * run.moment_bytes) * (own - on_host))
        stepped += kernels.stepped_on_host(on_host)
    if run.overlap_gradients:
        reduced = max(0.0, reduced - backward)
    if run.overlap_parameters:
        gathered = max(0.0, gathered - forward)
    return reduced + gathered + stepped
