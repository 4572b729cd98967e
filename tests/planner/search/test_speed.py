"""A thousand GPUs are planned for in seconds, ten thousand within a minute, by few simulations."""

from __future__ import annotations

import time

import pytest

from evenpipe.cli.plan import engine_of
from evenpipe.planner.descriptions import cluster, model
from evenpipe.planner.estimate import framework_of
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import search
from evenpipe.schedule import own

# A core of a shared machine is at times half as fast as it is at others.
_TRIES = 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "nodes", "samples", "limit_s"),
    [
        ("gpt3-175b", "128x8-a100-80gb", 1536, 15),
        ("llama3-405b", "128x8-h100", 1024, 15),
        ("llama3-405b", "1280x8-h100", 2560, 60),
        ("gpt3-175b", "1280x8-a100-80gb", 10240, 60),
        ("mixtral-8x7b", "128x8-h100", 1024, 15),
        ("deepseek-v3", "128x8-h100", 2048, 15),
        ("deepseek-v3", "1280x8-h100", 15360, 60),
    ],
)
def test_large_clusters_on_one_core(name: str, nodes: str, samples: int, limit_s: float) -> None:
    of, where = model(name), cluster(nodes)
    named = framework_of(of, where)
    question = Question(of, where, samples, engine_of(named), own(), named)
    taken = []
    while len(taken) < _TRIES and min(taken, default=limit_s) >= limit_s:
        started = time.process_time()
        found = search(question, top=5)
        taken.append(time.process_time() - started)
    assert min(taken) < limit_s
    assert found.simulated < 0.02 * found.considered
