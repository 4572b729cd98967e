"""2bw holds g · N / d bytes of gradients: a replica's shard with ZeRO-1 and in bf16, all in fp32 and fp16 without."""

from __future__ import annotations

import math
from typing import Any

import pytest

from evenpipe.two_bw.gradients import held_gradient_bytes
from tests.deepspeed.job import run_cases

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gate

VOCABULARY, HIDDEN = 64, 32  # of train_tiny's layers

_ZERO = {"zero_optimization": {"stage": 1}}
_BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
_KINDS: dict[str, dict[str, Any]] = {
    "PlainGradients": {"gradient_clipping": 0.5},
    "ShardedGradients": _ZERO,
    "FlatGradients": {**_BF16, **_ZERO, "data_types": {"grad_accum_dtype": "fp32"}},
}
_REPLICAS = {"PlainGradients": (2,), "ShardedGradients": (1, 2, 4), "FlatGradients": (2, 4)}
_RANKS = 8
_RUNS = [(kind, replicas, False) for kind in _KINDS for replicas in _REPLICAS[kind]] + [("FlatGradients", 4, True)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What every rank holds in each of the runs."""
    cases = [
        {"stages": _RANKS // replicas, "tied": tied, "config": {**_KINDS[kind], "evenpipe": {"schedule": "2bw"}}}
        for kind, replicas, tied in _RUNS
    ]
    return run_cases("held_gradients.py", cases, tmp_path_factory.mktemp("held_gradients"))[0]


@pytest.mark.parametrize("run", range(len(_RUNS)))
def test_what_is_held_is_the_formula(results: list[list[dict[str, Any]]], run: int) -> None:
    kind, replicas, tied = _RUNS[run]
    sharded = kind != "PlainGradients"
    for rank in results[run]:
        assert rank["gradients"] == kind
        # DeepSpeed has every shard begin at an even number.
        even = 2 * replicas if sharded else 1
        padded = math.ceil(rank["parameters"] / even) * even
        wanted = held_gradient_bytes(padded, 4, replicas if sharded else 1) + rank["tied"]
        if rank["stage"] == 0:
            assert rank["said"] == 0
        else:
            assert rank["held"] == rank["said"] == wanted
        assert tied or rank["tied"] == 0


def test_a_tied_weight_s_gradient_waits_whole_for_its_sum(results: list[list[dict[str, Any]]]) -> None:
    """But where the shard has all of it."""
    at_its_end = [rank["tied"] for rank in results[-1] if rank["stage"] == 1]
    assert sorted(at_its_end) == [0, *[4 * VOCABULARY * HIDDEN] * 3]
