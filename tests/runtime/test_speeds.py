"""What is measured at start: the links of a pair, and the device."""

import time
from pathlib import Path

import torch

from evenpipe.runtime.timing import matrix_flops
from tests.reports import reports

SLOW_GBPS = 0.01


def test_each_direction_of_a_pairs_links_is_measured_and_left_clean(tmp_path: Path) -> None:
    """Stage 0 sends slowly; messages that follow arrive as they were sent."""
    script = Path(__file__).with_name("link_speed_cases.py")
    evictor, middle, acceptor = reports(script, tmp_path, 3, each="stage")
    assert SLOW_GBPS / 4 < evictor[0] < SLOW_GBPS < acceptor[0]
    assert evictor[1] < 10
    assert (evictor[2], acceptor[2]) == ([9], [7])
    assert middle[0] is None


def test_the_device_is_as_fast_as_a_product_on_it() -> None:
    shape, times = (64, 256, 512), 40
    left, right = torch.ones(shape[:2]), torch.ones(shape[1:])

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(times):
            left @ right
        return time.perf_counter() - start

    drawn = torch.get_rng_state()
    rounds = [(seconds(), matrix_flops(torch.device("cpu"), torch.float32, *shape)) for _ in range(5)]
    assert torch.equal(torch.get_rng_state(), drawn)
    flops = 2 * 64 * 256 * 512 * times / min(taken for taken, _ in rounds)
    assert flops / 5 < max(measured for _, measured in rounds) < flops * 5
