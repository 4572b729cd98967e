"""Stages in processes that recompute and swap: the same gradients, less memory, also beside BPipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenpipe.schedule import Size, build
from tests.reports import reports
from tests.runtime.keeper_cases import NBYTES, WORLD

SCRIPT = Path(__file__).with_name("keeper_cases.py")
NAMES = {"1f1b": ("1f1b", False), "1f1b bpipe": ("1f1b", True), "gpipe": ("gpipe", False), "zb-h1": ("zb-h1", False)}
M = 6


def program(name: str, bpipe: bool, swaps: bool):
    return build(name, Size(WORLD, M), bpipe, swaps=range(WORLD) if swaps else ())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("keeper")
    cases = {
        f"{case} {way}": {"schedule": str(program(*of, way != "all").schedule), "way": way, "gbps": gbps}
        for case, of in NAMES.items()
        for way, gbps in (("all", 0.0), ("kept", 0.0), ("early", 0.01))
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    ranks = reports(SCRIPT, folder, WORLD)
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("way", ["kept", "early"])
def test_gradients_are_those_without(ran, case, way) -> None:
    for plain, kept in zip(ran[f"{case} all"], ran[f"{case} {way}"], strict=True):
        assert "error" not in kept, kept["error"]
        assert kept["gradients"] == plain["gradients"]


@pytest.mark.parametrize("case", [case for case in NAMES if case != "zb-h1"])  # whose second halves hold all till later
def test_what_micro_batches_hold_falls_by_what_they_do_not_keep(ran, case) -> None:
    """Of four tensors two, and the loss saves one more; what comes back is needed for one micro-batch at a time."""
    live = program(*NAMES[case], False).schedule.peak_live
    for stage, (plain, kept) in enumerate(zip(ran[f"{case} all"], ran[f"{case} kept"], strict=True)):
        assert plain["peak"] - kept["peak"] >= (2 * live[stage] - 2) * NBYTES
        assert kept["peak"] < plain["peak"] or live[stage] == 1


@pytest.mark.parametrize("case", NAMES)
def test_what_is_on_the_host_fits_into_what_was_reserved_for_it(ran, case) -> None:
    """Of one swapped tensor a micro-batch, whatever else keeps micro-batches apart: BPipe, split backwards."""
    between = {"1f1b": (4, 3, 2, 1), "1f1b bpipe": (4, 3, 2, 1), "gpipe": (M,) * 4, "zb-h1": (4, 4, 4, 4)}
    for count, kept in zip(between[case], ran[f"{case} kept"], strict=True):
        assert kept["host"] == [count * NBYTES, count * NBYTES]
