"""From a profile to a plan: what it says, what it refuses, and that it can be read again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.finding import can_fit, find_plan, largest_batch
from evenpipe.partition.search.plan import Plan
from tests.partition.profiles import random_profile, transformer

GIB = 1 << 30
EVERY = [
    Workload("gpipe", 4),
    Workload("1f1b", 8),
    Workload("1f1b", 8, bpipe=True),
    Workload("2bw", 8),
    Workload("kfkb", 8, group_size=2),
    Workload("zb-h1", 8),
    Workload("interleaved", 8, chunks=2),
    Workload("interleaved", 8, chunks=2, bpipe=True),
    Workload("v-half", 8),
    Workload("pipedream", 4),
]


@pytest.mark.parametrize("workload", EVERY, ids=lambda case: f"{case.schedule}{'+bpipe' * case.bpipe}")
def test_parts_follow_one_another_and_their_stages_fit(workload: Workload) -> None:
    profile = transformer(8)
    loose = find_plan(profile, workload, 4, 1000 * GIB)
    limit = int(max(part.peak_bytes for part in loose.stages) * 0.97)
    plan = find_plan(profile, workload, 4, limit, "recompute")
    assert plan.stages[0].first_node == 0
    assert plan.stages[-1].last_node == len(profile.nodes) - 1
    assert all(before.last_node + 1 == behind.first_node for before, behind in pairwise(plan.stages))
    assert plan.cuts == tuple(part.last_node for part in plan.stages[:-1])
    assert max(part.peak_bytes for part in plan.stages) <= limit
    assert plan.optimum_ms <= plan.max_stage_ms <= 1.05 * loose.max_stage_ms
    assert plan.workload == workload


def test_a_peak_is_what_is_kept_of_micro_batches_and_what_is_there_beside() -> None:
    for schedule in ("1f1b", "2bw"):
        plan = find_plan(transformer(12), Workload(schedule, 8), 4, 1000 * GIB)
        for stage, part in enumerate(plan.stages):
            assert part.kept_bytes is not None
            assert part.weight_bytes is not None
            assert part.beside_bytes is not None
            kept = (4 - stage) * part.kept_bytes + part.beside_bytes
            assert part.peak_bytes == kept + (part.weight_bytes if schedule == "2bw" else 0)


def test_the_longest_stage_is_within_a_thousandth_of_the_optimum() -> None:
    plan = find_plan(transformer(12), Workload("1f1b", 8), 4, 1000 * GIB)
    assert plan.max_stage_ms <= 1.001 * plan.optimum_ms
    assert plan.binary_ms is not None
    assert plan.nodes_tried < 100


def test_recomputing_and_swapping_are_named_and_bring_the_peak_below_the_limit() -> None:
    profile = transformer(8)
    loose = find_plan(profile, Workload("1f1b", 8), 4, 1000 * GIB)
    limit = max(part.peak_bytes for part in loose.stages) // 2
    plan = find_plan(profile, Workload("1f1b", 8), 4, limit, "swap+recompute", 0.5)
    first = plan.stages[0]
    assert first.peak_bytes <= limit < first.peak_bytes_before
    assert first.swap
    names = [node.name for node in profile.nodes]
    assert {*first.recompute, *first.swap, *first.drop} <= set(names[: first.last_node + 1])


def test_a_plan_is_a_document_that_is_read_again(tmp_path: Path) -> None:
    plan = find_plan(transformer(3), Workload("gpipe", 2), 2, 1000 * GIB)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["format"] == "evenpipe.partition/1"
    assert {"search_ms", "nodes_tried", "max_stage_ms", "optimum_ms", "cuts"} <= set(document)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PartitionError, match=r"other.json: no evenpipe.partition/1: "):
        Plan.read(tmp_path / "other.json")


def test_a_document_of_an_older_release_is_read(tmp_path: Path) -> None:
    """Its `link_gbps` is the link to the host, and it says nothing of links between stages."""
    document = json.loads(find_plan(transformer(3), Workload("gpipe", 2), 2, 1000 * GIB, "none", 7.0).model_dump_json())
    for name in ("algorithm", "crossings", "batch_ms", "layers_batch_ms", "front"):
        del document[name]
    document["link_gbps"] = document.pop("host_gbps")
    (tmp_path / "old.json").write_text(json.dumps(document))
    plan = Plan.read(tmp_path / "old.json")
    assert plan.host_gbps == 7.0
    assert not plan.crossings
    assert not plan.warnings


def test_a_plan_of_another_model_is_refused() -> None:
    plan = find_plan(transformer(3), Workload("gpipe", 2), 2, 1000 * GIB)
    plan.check(transformer(3))
    with pytest.raises(PartitionError, match="the plan is of micro_batch_size 1, not 2: make one of this model"):
        plan.check(transformer(3, micro_batch_size=2))


def test_more_stages_than_cuts_are_refused() -> None:
    profile = random_profile(3, 12, cuts=0.2)
    cuts = sum(node.cut_allowed for node in profile.nodes[:-1])
    with pytest.raises(PartitionError, match=f"stages=8: 8 stages need 7 cuts, and the model has {cuts} valid ones"):
        find_plan(profile, Workload("gpipe", 8), 8, GIB)


@pytest.mark.parametrize("optimize", ["none", "recompute"])
def test_a_limit_that_nothing_fits_into_is_refused_with_one_that_is_enough(optimize: str) -> None:
    profile, workload = transformer(4), Workload("1f1b", 4)
    with pytest.raises(PartitionError, match=r"^memory_gib=0.0625: no partition fits: give at least [\d.]+") as refused:
        find_plan(profile, workload, 2, GIB // 16, optimize)  # type: ignore[arg-type]
    least = float(str(refused.value).split("at least ")[1].split(",")[0])
    problem = Problem.of(profile, workload, 2, int(least * GIB), optimize)  # type: ignore[arg-type]
    assert can_fit(problem)
    assert not can_fit(problem.within(int(least * 0.98 * GIB)))


def test_the_largest_batch_is_the_last_that_fits() -> None:
    def fits(size: int) -> bool:
        return can_fit(Problem.of(transformer(4, micro_batch_size=size), Workload("1f1b", 4), 2, 8 * GIB))

    largest = largest_batch(
        lambda size: transformer(4, micro_batch_size=size),
        lambda profile: can_fit(Problem.of(profile, Workload("1f1b", 4), 2, 8 * GIB)),
    )
    assert fits(largest)
    assert not fits(largest + 1)
    assert largest > 2
    assert largest_batch(transformer, lambda profile: False) == 0


def test_the_largest_batch_is_sought_beyond_one_that_happens_not_to_fit() -> None:
    """Memory optimisation need not find picks for each size: 95 and 96 do not fit here, and all others up to 99 do."""

    def fits(profile: Profile) -> bool:
        size = profile.origin.micro_batch_size
        return size <= 99 and size not in (95, 96)

    assert largest_batch(lambda size: transformer(1, micro_batch_size=size), fits) == 99
    assert largest_batch(lambda size: transformer(1, micro_batch_size=size), fits, step=10) == 90
    assert largest_batch(lambda size: transformer(1, micro_batch_size=size), fits, most=64) == 64
