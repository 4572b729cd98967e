"""Searched orders that evict: within the caps of their stages, proven, and never slower than those that do not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.order_search.compiled import COMPILED
from evenpipe.order_search.costs import Part, RunCosts, check_caps, held_bytes
from evenpipe.order_search.evicting import sharing
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import Effort
from evenpipe.schedule import Action, Schedule, ScheduleError, most_whole, verify
from evenpipe.simulate import Costs, simulate
from evenpipe.simulate.searched import searched

QUICK = Effort(0.01, 2)


def straight(stages: int, cap: int, message_ms: float = 0.6, peer: float | None = 50.0, unit: int = 100) -> RunCosts:
    """Even stages of 100 bytes a micro-batch; an eviction takes a forward, if nothing else is said."""
    part = Part(forward_ms=2, input_gradient_ms=2, weight_gradient_ms=2, saved_bytes=unit)
    return RunCosts(
        format="evenpipe.costs/1",
        placement="straight",
        parts=[part] * stages,
        message_ms=message_ms,
        memory_bytes=[cap] * stages,
        peer_bytes_per_ms=peer,
    )


def peak_bytes(schedule: Schedule, costs: RunCosts) -> list[int]:
    """By the simulator's account of memory."""
    saved = [[part.saved_bytes] for part in costs.parts]
    left = [[part.saved_bytes - part.freed_by_input_gradient_bytes] for part in costs.parts]
    program = verify(schedule, pairs=True)
    stages = simulate(program, Costs.of_parts(costs, schedule), saved, left).stages
    return [stage.peak_bytes for stage in stages]


