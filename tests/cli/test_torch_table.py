"""A table that is written for torch is one that torch.distributed.pipelining reads, and trains with the same bits."""

import json
from pathlib import Path

import pytest
import torch

from evenpipe.cli.schedule import torch_csv
from evenpipe.schedule import ScheduleError, Size, build
from tests.cli import torch_table_cases
from tests.reports import reports

STAGES, MICRO_BATCHES = 2, 4
CHUNKS = {
    "1f1b": 1,
    "gpipe": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved": 2,
    "v-half": 2,
    "zbv": 2,
    "dualpipev": 2,
    "interleaved-zb": 2,
}
CASES = {name: build(name, Size(STAGES, MICRO_BATCHES, chunks)).schedule for name, chunks in CHUNKS.items()}


def without_a_pipeline(parts: int) -> tuple[list[str], dict[str, list[str]]]:
    """Losses, and gradients by position."""
    modules = [torch_table_cases.part(position) for position in range(parts)]
    losses = []
    for share in torch_table_cases.batch(MICRO_BATCHES).chunk(MICRO_BATCHES):
        value = share
        for module in modules:
            value = module(value)
        loss = torch.nn.functional.mse_loss(value, share)
        loss.backward()
        losses.append(loss.item().hex())
    return losses, {str(at): torch_table_cases.gradients(module) for at, module in enumerate(modules)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    folder = tmp_path_factory.mktemp("torch-table")
    cases = {}
    for name, schedule in CASES.items():
        (folder / f"{name}.csv").write_text(torch_csv(schedule))
        owner = {position: place.stage for position, place in enumerate(schedule.places.order)}
        cases[name] = {"owner": owner, "micro_batches": MICRO_BATCHES}
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(torch_table_cases.__file__)
    return reports(script, folder, STAGES, str(STAGES))


@pytest.mark.parametrize("name", CASES)
def test_torch_trains_by_it_as_without_a_pipeline(name: str, outcomes: list[dict[str, dict]]) -> None:
    losses, gradients = without_a_pipeline(STAGES * CASES[name].chunks)
    shares = [outcome[name] for outcome in outcomes]
    assert [share["losses"] for share in shares if share["losses"]] == [losses]
    assert {at: found for share in shares for at, found in share["gradients"].items()} == gradients


@pytest.mark.parametrize(("name", "bpipe"), [("1f1b", True), ("2bw", False)])
def test_what_torch_has_no_action_for_is_refused(name: str, bpipe: bool) -> None:
    with pytest.raises(ScheduleError, match="torch's tables have compute only"):
        torch_csv(build(name, Size(4, 8), bpipe).schedule)
