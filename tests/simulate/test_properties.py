"""What holds for every pipeline, however uneven its stages and links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import Schedule, lower
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedules import build

ROUNDING_MS = 1e-9
TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0, 10.0])
WIRES = st.builds(Wire, latency_ms=TIMES, transmit_ms=TIMES, beside_ms=TIMES)


@dataclass(frozen=True)
class Case:
    schedule: Schedule
    costs: Costs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "kfkb", "2bw"]))
    p = draw(st.integers(2 if name == "interleaved" else 1, 6))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    m = draw(st.integers(1, 3)) * p if name == "interleaved" else draw(st.integers(p if name == "2bw" else 1, 12))
    batches = draw(st.integers(1, 3)) if name == "2bw" else 1
    k = draw(st.integers(1, 4)) if name == "kfkb" else 1
    bpipe = name != "gpipe" and p > 1 and draw(st.booleans())
    schedule = build(name, p, m, chunks, bpipe=bpipe, batches=batches, group_size=k)
    stage_times = st.tuples(*[TIMES] * p)
    costs = Costs(
        forward_ms=draw(stage_times),
        backward_ms=draw(stage_times),
        wires={kind: draw(WIRES) for kind in ("forward", "backward", "evict", "load")},
        synchronous_transfers=draw(st.booleans()),
    )
    return Case(schedule, costs)


@given(cases())
def test_time_and_memory_are_accounted_for(case: Case) -> None:
    simulation = simulate(lower(case.schedule), case.costs)
    assert simulation.makespan_ms >= max(stage.busy_ms for stage in simulation.stages) - ROUNDING_MS
    assert 0 <= simulation.bubble_fraction <= 1
    for stage, peak in zip(simulation.stages, case.schedule.peak_live, strict=True):
        assert stage.peak_live <= peak
        assert abs(stage.busy_ms + stage.idle_ms - simulation.makespan_ms) < ROUNDING_MS


@given(cases())
def test_actions_run_in_order_and_after_what_they_need(case: Case) -> None:
    simulation = simulate(lower(case.schedule), case.costs)
    ends = {}
    for stage, (row, spans) in enumerate(zip(case.schedule.actions, simulation.timeline, strict=True)):
        assert tuple(span.action for span in spans) == row
        compute = [span for span in spans if span.action.kind in "FB"]
        for before, after in pairwise(compute):
            assert before.end_ms <= after.start_ms
        ends.update({(stage, span.action): span for span in spans})
    for (stage, action), span in ends.items():
        if action.kind == "F" and stage > 0:
            assert span.start_ms >= ends[stage - 1, action].end_ms
        if action.kind == "B":
            assert span.start_ms >= ends[stage, action._replace(kind="F")].end_ms
            load = ends.get((stage, action._replace(kind="L")))
            assert load is None or span.start_ms >= load.end_ms


@given(cases(), st.sampled_from(["forward", "backward", "evict", "load"]), WIRES)
def test_a_slower_link_never_helps(case: Case, kind: str, extra: Wire) -> None:
    """Max-plus systems are monotone: no scheduling anomalies."""
    wire = case.costs.wires[kind]
    slower = Wire(wire.latency_ms + extra.latency_ms, wire.transmit_ms + extra.transmit_ms)
    slowed = replace(case.costs, wires={**case.costs.wires, kind: slower})
    program = lower(case.schedule)
    assert simulate(program, slowed).makespan_ms >= simulate(program, case.costs).makespan_ms
