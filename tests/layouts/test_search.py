"""The split that is found: as good as trying all of them, and never worse than any move away from it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.layouts.gpt import LayoutError, Pipeline
from evenpipe.layouts.layers import Layer
from evenpipe.layouts.search import best_split, lower_bound_ms, moves
from evenpipe.layouts.split import Problem

milliseconds = st.integers(1, 30).map(float)


@st.composite
def problems(draw):
    """A model of few layers of two kinds, on at most four parts."""
    stages, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    halves = draw(st.sampled_from([["t"], ["t", ""]])) if chunks == 1 else ["t"]
    dense, experts = (
        [
            Layer(half, kind, draw(milliseconds), draw(milliseconds), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
            for half in halves
        ]
        for kind in ("dense", "experts")
    )
    most = 6 // len(halves)
    layers = draw(st.lists(st.sampled_from([dense, experts]), min_size=max(1, stages * chunks - 2), max_size=most))
    middle = [half for layer in layers for half in layer]
    words = draw(st.integers(0, 9))
    mtp = [Layer("m", "mtp", draw(milliseconds), draw(milliseconds), 3, 3, words)] * draw(st.integers(0, 1))
    first = Layer("E", "embedding", draw(milliseconds), 0.0, 1, 1, words)
    last = Layer("L", "loss", draw(milliseconds), draw(milliseconds), 5, 2, words)
    pipeline = Pipeline(stages, chunks, 4, draw(st.sampled_from([None, "v-half"])) if chunks == 2 else None)
    return Problem((first, *middle, *mtp, last), pipeline, draw(st.booleans()))


def every_split(problem):
    ends = range(1, len(problem.layers))
    rows = list(itertools.combinations_with_replacement(ends, problem.pipeline.parts - 1))
    rows = np.array(rows, np.int64).reshape(len(rows), -1)
    return [tuple(row) for row in rows[problem.allowed(rows)].tolist()]


def slowest(problem, cuts):
    return max(stage.total_ms for stage in problem.costs(cuts))


def most_bytes(problem, cuts):
    return max(stage.peak_bytes for stage in problem.costs(cuts))


@given(problems())
def test_no_split_has_a_faster_slowest_stage(problem):
    found = best_split(problem)
    fastest = min(slowest(problem, cuts) for cuts in every_split(problem))
    assert found.proven
    assert math.isclose(slowest(problem, found.cuts), fastest)
    assert lower_bound_ms(problem) <= fastest * (1 + 1e-9)


@given(problems(), st.integers(0, 100))
def test_within_a_memory_limit_too(problem, limit):
    fitting = [cuts for cuts in every_split(problem) if most_bytes(problem, cuts) <= limit]
    if not fitting:
        with pytest.raises(LayoutError, match="no layout fits"):
            best_split(problem, limit)
        return
    found = best_split(problem, limit)
    assert most_bytes(problem, found.cuts) <= limit
    assert math.isclose(slowest(problem, found.cuts), min(slowest(problem, cuts) for cuts in fitting))


def fitted_by_hand(problem, cuts, limit):
    """The slowest stage where each computes the fewest layers of each chunk again to fit; None: it does not."""
    ends, slowest_ms = [0, *cuts, len(problem.layers)], 0.0
    for stage in range(problem.pipeline.stages):
        parts = [problem.layers[first:end] for first, end in itertools.pairwise(ends)]
        again = [[layer for layer in part if layer.input_bytes is not None] for part in parts]
        for count in range(7):
            chosen = [row[:count] if problem.owners[k] == stage else [] for k, row in enumerate(again)]
            saved = [
                sum(layer.saved_bytes for layer in part) - sum(layer.saved_bytes - layer.input_bytes for layer in some)
                for part, some in zip(parts, chosen, strict=True)
            ]
            own = [layer for part in problem.parts[stage] for layer in parts[part]]
            words = max((layer.words_bytes for layer in own), default=0)
            held = sum(layer.static_bytes for layer in own) + words + (problem.live[stage] @ saved).max()
            if held <= limit:
                extra = sum(layer.forward_ms for some in chosen for layer in some)
                slowest_ms = max(slowest_ms, sum(layer.total_ms for layer in own) + extra)
                break
        else:
            return None
    return slowest_ms


@given(problems(), st.integers(0, 60), st.integers(0, 3))
def test_stages_that_may_compute_layers_again_are_found_too(problem, limit, kept):
    if any(not layer.symbols for layer in problem.layers):
        return
    layers = tuple(
        dataclasses.replace(layer, input_bytes=min(kept, layer.saved_bytes))
        if layer.kind in ("dense", "experts")
        else layer
        for layer in problem.layers
    )
    problem = Problem(layers, problem.pipeline, problem.mtp_apart, recompute_within=limit)
    times = {cuts: fitted_by_hand(problem, cuts, limit) for cuts in every_split(problem)}
    fitting = {cuts: ms for cuts, ms in times.items() if ms is not None}
    if not fitting:
        with pytest.raises(LayoutError, match="no layout fits"):
            best_split(problem, limit)
        return
    found = best_split(problem, limit)
    assert math.isclose(slowest(problem, found.cuts), fitting[found.cuts])
    if problem.pipeline.chunks == 1 or found.proven:
        assert math.isclose(fitting[found.cuts], min(fitting.values()))


@pytest.mark.parametrize(
    ("stages", "chunks"),
    [(8, 1), *(pytest.param(*size, marks=pytest.mark.long) for size in [(8, 2), (4, 4)])],
)
def test_large_models_are_no_worse_than_the_even_split_and_than_any_move(stages, chunks):
    """Three dense layers, then experts, an MTP layer and a large vocabulary."""
    row = [("E", 1, 0), *[("t", 10, 20)] * 3, *[("t", 13, 25)] * 29, ("m", 20, 33), ("L", 21, 40)]
    layers = tuple(Layer(symbol, f"{symbol}{forward}", float(forward), float(back)) for symbol, forward, back in row)
    pipeline = Pipeline(stages, chunks, 16)
    problem = Problem(layers, pipeline, True)
    found = best_split(problem).cuts
    away = [tuple(cuts) for cuts in moves(problem, found).tolist()]
    assert slowest(problem, found) < slowest(problem, problem.even)
    assert len(away) > stages
    assert all(slowest(problem, found) <= slowest(problem, cuts) for cuts in away)


def test_equal_stages_make_equal_parts():
    """An interleaved schedule waits for its slowest part, whatever its stage does else."""
    layers = (Layer("E", "embedding", 0, 0), *[Layer("t", "dense", 1, 2)] * 16, Layer("L", "loss", 0, 0))
    pipeline = Pipeline(2, 4, 8)
    problem = Problem(layers, pipeline, True)
    assert best_split(problem).cuts == problem.even == (3, 5, 7, 9, 11, 13, 15)
