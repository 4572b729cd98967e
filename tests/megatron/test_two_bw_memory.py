"""2BW keeps one more copy of the model's parameters in their own dtype, and the gradients that a step waits with."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
from live_memory import CASES, SMALL, WORLD

from tests.reports import reports

SCRIPT = Path(__file__).with_name("live_memory.py")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("live_memory")
    return reports(SCRIPT, folder, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_memory_grows_by_a_version_and_what_has_to_wait(ranks: list[dict[str, Any]], name: str) -> None:
    element = 4 if "fp32" in name else 2
    for rank in ranks:
        flushed, flushless = rank["cases"][name]["1f1b"], rank["cases"][name]["2bw"]
        waits = rank["stage"] > 0 and "without" not in name
        assert flushless["parameter_bytes"] == flushed["parameter_bytes"]
        # The distributed optimizer pads its flat buffers, which are copied whole.
        padding = 0 if "distributed" not in name else 0.02 * flushless["parameter_bytes"]
        assert 0 <= flushless["weight_version_bytes"] - flushless["parameter_bytes"] <= padding
        shards = SMALL["data_parallel"] if "distributed" in name else 1
        held = flushless["parameter_bytes"] // element * 4 / shards if waits else 0
        assert 0 <= flushless["held_gradient_bytes"] - held <= (0 if not held else padding * 4 / element / shards)
        grown = flushless["live"] - flushed["live"]
        accounted = flushless["weight_version_bytes"] + flushless["held_gradient_bytes"]
        assert 0 <= grown - accounted <= 256, "a few numbers of the last step"


@pytest.mark.parametrize("name", CASES)
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
