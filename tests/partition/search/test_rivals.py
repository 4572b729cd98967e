"""vPipe as it is measured against: never ahead of what ours finds, and its recomputed layers save what they should."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.exact import best_partition
from evenpipe.partition.search.finding import largest_batch
from tests.partition.profiles import problem_of, transformer

GIB = 1 << 30


@pytest.fixture(scope="module")
def rivals() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`rivals.vpipe` and `rivals.layers`, which benchmarks see beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
        yield importlib.import_module("rivals.vpipe"), importlib.import_module("rivals.layers")


def problem(size: int, mode: str, stages: int, optimize: Optimize) -> Problem:
    profile = transformer(5, hidden_mib=2.0, micro_batch_size=size)
    return problem_of(profile, Workload.of_mode(mode, stages), stages, GIB, optimize, 0.5)


@pytest.mark.parametrize(
    ("mode", "stages", "optimize"),
    [("sync", 4, "swap+recompute"), ("async", 4, "swap+recompute"), ("async", 2, "recompute")],
)
def test_its_largest_batch_is_never_larger_than_ours(rivals, mode, stages, optimize) -> None:  # type: ignore[no-untyped-def]
    vpipe, layers = rivals

    def theirs(size: int) -> bool:
        part = problem(size, mode, stages, optimize)
        return vpipe.vpipe(layers.Layers(part.costs.profile), part) is not None

    def ours(size: int) -> bool:
        return best_partition(problem(size, mode, stages, optimize), 0) is not None

    batch = {name: largest_batch(lambda size: size, fits) for name, fits in (("vPipe", theirs), ("ours", ours))}
    assert 0 < batch["vPipe"] <= batch["ours"]


def test_a_layer_that_is_recomputed_is_not_kept(rivals) -> None:  # type: ignore[no-untyped-def]
    """Of a stage that must save memory, each layer computed again takes what it alone holds from what is kept."""
    vpipe, layers = rivals
    part = problem(4, "async", 2, "recompute")
    model = layers.Layers(part.costs.profile)
    stage = vpipe._Layered(model, part, 0, 0, model.count - 1)
    kept = [stage._weighed([], list(range(count))).kept for count in range(4)]
    assert all(fewer < more for more, fewer in pairwise(kept))
    first = stage._weighed([], [1])
    assert first.kept == kept[0] - sum(part.graph.nbytes[one] for one in first.drop)
    assert first.drop
