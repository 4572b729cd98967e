"""One plan under a cap: after a run's first batch, what each stage swaps, sends to its partner and recomputes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import nn

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.runtime.resources import highest_of_all
from evenpipe.runtime.timing import sending_gbps
from evenpipe.schedule import LEVELS, Program, Programs, Queues, Schedule, ScheduleError, Size, swapping_at
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate import simulate
from evenpipe.simulate.under_cap import CappedStage, Layer, Way, costs_of, planned, program_of, traded_peak_bytes
from evenpipe.tuner.layer_watch import LayerWatch
from evenpipe.tuner.links import decided_by_rank_0
from evenpipe.tuner.part_watch import PartWatch
from evenpipe.tuner.process_memory import Room
from evenpipe.tuner.searching import UNDER_WAY

__all__ = ["SwapLoop"]

_MIB: Final = 2**20
_NOTHING: Final = Way("none", 0.0, 0)


class SwapLoop:
    """One process' part in swaps and recomputation that keep each stage under a cap; all ranks call the same, in step.

    In the first batch all that can leave does, and comes back just before its backward: the least memory that swaps can
    do with. It shows what micro-batches save and take, and what recomputation of their layers would free. From the
    second on each stage goes the way that `planned` finds by simulation: nothing where all fits, else the smallest
    share that swaps at a level, or BPipe's moves to and from its partner, with the first so many layers recomputed.
    Where partners are linked, the first batch is followed by messages that measure the links. Batches of another number
    of micro-batches are decided anew. A batch of one micro-batch does not show what the others save: the first of more
    is measured too.

    Have the executor swap under `limit`, and measure a batch if it `weighs`. For each batch, a framework calls `look`
    and `begin`, recomputes so many `layers`, trains by `program`, and calls `end`. `log` is given a line for each
    decision.
    """

    def __init__(self, log: Callable[[str], None] = lambda line: None) -> None:
        self.limit = HostLimit()
        self._log = log
        self._limit_bytes = 0
        self._measured: tuple[int, list[list[float]]] = 0, []  # of a batch of so many micro-batches, a row a stage
        self._stages: list[CappedStage] = []
        self._found: dict[Size, tuple[Way, ...]] = {}
        self._programs: dict[tuple[Size, tuple[Way, ...], Queues], Program] = {}
        self._said_exceeded = False
        self._looked: dict[int, Saved] | None = None  # of a stage that moves micro-batches: for what it was weighed
        self._own = 0
        self._executor: Executor | None = None
        self._ways: tuple[Way, ...] = ()  # of the batch before; none of one that is measured
        self._way: Way | None = None  # that the limit counts with
        self._watches: tuple[LayerWatch, PartWatch] | None = None

    @property
    def weighs(self) -> bool:
        """Return whether the executor is to measure the next batch."""
        return not self._stages

    def look(self, size: Size) -> None:
        """Before anything of a batch of this size: see whether it is measured."""
        if self._stages and self._measured[0] == 1 < size.micro_batches:
            self._log(f"measures a batch of {size.micro_batches} micro-batches: one alone did not show what more save")
            self.forget()

    def forget(self) -> None:
        """Between batches, on all ranks alike: there is no plan, and the next batch is measured."""
        self._stages, self._way = [], None
        self._found.clear()
        self.limit.forget()

    def begin(self, executor: Executor, layers: Sequence[Sequence[nn.Module]], repeats: bool = True) -> None:
        """Before a batch: `layers` can be recomputed, by model chunk, from the first on.

        `repeats` as in `LayerWatch`.
        """
        self._own, self._executor = executor.stage_index, executor
        if self._stages or self._watches is not None:
            return
        watch = PartWatch(executor.observer)
        executor.observer, watch.timed = watch, True
        layer_watch = LayerWatch(layers, executor.counter, executor.clock, repeats)
        self._watches = layer_watch, watch

    def program(self, plain: Programs, size: Size) -> Program:
        """Return what carries out batches of this size; `plain` swap and evict nothing.

        Raises ScheduleError, on all ranks, where a stage has no way to keep to its cap.
        """
        if not self._stages:
            return plain.swapping(LEVELS[-1])(size)
        key = size, self.ways(plain, size), plain.queues
        if key not in self._programs:
            self._programs[key] = program_of(plain, size, key[1])
        return self._programs[key]

    def ways(self, plain: Programs, size: Size) -> tuple[Way, ...]:
        """Return the way of each stage in batches of this size, after the first batch. Raises as `program` does."""
        if size not in self._found:
            self._found[size] = self._decided(plain, size)
        return self._found[size]

    def layers(self, plain: Programs, size: Size) -> list[int]:
        """Right before a batch: return how many layers of each chunk, from the first on, this stage recomputes in it.

        Raises as `program` does.
        """
        ways = self.ways(plain, size) if self._stages else ()
        if ways != self._ways and self._executor is not None:
            self._executor.forget_sizes()  # of other guests, or more, than the plan for this batch counts
        self._ways = ways
        if not self._stages:
            return [0] * size.chunks
        way = ways[self._own]
        if way != self._way:
            self._expect(way)
        return [min(way.layers, len(able)) for able in self._stages[self._own].layers]

    def end(self, executor: Executor, size: Size, room: Callable[[], Room], plain: Programs) -> None:
        """After a batch: take what was seen of the first one; `room` is asked then. Raises as `program` does."""
        if not self._stages:
            known = room()
            self._limit_bytes = known.limit_bytes
            self._measured = size.micro_batches, self._gathered(executor, size, known)
            self._stages = self._of_measured(size.chunks)
            self.ways(plain, size)
        elif not self._said_exceeded and (self.limit.is_exceeded or self._trades_too_much(plain, size)):
            self._said_exceeded = True
            there = "at its partner" if self.ways(plain, size)[self._own].bound else "on the host"
            executor.observer.remark(
                f"stage {executor.stage_index} is over its cap, with all {there} that its plan lets leave: "
                "micro-batches save more than those of the first batch: give more memory"
            )

    def _trades_too_much(self, plain: Programs, size: Size) -> bool:
        """Return whether this stage moves micro-batches, and holds more than its cap: they have grown since planned."""
        ways = self.ways(plain, size)
        if not ways[self._own].bound or self._looked == self.limit.saved:
            return False
        self._looked = dict(self.limit.saved)
        again = [stage.recomputing(way.layers) for stage, way in zip(self._stages, ways, strict=True)]
        saved = [self._looked if stage == self._own else one.saved for stage, one in enumerate(again)]
        held = traded_peak_bytes(self._own, self.program(plain, size).schedule, saved)
        return held > again[self._own].limit_bytes

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to train by the same plan, as JSON has it; None before there is one.

        It is the same on all ranks.
        """
        if not self._stages:
            return None
        micro_batches, rows = self._measured
        plans = [[list(size), [list(way) for way in ways]] for size, ways in self._found.items()]
        chunks = len(self._stages[0].saved)
        measured = {"micro_batches": micro_batches, "chunks": chunks, "rows": rows}
        return {"limit_bytes": self._limit_bytes, "measured": measured, "plans": plans}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch: train by the plan that :meth:`state_dict` gave, of a run under equal conditions."""
        self._limit_bytes, measured = state["limit_bytes"], state["measured"]
        self._measured = measured["micro_batches"], measured["rows"]
        self._stages = self._of_measured(measured["chunks"])
        self._way = None
        self._found = {Size(*size): tuple(Way(*way) for way in ways) for size, ways in state["plans"]}

    def _of_measured(self, chunks: int) -> list[CappedStage]:
        return [_stage(self._limit_bytes, chunks, *row) for row in self._measured[1]]

    def _expect(self, way: Way) -> None:
        """Keep to the limit with so many layers recomputed; a stage that trades with its partner keeps to the bound."""
        stage = self._stages[self._own].recomputing(way.layers)
        # A copy: this stage's grows with larger micro-batches, and all ranks decide by the same numbers.
        self.limit.limit_bytes, self.limit.saved = None if way.bound else stage.limit_bytes, dict(stage.saved)
        self._way, self._looked = way, None

    def _gathered(self, executor: Executor, size: Size, room: Room) -> list[list[float]]:
        """Return all stages' rows of bytes held, savings and times: of replicas and shards the highest numbers.

        Gives back the host's memory that the first batch has pinned.
        """
        assert self._watches is not None, "the batch has begun"
        assert executor.swaps is not None, "the executor swaps under the limit"
        layer_watch, watch = self._watches
        layers, times, device = layer_watch.figures(), watch.figures(size.chunks), executor.device
        executor.observer, self._watches = watch.then, None
        host_ms = executor.swaps.link.ms_a_byte()
        gbps = sending_gbps(executor.connections, executor.stage_index, device)
        partner_ms = 0.0 if gbps is None else 1e-6 / gbps
        executor.give_back_host_memory()
        message_bytes, count = map(int, highest_of_all([executor.counter.largest_sent, max(map(len, layers))], device))
        largest = float(executor.counter.largest_saved)  # of chunks none of whose micro-batches has the time to leave
        row = [room.static_bytes + UNDER_WAY * message_bytes, host_ms, partner_ms]
        for chunk, (figures, of_chunk) in enumerate(zip(times, layers, strict=True)):
            saved = self.limit.saved.get(chunk, Saved(largest, largest))
            backward_ms = figures.input_gradient_ms + figures.weight_gradient_ms
            row += [saved.nbytes, saved.staying, saved.first, figures.forward_ms, backward_ms, len(of_chunk)]
            kept = [(max(0.0, saved.nbytes - layer.freed_bytes), layer.forward_ms) for layer in of_chunk]
            row += [number for pair in kept for number in pair] + [0.0, 0.0] * (count - len(of_chunk))
        table = [row if stage == self._own else [0.0] * len(row) for stage in range(size.stages)]
        rows: list[list[float]] = highest_of_all(table, device)
        return rows

    def _decided(self, plain: Programs, size: Size) -> tuple[Way, ...]:
        """Return the way of each stage that rank 0 decides for, and say what it is."""
        ways, line = decided_by_rank_0(lambda: self._answer(plain, size))
        self._log(line)
        return tuple(Way(*way) for way in ways)

    def _answer(self, plain: Programs, size: Size) -> tuple[list[tuple[Any, ...]], str]:
        """Return the stages' ways, and what is said of them. Raises ScheduleError where a stage has no way."""
        plan = planned(plain, size, self._stages)
        if plan is None:
            raise ScheduleError(self._refusal(plain(size).schedule))
        none = costs_of(self._stages, (_NOTHING,) * size.stages)
        slower = plan.batch_ms / simulate(plain(size), none).makespan_ms
        return [tuple(way) for way in plan.ways], _said(plan.ways, self._stages, slower)

    def _refusal(self, plain: Schedule) -> str:
        """Return why nothing keeps all stages under the cap, and the least that would do."""
        needs = []
        for stage, of_stage in enumerate(self._stages):
            rooms = [SwapRoom(swapping_at(level, plain.actions[stage])) for level in LEVELS]
            ways = (of_stage.recomputing(layers) for layers in range(of_stage.most_layers + 1))
            least = min(
                room.peak_bytes(way.saved, 1.0) + of_stage.limit_bytes - way.limit_bytes
                for way in ways
                for room in rooms
            )
            needs.append((self._limit_bytes - of_stage.limit_bytes + least, least, stage))
        most, least, stage = max(needs)
        recomputes = self._stages[stage].most_layers > 0
        return (
            f"no swaps {'or recomputed layers ' * recomputes}keep stage {stage} under it: it holds "
            f"{(most - least) / _MIB:,.1f} MiB of weights, gradients, optimizer and messages, and with all that can "
            f"leave on the host {'or recomputed ' * recomputes}{least / _MIB:,.1f} MiB of micro-batches: give at least "
            f"{math.ceil(most / 2**30 * 1e4) / 1e4:g} GiB, a smaller micro-batch, or "
            f"{'more stages' if recomputes else 'recomputation'}"
        )


