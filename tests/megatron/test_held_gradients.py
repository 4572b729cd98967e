"""2BW holds g · N / d bytes of gradients: a rank's shard, or all of them without the distributed optimizer."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.two_bw.gradients import held_gradient_bytes

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
from held_gradients import OPTIMIZERS, REPLICAS, SHARES, WORLD

from tests.reports import reports

SCRIPT = Path(__file__).with_name("held_gradients.py")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("held_gradients")
    return reports(SCRIPT, folder, WORLD)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_held_is_the_formula(ranks: list[dict[str, Any]], optimizer: str, replicas: int) -> None:
    among = replicas if "distributed" in optimizer else 1
    for rank in ranks:
        found = rank[f"{optimizer}, {replicas}"]
        dense, experts = found["numbers"]["dense"], found["numbers"]["experts"]
        assert (experts > 0) == ("experts" in optimizer and replicas > 1)
        wanted = held_gradient_bytes(dense, 4, among) + held_gradient_bytes(experts, 4, max(1, among // SHARES))
        assert found["held"] == found["said"] == (wanted if found["stage"] > 0 else 0)
        # The distributed optimizer has each parameter begin at a multiple of 64, and each bucket end at one of 128.
        padding = 63 * len(found["parameters"]) + 127 * found["buckets"] if "distributed" in optimizer else 0
        assert 0 <= dense + experts - sum(found["parameters"]) <= padding
