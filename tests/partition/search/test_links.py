"""Plans with messages between stages: never slower than the fastest layer cuts, by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from evenpipe.descriptions import cluster, device
from evenpipe.partition.dawnpiper.bipar import bipar
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import build as build_model
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import Profiles
from evenpipe.partition.search.batch_clock import BatchClock, StageLinks
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import trace, weightless
from evenpipe.schedule import Size, build, find
from evenpipe.simulate import simulate
from tests.partition.profiles import PLENTY, problem_of, transformer

LATENCY_MS = 0.025
MODELS = {"bert-large": 8, "gpt2-large": 4, "t5-v1.1-large": 4, "amoebanet-d": 64}
#: Up to so many layer cuts are all simulated; of more, the best is climbed to from several places.
ALL = 30_000


def simulated_ms(plan: Plan) -> float:
    """A batch of the plan; of a schedule that streams, one of several without a flush."""
    batches = 3 if "stream" in find(plan.schedule).needs else 1
    size = Size(plan.stage_count, plan.micro_batches, plan.chunks, plan.group_size, batches)
    return simulate(build(plan.schedule, size, bpipe=plan.bpipe), plan.costs).makespan_ms / batches


def fastest_layers_ms(profile: Profile, workload: Workload, stages: int, links: StageLinks) -> float:
    """Of layer cuts in unlimited memory, independently of what the search has of them."""
    problem = problem_of(profile, workload, stages)
    clock, layers = BatchClock(problem, workload, links), np.array(problem.costs.layers)

    def ms(inner: Sequence[Sequence[int]]) -> np.ndarray:
        rows = layers[np.pad(np.array(inner), ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(layers) - 1)))]
        taken: np.ndarray = clock.ms(rows, np.zeros((len(rows), stages)))[:, -1]
        return taken

    every = list(combinations(range(1, len(layers) - 1), stages - 1))[: ALL + 1] if len(layers) < 60 else []
    if 0 < len(every) <= ALL:
        return float(ms(every).min())
    draw, best_ms = np.random.default_rng(0), np.inf
    for _ in range(6):  # from six random places, any two boundaries move at once
        at = sorted((1 + draw.choice(len(layers) - 2, stages - 1, replace=False)).tolist())
        found = float(ms([at])[0])
        while True:
            pairs = product(combinations(range(stages - 1), 2), range(-2, 3), range(-2, 3))
            moved = [[k + a * (n == i) + b * (n == j) for n, k in enumerate(at)] for (i, j), a, b in pairs]
            valid = [one for one in moved if all(x < y for x, y in pairwise((0, *one, len(layers) - 1)))]
            taken = ms(valid)
            if taken.min() >= found:
                break
            found, at = float(taken.min()), valid[int(taken.argmin())]
        best_ms = min(best_ms, found)
    return float(best_ms)


@pytest.mark.parametrize("gbps", [0.5, 4.0, 300.0])
@pytest.mark.parametrize(
    "workload", [Workload("1f1b", 4), Workload("1f1b", 16), Workload("2bw", 4), Workload("pipedream", 4)], ids=str
)
def test_a_plan_is_never_slower_than_the_fastest_layer_cuts(workload: Workload, gbps: float) -> None:
    profile, links = transformer(12), StageLinks(gbps, LATENCY_MS)
    plan = find_plan(profile, workload, 4, PLENTY, links=links)
    fastest_ms = fastest_layers_ms(profile, workload, 4, links)
    assert plan.batch_ms is not None
    assert plan.batch_ms <= fastest_ms * (1 + 1e-9)
    assert plan.layers_batch_ms == pytest.approx(fastest_ms)
    if workload.schedule != "pipedream":
        assert simulated_ms(plan) == pytest.approx(plan.batch_ms)


def test_without_links_messages_are_free_and_plans_lose_to_layers_on_slow_ones() -> None:
    """What links are for: the evenest cuts lie inside layers, where several times as much is sent."""
    profile, workload, links = transformer(12), Workload("1f1b", 16), StageLinks(2.0, LATENCY_MS)
    free = find_plan(profile, workload, 4, PLENTY)
    assert free.batch_ms is None
    assert not free.crossings
    problem = problem_of(profile, workload, 4)
    clock, costs = BatchClock(problem, workload, links), problem.costs
    cuts = [0, *(int(np.searchsorted(costs.starts, cut + 1)) for cut in free.cuts), costs.last]
    taken_ms = float(clock.ms(np.array([cuts]), np.zeros((1, 4)))[0, -1])
    plan = find_plan(profile, workload, 4, PLENTY, links=links)
    assert plan.batch_ms is not None
    assert plan.batch_ms < 0.97 * taken_ms
    assert sum(one.nbytes for one in plan.crossings) < costs.cut_bytes[cuts].sum()


def test_the_front_has_fewer_bytes_for_each_longer_stage() -> None:
    plan = find_plan(transformer(12), Workload("1f1b", 8), 4, PLENTY, links=StageLinks(6.0, LATENCY_MS))
    slowest = [one.max_stage_ms for one in plan.front]
    sent = [one.sent_bytes for one in plan.front]
    assert slowest == sorted(slowest)
    assert sent == sorted(sent, reverse=True)
    assert len(plan.front) > 1
    assert plan.algorithm is not None


@pytest.mark.parametrize("workload", [Workload("interleaved", 8, 2), Workload("1f1b", 8, bpipe=True)], ids=str)
def test_stages_with_several_parts_and_partners_send_over_links_too(workload: Workload) -> None:
    plan = find_plan(transformer(12), workload, 4, PLENTY, links=StageLinks(6.0, LATENCY_MS))
    assert plan.batch_ms is not None
    assert simulated_ms(plan) == pytest.approx(plan.batch_ms)


@pytest.mark.parametrize("optimize", ["recompute", "swap+recompute"])
def test_layer_cuts_that_have_to_save_memory_are_among_the_candidates(optimize: Optimize) -> None:
    profile, workload, links = transformer(8), Workload("1f1b", 8), StageLinks(2.0, LATENCY_MS)
    loose = find_plan(profile, workload, 4, PLENTY, links=links)
    limit = int(max(part.peak_bytes for part in loose.stages) * 0.6)
    plan = find_plan(profile, workload, 4, limit, optimize, 0.5, links=links)
    assert max(part.peak_bytes for part in plan.stages) <= limit
    assert plan.batch_ms is not None
    problem = problem_of(profile, workload, 4, limit, optimize, 0.5)
    clock, layers = BatchClock(problem, workload, links), problem.costs.layers
    for inner in ((2, 4, 6), (1, 3, 6), (2, 4, 7)):
        cuts = [layers[number] for number in (0, *inner, len(layers) - 1)]
        fits = problem.fits_of(cuts)
        if max(problem.peaks_of(cuts, fits)) <= limit:
            taken = clock.ms(np.array([cuts]), np.array([[one.extra_ms for one in fits]]))
            assert plan.batch_ms <= taken[0, -1] * (1 + 1e-9)


def test_slow_messages_are_warned_of_by_condition_2() -> None:
    profile, workload = transformer(12), Workload("1f1b", 8)
    assert not find_plan(profile, workload, 4, PLENTY, links=StageLinks(300.0)).warnings
    (said,) = find_plan(profile, workload, 4, PLENTY, links=StageLinks(0.05)).warnings
    assert "condition 2 of DawnPiper's Theorem 4.1" in said


def test_links_between_nodes_are_those_of_the_cluster() -> None:
    links = StageLinks.of(cluster("2x4-h100"))
    assert links.between(0, 3) == links.between(5, 4) == (450.0, 0.025)
    assert links.between(3, 4)[0] == cluster("2x4-h100").node_gbps


def test_long_batches_are_counted_on_from_shorter_ones() -> None:
    profile, links = transformer(12), StageLinks(6.0, LATENCY_MS)
    plan = find_plan(profile, Workload("1f1b", 203), 4, PLENTY, links=links)
    assert plan.batch_ms == pytest.approx(simulated_ms(plan), rel=1e-3)


@cache
def real(model: str) -> Profile:
    def graph_of(size: int):  # type: ignore[no-untyped-def]
        with weightless():
            example = build_model(model, size)
        return trace(example.model, example.inputs)

    return Profiles(graph_of, Roofline(device("a100-40gb")), model).at(MODELS[model])


@pytest.mark.long
@pytest.mark.parametrize(("stages", "gbps"), [(4, 6), (4, 25), (4, 300), (8, 25)])
@pytest.mark.parametrize("model", MODELS)
def test_of_the_papers_models_either(model: str, stages: int, gbps: float) -> None:
    for workload in (Workload(name, times * stages) for name in ("1f1b", "2bw") for times in (1, 2, 4)):
        links = StageLinks(gbps, LATENCY_MS)
        plan = find_plan(real(model), workload, stages, PLENTY, links=links)
        fastest_ms = fastest_layers_ms(real(model), workload, stages, links)
        assert plan.batch_ms is not None
        assert plan.batch_ms <= fastest_ms * (1 + 1e-9), workload
        assert simulated_ms(plan) <= fastest_ms * (1 + 1e-3), workload


@pytest.mark.long
def test_between_the_balance_points_of_bert_are_fewer_than_100_places_on_four_stages() -> None:
    """φ, as DawnPiper §4.2 has it; on eight stages it is more."""
    for stages, below in ((4, True), (8, False)):
        problem = problem_of(real("bert-large"), Workload.of_mode("async", stages), stages, 40 * 10**9)
        found = bipar(problem, most_parts=300)
        assert (found.widest < 100) == below
