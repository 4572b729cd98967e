"""A searched order that evicts: the same losses and weights to the bit, and no stage holds more than is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenpipe.order_search.costs import FORMAT, Part, RunCosts, check_caps, held_bytes
from evenpipe.order_search.search import Effort
from evenpipe.simulate.searched import searched
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult

STAGES, MICRO_BATCHES = 4, 8
MODEL: dict[str, Any] = {"layers": 8, "hidden": 32, "seq_length": 32, "stages": STAGES, "micro_batches": MICRO_BATCHES}
#: Of each engine, the run beside which it is seen.
STOCK = {"module": "module", "evenpipe": "megatron"}
HALVES = (True, False)


def costs_of(sizes: list[int], cap: int) -> RunCosts:
    """Even stages that save so much, whose evictions take a forward."""
    times = dict.fromkeys(("forward_ms", "input_gradient_ms", "weight_gradient_ms"), 2.0)
    parts = [Part(**times, saved_bytes=size) for size in sizes]
    caps, speed = [cap] * STAGES, max(sizes) / 2
    return RunCosts(
        format=FORMAT, placement="straight", parts=parts, message_ms=0.6, memory_bytes=caps, peer_bytes_per_ms=speed
    )


TABLES = {
    split: searched(costs_of([100] * STAGES, 300), STAGES, MICRO_BATCHES, Effort(0.1, 2), split=split).program.schedule
    for split in HALVES
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool | None], RunResult]:
    """By engine, of 1F1B in the engine beside which it is seen (None), and of the tables."""
    folder, cases = tmp_path_factory.mktemp("tables"), dict[tuple[str, bool | None], TrainOptions]()
    for engine, stock in STOCK.items():
        cases[engine, None] = TrainOptions.of(**MODEL, iterations=2, engine=stock)
        for split, schedule in TABLES.items():
            path: Path = folder / f"{split}.txt"
            path.write_text(str(schedule))
            run = {"schedule": f"file:{path}", "bpipe": True, "engine": engine}
            cases[engine, split] = TrainOptions.of(**MODEL, iterations=2, **run)
    return dict(zip(cases, run_cases(list(cases.values())), strict=True))


@pytest.mark.parametrize("split", HALVES)
@pytest.mark.parametrize("engine", STOCK)
def test_a_run_by_a_searched_order_that_evicts(
    results: dict[tuple[str, bool | None], RunResult], engine: str, split: bool
) -> None:
    stock, ours, schedule = results[engine, None], results[engine, split], TABLES[split]
    assert (ours.losses, ours.weights_sha256) == (stock.losses, stock.weights_sha256)
    assert [stage.evicted_bytes > 0 for stage in ours.stages] == [count > 0 for count in schedule.evictions]
    assert any(schedule.evictions)
    assert ours.unit_bytes is not None
    sizes = [size for [size] in ours.unit_bytes]
    proven = [max(held) for held in held_bytes(schedule, costs_of(sizes, 0))]
    check_caps(schedule, costs_of(sizes, max(proven)))
    assert max(proven) < 0.9 * stock.stages[0].peak_saved_bytes
    for stage, most in zip(ours.stages, proven, strict=True):
        # Token ids of a micro-batch that is evicted stay behind: they are the data set's.
        assert 0.98 * most < stage.peak_saved_bytes <= 1.001 * most
