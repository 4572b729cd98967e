"""How many copies stages keep: the verified schedule's own walk, and PipeDream's formula."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from evenpipe.partition.dawnpiper.copies import Workload, copies_of
from evenpipe.schedule import ScheduleError, Size, build, find
from evenpipe.simulate import Costs, simulate

CASES = [
    *[Workload(name, 16) for name in ("gpipe", "1f1b", "2bw", "v-half", "zb-h1")],
    Workload("interleaved", 16, chunks=2),
    Workload("kfkb", 16, group_size=2),
]
BALANCED = [
    Workload("1f1b", 16, bpipe=True),
    Workload("2bw", 16, bpipe=True),
    Workload("interleaved", 16, chunks=2, bpipe=True),
    Workload("kfkb", 16, group_size=2, bpipe=True),
]


@pytest.mark.parametrize(("workload", "stages"), [*product(CASES, (3, 4)), *product(BALANCED, (2, 4))], ids=str)
def test_a_stage_holds_what_the_simulator_says_that_it_holds(workload: Workload, stages: int) -> None:
    """With unequal micro-batches of every position, so that whose copies they are matters."""
    workload = workload._replace(micro_batches=2 * stages)
    copies = copies_of(workload, stages)
    spec = find(workload.schedule)
    batches = 3 if "stream" in spec.needs else 1
    size = Size(stages, workload.micro_batches, workload.chunks, workload.group_size, batches)
    program = build(spec, size, bpipe=workload.bpipe)
    schedule = program.schedule
    assert max(rows.sum(axis=1).max() for rows in copies.live) == max(schedule.peak_live)
    draw = random.Random(stages)
    for _ in range(5):
        unit = [draw.randrange(1, 1000) for _ in schedule.places.order]
        by_place = [[0] * schedule.chunks for _ in range(stages)]
        for nbytes, place in zip(unit, schedule.places.order, strict=True):
            by_place[place.stage][place.chunk] = nbytes
        found = simulate(program, Costs((1.0,) * stages, (2.0,) * stages), by_place)
        mine = [int((rows @ unit).max()) for rows in copies.live]
        assert mine == [stage.peak_bytes for stage in found.stages]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "v-half", "zbv"])
@pytest.mark.parametrize("stages", [2, 4])
def test_between_the_halves_of_a_backward_other_bytes_are_held(schedule: str, stages: int) -> None:
    copies = copies_of(Workload(schedule, 2 * stages), stages)
    spec = find(schedule)
    program = build(spec, Size(stages, 2 * stages))
    places = program.schedule.places.order
    draw = random.Random(stages)
    for _ in range(5):
        kept, left = ([draw.randrange(1, 1000) for _ in places] for _ in range(2))
        by_place = [[[0] * program.schedule.chunks for _ in range(stages)] for _ in range(2)]
        for table, sizes in zip(by_place, (kept, left), strict=True):
            for nbytes, place in zip(sizes, places, strict=True):
                table[place.stage][place.chunk] = nbytes
        found = simulate(program, Costs((1.0,) * stages, (2.0,) * stages), *by_place)
        mine = [int(copies.peak(stage, np.array(kept), np.array(left))) for stage in range(stages)]
        assert mine == [stage.peak_bytes for stage in found.stages]


@pytest.mark.parametrize("stages", range(1, 9))
def test_copies_are_the_live_micro_batches_of_the_schedule(stages: int) -> None:
    m = 2 * stages
    drawn = {
        "gpipe": [m] * stages,
        "1f1b": [stages - s for s in range(stages)],
        "2bw": [stages - s for s in range(stages)],
        "zb-h1": list(build("zb-h1", Size(stages, m)).schedule.peak_live),
        "kfkb": [min(2 * (stages - s), m) for s in range(stages)],
        "pipedream": [stages - s for s in range(stages)],
    }
    for name, expected in drawn.items():
        copies = copies_of(Workload(name, m, group_size=2 if name == "kfkb" else 1), stages)
        assert list(copies.own) == expected, name
        assert copies.separable


def test_weights_have_two_versions_under_2bw_and_as_many_as_activations_under_pipedream() -> None:
    assert copies_of(Workload("1f1b", 8), 4).versions == (1, 1, 1, 1)
    assert copies_of(Workload("2bw", 8), 4).versions == (2, 2, 2, 2)
    assert copies_of(Workload("pipedream", 8), 4).versions == (4, 3, 2, 1)


def test_the_papers_modes_are_gpipe_with_a_micro_batch_a_stage_and_pipedream() -> None:
    assert copies_of(Workload.of_mode("sync", 4), 4).own == (4, 4, 4, 4)
    assert copies_of(Workload.of_mode("async", 4), 4).own == (4, 3, 2, 1)
    with pytest.raises(ScheduleError, match="mode=fast: expected one of sync, async"):
        Workload.of_mode("fast", 4)


def test_bpipe_couples_a_stage_with_its_partner() -> None:
    copies = copies_of(Workload("1f1b", 8, bpipe=True), 4)
    assert not copies.separable
    assert copies.own == (3, 3, 2, 1)
    assert copies.most(3, 0) == 2  # accepted micro-batches of stage 0
    assert copies.owners == (0, 1, 2, 3)


def test_v_half_has_the_models_both_ends_on_the_first_stage() -> None:
    copies = copies_of(Workload("v-half", 8), 4)
    assert copies.owners == (0, 1, 2, 3, 3, 2, 1, 0)
    assert copies.positions == 8


def test_between_a_forward_and_its_backward_others_are_computed() -> None:
    """1F1B, 4 stages: at least the three backwards of the cool-down on the first stage, nothing on the last."""
    copies = copies_of(Workload("1f1b", 8), 4)
    assert copies.between[0] == ((0.0, 3.0), (3.0, 0.0))
    assert copies.between[3] == ((0.0, 0.0),)
    assert copies_of(Workload("pipedream", 8), 4).between[0] == ((3.0, 3.0),)


def test_what_is_computed_beside_swaps() -> None:
    """1F1B computes a backward between two forwards and comes back beside a forward; GPipe does neither."""
    assert copies_of(Workload("1f1b", 16), 4).beside == ((1.0, 1.0),) * 3 + ((1.0, 0.0),)
    assert copies_of(Workload("pipedream", 8), 4).beside == ((1.0, 1.0),) * 3 + ((1.0, 0.0),)
    assert copies_of(Workload("gpipe", 4), 4).beside == ((0.0, 0.0),) * 4
    assert copies_of(Workload("1f1b", 4), 4).beside[0] == (0.0, 0.0)
    assert copies_of(Workload("1f1b", 16, bpipe=True), 4).beside[0] == (1.0, 0.0), "what is evicted comes just in time"
