"""The split that is found: as good as trying all of them, and never worse than any move away from it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.partition.layouts.bound import lower_bound_ms
from evenpipe.partition.layouts.layers import Layer
from evenpipe.partition.layouts.search import best_split, moves
from evenpipe.partition.layouts.shape import LayoutError, Pipeline
from evenpipe.partition.layouts.split import Problem

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
    pipeline = Pipeline(stages, chunks, 4)
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


@settings(deadline=None, max_examples=25)
@given(problems())
def test_no_split_has_a_faster_slowest_stage(problem):
    found = best_split(problem)
    fastest = min(slowest(problem, cuts) for cuts in every_split(problem))
    assert found.proven
    assert math.isclose(slowest(problem, found.cuts), fastest)
    assert lower_bound_ms(problem) <= fastest * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
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