def _stage(
    limit_bytes: float, chunks: int, used: float, host_ms: float, partner_ms: float, *numbers: float
) -> CappedStage:
    """Return a stage from its row of what was gathered."""
    each = len(numbers) // chunks
    saved, layers, forward_ms, backward_ms = dict[int, Saved](), list[list[Layer]](), list[float](), list[float]()
    for chunk in range(chunks):
        nbytes, staying, first, forward, backward, count, *kept = numbers[chunk * each : (chunk + 1) * each]
        saved[chunk] = Saved(nbytes, staying, first)
        pairs = zip(kept[::2], kept[1::2], strict=True)
        those = [Layer(max(0.0, nbytes - left), took) for left, took in pairs][: int(count)]
        layers.append(those if any(layer.freed_bytes for layer in those) else [])
        forward_ms.append(forward)
        backward_ms.append(backward)
    return CappedStage(limit_bytes - used, saved, layers, forward_ms, backward_ms, host_ms, partner_ms or None)


def _said(ways: tuple[Way, ...], stages: Sequence[CappedStage], slower: float) -> str:
    """Return a line of what each stage may hold, swaps and recomputes, and what that is expected to cost."""
    rooms = " ".join(f"{stage.limit_bytes / _MIB:.2f}" for stage in stages)
    if all(way == _NOTHING for way in ways):
        return f"nothing is swapped, for all fits; room for micro-batches, MiB by stage: {rooms}"
    shares = " ".join(f"{way.share:.0%}" for way in ways)
    line = f"swaps of each micro-batch by stage: {shares}; room for all of them, MiB: {rooms}"
    if late := ", ".join(str(stage) for stage, way in enumerate(ways) if way.level == "late"):
        line += f"; stages that wait for each copy: {late}"
    if traded := ", ".join(str(stage) for stage, way in enumerate(ways) if way.bound):
        line += f"; stages that move micro-batches to and from their partners: {traded}"
    if any(way.layers for way in ways):
        line += f"; recomputed layers of each chunk by stage: {' '.join(str(way.layers) for way in ways)}"
    return f"{line}; a batch takes {slower:.3f} × the time without a cap, by simulation"
