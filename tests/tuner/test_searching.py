"""When an order is searched anew, what is taken of a batch that was looked at, and what is saved of an order."""

import json

import pytest

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.runtime.timing import HostClock
from evenpipe.schedule import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Size, build
from evenpipe.schedule.bpipe import swapped
from evenpipe.tuner.pace import Pace
from evenpipe.tuner.part_watch import PartFigures, PartWatch
from evenpipe.tuner.searching import FIRST, SearchLoop, _part

STAGES, MICRO_BATCHES = 4, 8


def costs(of_stage=(1.0,) * STAGES, cap=2 * STAGES):
    times = [*of_stage, *reversed(of_stage)]
    parts = [Part(forward_ms=ms, input_gradient_ms=ms, weight_gradient_ms=ms) for ms in times]
    return RunCosts(format="evenpipe.costs/1", placement="vee", parts=parts, memory_bytes=[cap] * STAGES)


def searched(found="zbv", **others):
    loop = SearchLoop(PartWatch(), **others)
    schedule = build(found, Size(STAGES, MICRO_BATCHES)).schedule
    loop.load_state_dict({"limit_bytes": 7, "costs": costs().model_dump(mode="json"), "orders": [str(schedule)]})
    return loop


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (costs(), None),
        (costs([2.0] * STAGES), None),  # all stages alike: the order is as good as before
        (costs([1.0, 1.0, 1.0, 1.08]), None),
        (costs([1.0, 1.0, 1.0, 1.3]), "times of stages have changed by 12% beside each other"),
        (costs().model_copy(update={"host_bytes_per_ms": 1.0}), "stages may swap to their hosts now"),
        (costs(cap=2 * STAGES - 1), "micro-batches save more, or there is less room for what they save"),
    ],
)
def test_an_order_is_outdated_where_stages_differ_otherwise_or_memory_is_short(now, said):
    assert searched()._outdated(costs(), now, STAGES) == said


def test_a_run_goes_on_with_the_orders_that_were_saved():
    loop = searched()
    state = json.loads(json.dumps(loop.state_dict()))
    other = SearchLoop(PartWatch())
    assert other.state_dict() is None
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert str(other.program(Size(STAGES, MICRO_BATCHES, 2), "many").schedule) == state["orders"][0]
    assert other.program(Size(STAGES, 2 * MICRO_BATCHES, 2), "many").schedule.name == FIRST[2]
    other.begin(0, Size(STAGES, MICRO_BATCHES, 2))
    assert other.weighs  # whether times are as they were is looked at, at once


@pytest.mark.parametrize("may", [True, False])
def test_a_run_that_may_not_swap_forgets_saved_orders_that_do(may):
    order = swapped(build("1f1b", Size(STAGES, MICRO_BATCHES)).schedule, [3] * STAGES)
    saved = costs().model_copy(update={"host_bytes_per_ms": 1.0}).model_dump(mode="json")
    loop = SearchLoop(PartWatch())
    loop.load_state_dict({"limit_bytes": 7, "costs": saved, "orders": [str(order)]})
    loop.join(evicts=False, swaps=may)
    loop._forget_moves()
    assert loop.state_dict()["orders"] == [str(order)] * may
    assert (loop.costs.host_bytes_per_ms is not None) == may


class Store:
    """Of what micro-batches have saved so far, by unit."""

    def __init__(self, held):
        self.held, self.lasting_bytes = held, {}

    def nbytes(self, unit):
        return self.held[unit]

    def movable_bytes(self, unit):
        return self.held[unit] - 5 - unit.micro_batch


def test_the_most_bytes_and_the_median_time_of_a_micro_batch_are_taken(monkeypatch):
    watch, clock, now = PartWatch(), HostClock(), [0.0]
    watch.recomputes = lambda unit: unit.micro_batch == 0
    monkeypatch.setattr("evenpipe.runtime.timing.time.monotonic", lambda: now[0])
    row = [Action(kind, number) for number in range(3) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
    held = {}
    watch.store = Store(held)
    for timed in (False, True):
        watch.timed = timed
        watch.batch_started(clock)
        for action in row:
            watch.started(action)
            now[0] += (1 + action.micro_batch) / 1e3 * (2 if action.kind == FORWARD else 1)
            held[action.unit] = (100 if action.kind == FORWARD else 70) - action.micro_batch
            watch.ended(action)
        watch.batch_ended()
        assert watch.store is None
        assert not watch.timed
    [figures] = watch.figures(1)
    assert figures == pytest.approx(PartFigures(4.0, 2.5, 2.0, 100, 70, 100, 0.0, 7))


def test_more_may_wait_for_a_second_half_than_was_saved():
    """Where layers are recomputed, and in queues that a store does not see."""
    part = _part(PartFigures(1.0, 1.0, 1.0, 100, 170, 0, 0), None, False)
    assert (part.saved_bytes, part.freed_by_input_gradient_bytes) == (100, -70)
    watch, queued = PartWatch(queued=lambda: sum(waiting)), Action(INPUT_GRADIENT, 0)
    waiting = [40]  # of another unit
    watch.store = Store({queued.unit: 30})
    watch.batch_started(HostClock())
    watch.started(queued)
    waiting.append(500)
    watch.ended(queued)
    assert watch.nbytes[INPUT_GRADIENT, 0] == {530: 1}


def test_a_part_that_is_computed_again_is_known_by_what_it_was_before():
    before = _part(PartFigures(1.0, 2.0, 1.0, 100, 90, 7, 0.7), None, False)
    assert (before.recomputed_bytes, before.recomputed().input_gradient_ms) == (7, 2.7)
    assert _part(PartFigures(1.0, 2.7, 1.0, 0, 90, 7, 0), before, True) == before
    assert _part(PartFigures(1.0, 2.0, 1.0, 0, 90, 7, 0), before, False) == before  # one batch is by another order
    assert _part(PartFigures(1.0, 2.0, 1.0, 100, 90, 0, 0), before, False) == before
    assert _part(PartFigures(1.0, 2.7, 1.0, 0, 180, 14, 0), before, True).saved_bytes == 200
    assert _part(PartFigures(1.0, 2.0, 1.0, 100, 90, 100, 0), None, False).recomputed_bytes is None  # nothing to gain


def test_orders_of_another_number_of_parts_are_not_taken():
    lines = []
    loop = searched(log=lines.append)
    loop.begin(1, Size(STAGES, MICRO_BATCHES, 1))
    assert loop.weighs
    assert loop.costs is None
    assert lines == ["what was saved is of another number of parts: searches anew"]
    assert loop.program(Size(STAGES, MICRO_BATCHES, 1), "many").schedule.name == FIRST[1]


def test_a_program_that_was_asked_for_before_orders_were_loaded_is_not_kept():
    loop, size = SearchLoop(PartWatch()), Size(STAGES, MICRO_BATCHES, 2)
    assert loop.program(size, "many").schedule.name == FIRST[2]
    state = searched().state_dict()
    loop.load_state_dict(state)
    assert str(loop.program(size, "many").schedule) == state["orders"][0]


def test_a_run_that_goes_on_does_not_wait_longer_than_its_own_interval():
    assert Pace(3).no_later(100, 20) == 23
    assert Pace(None).no_later(100, 20) == 100