@given(st.integers(2, 5), st.floats(1, 3), st.floats(0.2, 1), st.booleans(), st.integers(0, 999))
@settings(max_examples=15)
def test_caps_are_kept_and_nothing_is_slower(stages: int, times: float, room: float, split: bool, seed: int) -> None:
    chance, micro_batches = random.Random(seed), round(times * stages)
    parts = []
    for _ in range(stages):
        saved = chance.randint(50, 150)
        parts.append(
            Part(
                forward_ms=chance.uniform(1, 3),
                input_gradient_ms=chance.uniform(1, 3),
                weight_gradient_ms=chance.uniform(0.5, 3),
                saved_bytes=saved,
                freed_by_input_gradient_bytes=chance.randint(0, saved),
                recomputed_bytes=chance.choice([None, saved // 20]),
            )
        )
    costs = straight(stages, 0, chance.choice([0.0, 0.6, 3.0]), chance.uniform(20, 500)).model_copy(
        update={
            "parts": parts,
            "memory_bytes": [150 + int(room * chance.uniform(0.5, 1) * 100 * stages) for _ in range(stages)],
        }
    )
    alone = searched(costs.model_copy(update={"peer_bytes_per_ms": None}), stages, micro_batches, QUICK, split=split)
    found = searched(costs, stages, micro_batches, QUICK, split=split)
    schedule = found.program.schedule
    assert Schedule.parse(str(schedule)) == schedule
    program = verify(schedule, any(schedule.evictions))
    check_caps(schedule, costs)
    assert found.batch_ms <= alone.batch_ms
    assert simulate(program, Costs.of_parts(costs, schedule)).makespan_ms == found.batch_ms
    assert found.published_ms == alone.published_ms
    if not schedule.recomputed:
        for peak, cap in zip(peak_bytes(schedule, costs), costs.caps(stages), strict=True):
            assert peak <= cap


def held_beside_a_host(row: tuple[Action, ...], sizes: list[int]) -> int:
    """The most bytes of a stage that waits for its swaps as `runtime/host_swaps.py` does; a whole unit a chunk."""
    most, here, leaving, peak = most_whole(row), list[tuple[int, int]](), list[tuple[int, int]](), 0
    for action in row:
        unit = (action.micro_batch, action.chunk)
        if action.kind in "FI":
            if unit in leaving:
                here.remove(unit)
                leaving.remove(unit)
            while leaving and len(here) + 1 > most:
                here.remove(leaving.pop(0))
            here.append(unit)
        elif action.kind == "O":
            leaving.append(unit)
        elif action.kind in "BW":
            here.remove(unit)
        peak = max(peak, sum(sizes[chunk] for _, chunk in here))
    return peak


@given(
    st.integers(1, 4),
    st.floats(1, 3),
    st.floats(0.2, 1),
    st.booleans(),
    st.sampled_from(["straight", "vee"]),
    st.integers(0, 999),
)
@settings(max_examples=15)
def test_what_is_swapped_to_hosts_keeps_caps(
    stages: int, times: float, room: float, split: bool, placement: str, seed: int
) -> None:
    chance, micro_batches = random.Random(seed), round(times * stages)
    count = stages * (2 if placement == "vee" else 1)
    sizes = [chance.randint(50, 150) for _ in range(count)]
    parts = [
        Part(
            forward_ms=chance.uniform(1, 3),
            input_gradient_ms=chance.uniform(1, 3),
            weight_gradient_ms=chance.uniform(0.5, 3),
            saved_bytes=size,
            staying_bytes=chance.choice([0, size // 10]),
        )
        for size in sizes
    ]
    caps = [320 + int(room * 100 * stages) for _ in range(stages)]
    update = {"placement": placement, "parts": parts, "memory_bytes": caps, "peer_bytes_per_ms": None}
    alone = straight(stages, 0, chance.choice([0.0, 0.6])).model_copy(update=update)
    costs = alone.model_copy(update={"host_bytes_per_ms": chance.uniform(20, 500)})
    without, found = (searched(one, stages, micro_batches, QUICK, split=split) for one in (alone, costs))
    schedule = found.program.schedule
    assert found.batch_ms <= without.batch_ms
    assert Schedule.parse(str(schedule)) == schedule
    verify(schedule)
    check_caps(schedule, costs)
    if not any(part.staying_bytes for part in parts):
        for stage, row in enumerate(schedule.actions):
            of_chunks = [sizes[schedule.places.position(stage, chunk)] for chunk in range(schedule.chunks)]
            assert held_beside_a_host(row, of_chunks) == max(held_bytes(schedule, costs)[stage]) <= caps[stage]


@pytest.mark.skipif(not COMPILED, reason="finds less without numba")
@pytest.mark.parametrize(("placement", "gain"), [("straight", 1.25), pytest.param("vee", 1.1, marks=pytest.mark.gate)])
def test_hosts_take_what_caps_leave_no_room_for(placement: str, gain: float) -> None:
    """At half of 1F1B's memory, where a swap takes a forward of a stage; by a slow link nothing is swapped."""
    chunks = 2 if placement == "vee" else 1
    times = dict.fromkeys(("forward_ms", "input_gradient_ms", "weight_gradient_ms"), 2 / chunks)
    parts = [Part(**times, saved_bytes=100 // chunks)] * (8 * chunks)
    batch_ms = {}
    for host in (None, 50.0, 1.0):
        update = {"placement": placement, "parts": parts, "host_bytes_per_ms": host, "peer_bytes_per_ms": None}
        found = searched(straight(8, 400, 0.2).model_copy(update=update), 8, 16, Effort(0.2, 2))
        assert ("O" in found.program.schedule.table.letters) == (host == 50.0)
        batch_ms[host] = found.batch_ms
    assert batch_ms[50.0] * gain < batch_ms[None] == batch_ms[1.0]


@pytest.mark.skipif(not COMPILED, reason="finds less without numba")
def test_even_stages_gain_where_their_caps_bind() -> None:
    """At 5/8 of 1F1B's memory, by a quarter; without a speed, or in slow evictions, none is found."""
    times = {}
    for peer in (None, 50.0, 5.0):
        costs = straight(8, 500, peer=peer)
        found = searched(costs, 8, 16, Effort(0.2, 2))
        schedule = found.program.schedule
        assert any(schedule.evictions) == (peer == 50.0)
        assert max(map(max, held_bytes(schedule, costs))) <= 500
        times[peer] = found.batch_ms
    assert times[50.0] * 1.2 < times[None] == times[5.0]


def test_the_bytes_of_an_evicting_table_are_proven() -> None:
    """Evicted ones count until they have to be gone, and an acceptor's slots all the time."""
    table = Schedule.parse(
        "format=evenpipe.schedule/1 name=x stages=2 micro_batches=4 chunks=1 batches=1 group_size=1 "
        "weight_versions=1 bound=3 bounds=2,3 places=loop\n"
        "F0 F1 E1 F2 B0 L1 B1 F3 B2 B3\n"
        "A1@0 F0 B0 F1 R1@0 B1 F2 B2 F3 B3\n"
    )
    costs = straight(2, 200, unit=100)
    assert [max(row) for row in held_bytes(table, costs)] == [200, 200]
    check_caps(table, costs)
    with pytest.raises(ScheduleError, match=r"(?s)makes 200 bytes, and the cap is 199.*<-- here"):
        check_caps(table, costs.model_copy(update={"memory_bytes": [200, 199]}))
    with pytest.raises(ScheduleError, match=r"F2 makes 300 bytes, and the cap is 200"):
        check_caps(replace(table, bounds=(3, 3)), costs)


def test_partners_share_what_they_may_hold_together() -> None:
    problem = Problem.of(straight(4, 300), 4, 8)
    for shared in sharing(problem):
        for evictor, acceptor in ((0, 3), (1, 2)):
            total = shared.cap[evictor] + shared.cap[acceptor]
            assert total == (600 if shared.cap[evictor] == 300 else 500), "a unit under way counts on both"
    assert sharing(problem)
    assert not sharing(replace(problem, cap=[float("inf")] * 4))
