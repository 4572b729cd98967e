"""2BW keeps one more copy of the parameters in their own dtype, and g · N / d bytes of gradients that await a step."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.two_bw.gradients import held_gradient_bytes

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
import held_gradients
import live_memory

from tests.reports import MEGATRON, reports

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")


@pytest.fixture(scope="module")
def of_formula(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of eight processes wrote down."""
    folder = tmp_path_factory.mktemp("held_gradients")
    return reports(Path(held_gradients.__file__), folder, held_gradients.WORLD, imports=MEGATRON)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes wrote down, with flushes and with 2BW."""
    folder = tmp_path_factory.mktemp("live_memory")
    return reports(Path(live_memory.__file__), folder, live_memory.WORLD, imports=MEGATRON)


@pytest.mark.long
@pytest.mark.parametrize("replicas", held_gradients.REPLICAS)
@pytest.mark.parametrize("optimizer", held_gradients.OPTIMIZERS)
def test_what_is_held_is_the_formula(of_formula: list[dict[str, Any]], optimizer: str, replicas: int) -> None:
    among = replicas if "distributed" in optimizer else 1
    for rank in of_formula:
        found = rank[f"{optimizer}, {replicas}"]
        dense, experts = found["numbers"]["dense"], found["numbers"]["experts"]
        assert (experts > 0) == ("experts" in optimizer and replicas > 1)
        among_experts = max(1, among // held_gradients.SHARES)
        wanted = held_gradient_bytes(dense, 4, among) + held_gradient_bytes(experts, 4, among_experts)
        assert found["held"] == found["said"] == (wanted if found["stage"] > 0 else 0)
        # The distributed optimizer has each parameter begin at a multiple of 64, and each bucket end at one of 128.
        padding = 63 * len(found["parameters"]) + 127 * found["buckets"] if "distributed" in optimizer else 0
        assert 0 <= dense + experts - sum(found["parameters"]) <= padding


@pytest.mark.parametrize("name", live_memory.CASES)
def test_memory_grows_by_a_version_and_what_has_to_wait(ranks: list[dict[str, Any]], name: str) -> None:
    element = 4 if "fp32" in name else 2
    for rank in ranks:
        flushed, flushless = rank["cases"][name]["1f1b"], rank["cases"][name]["2bw"]
        waits = rank["stage"] > 0 and "without" not in name
        assert flushless["parameter_bytes"] == flushed["parameter_bytes"]
        # The distributed optimizer pads its flat buffers, which are copied whole.
        padding = 0 if "distributed" not in name else 0.02 * flushless["parameter_bytes"]
        assert 0 <= flushless["weight_version_bytes"] - flushless["parameter_bytes"] <= padding
        shards = live_memory.SMALL["data_parallel"] if "distributed" in name else 1
        held = flushless["parameter_bytes"] // element * 4 / shards if waits else 0
        assert 0 <= flushless["held_gradient_bytes"] - held <= (0 if not held else padding * 4 / element / shards)
        grown = flushless["live"] - flushed["live"]
        accounted = flushless["weight_version_bytes"] + flushless["held_gradient_bytes"]
        assert 0 <= grown - accounted <= 256, "a few numbers of the last step"


@pytest.mark.parametrize("name", live_memory.CASES)
def test_gradients_are_reduced_beside_the_next_batch_s_forward(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        noted = rank["cases"][name]["2bw"]["reducing"]
        ended = [action for action, _ in noted]
        for batch in range(1, 4):
            before, first = f"B{3 * batch - 1}", f"B{3 * batch}"
            beside = noted[ended.index(before) + 1 : ended.index(first)]
            forwards = [reducing for action, reducing in beside if action.startswith("F")]
            assert forwards == [True], "one forward comes before the next backward"
            assert dict(noted)[first] is False, "the next batch's gradients have the buffer to themselves"
