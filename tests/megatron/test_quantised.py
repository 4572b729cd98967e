"""Runs in FP8 have the bits of one process that quantises by the same rule: on layers like Transformer Engine's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.train.options import TrainOptions
from tests.oracle.process import Case, Trained, train_cases
from tests.reports import MEGATRON, reports

pytest.importorskip("megatron.core")

from evenpipe.megatron.two_bw.quantised import Quantised
from evenpipe.upstream import UpstreamError
from tests.megatron.quantised_layers import (
    FP8GlobalState,
    FP8GlobalStateManager,
    TransformerEngineBaseModule,
    installed,
    quantise,
)

SCRIPT = Path(__file__).with_name("train_quantised.py")
SIZES = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 32, "lr": 0.01}
SMALL = {**SIZES, "schedule": "2bw", "iterations": 5}
RECOMPUTED = {**SMALL, "recompute": "full"}
#: By stages: a recipe, and options of the trainer.
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("tensorwise", {**SMALL, "micro_batches": 3}),
        ("delayed", {**SMALL, "micro_batches": 2}),
        ("tensorwise", {**RECOMPUTED, "micro_batches": 3}),
        ("delayed", {**RECOMPUTED, "micro_batches": 3}),
    ],
    4: [("tensorwise", {**SMALL, "micro_batches": 4}), ("delayed", {**SMALL, "micro_batches": 5})],
}


@contextmanager
def quantised(recipe: str) -> Iterator[None]:
    """Inside, the oracle's stages are made in FP8, each with the state of a process of its own."""
    from tests.oracle import stages

    make: Any = stages._module

    def of_stage(*args: Any) -> torch.nn.Module:
        module: torch.nn.Module = make(*args)
        quantise(module, recipe, FP8GlobalState())
        return module

    stages._module = of_stage
    with installed():
        yield
    stages._module = make


#: A micro-batch other than 0 is the first. Megatron reads data in the order of forwards.
TABLE = """\
format=evenpipe.schedule/1 name=swapped stages=2 micro_batches=4 chunks=1 batches=1 group_size=1 weight_versions=1 \
bound=2 places=loop
F1 F0 B1 F2 B0 F3 B2 B3
F1 B1 F0 B0 F2 B2 F3 B3
"""
FLUSHED: list[dict[str, Any]] = [
    {"bpipe": True},
    {"schedule": "kfkb", "group_size": 2},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved", "chunks": 2},
    {"schedule": "v-half"},
    {"schedule": "zbv"},
]


def cases_of(stages: int) -> list[tuple[str, dict[str, Any]]]:
    return [(recipe, {**given, "stages": stages}) for recipe, given in CASES[stages]]


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    """What one process trains, by the case."""
    found = {}
    for recipe in ("tensorwise", "delayed"):
        of_recipe = [case for stages in CASES for case in cases_of(stages) if case[0] == recipe]
        trained = train_cases(
            [Case(TrainOptions.of(**given), delay=1) for _, given in of_recipe], partial(quantised, recipe)
        )
        found |= {str(case): one for case, one in zip(of_recipe, trained, strict=True)}
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
@pytest.mark.parametrize("stages", CASES)
def test_runs_have_the_bits_of_one_process(stages: int, expected: dict[str, Trained], tmp_path: Path) -> None:
    """With evaluations, saves and resumes too; those that recompute only so."""
    both = [(*case, True) for case in cases_of(stages)]
    both += [(*case, False) for case in cases_of(stages) if "recompute" not in case[1]]
    found = reports(SCRIPT, tmp_path, stages, str(stages), json.dumps(both), imports=MEGATRON)
    for case, *each in zip(both, *found, strict=True):
        one = expected[str(case[:2])]
        assert [sum(batch) / len(batch) for batch in each[-1]["losses"]] == list(one.losses), case
        weights = "".join(of_rank["weights"] for of_rank in each)
        assert hashlib.sha256(weights.encode()).hexdigest() == one.weights_sha256, case


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
def test_other_schedules_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Weights are quantised before the first forward of each part of the model, whatever micro-batch that is."""
    table = tmp_path / "swapped.txt"
    table.write_text(TABLE)
    given = {**SIZES, "stages": 2, "micro_batches": 4, "iterations": 3, "clip_grad": 0.0}
    first = {"schedule": f"file:{table}"}
    schedules = {"tensorwise": [*FLUSHED, first], "delayed": [*FLUSHED[:1], first]}
    cases = [(recipe, {**given, **schedule}, False) for recipe in schedules for schedule in schedules[recipe]]
    found = reports(SCRIPT, tmp_path, 2, "2", json.dumps(cases), imports=MEGATRON)
    for recipe in schedules:
        [one] = train_cases([Case(TrainOptions.of(**given), delay=0)], partial(quantised, recipe))
        for case, *each in zip(cases, *found, strict=True):
            if case[0] == recipe:
                [losses] = [of_rank["losses"] for of_rank in each if of_rank["losses"][0]]
                assert [sum(batch) / len(batch) for batch in losses] == list(one.losses), case


def test_other_releases_of_the_engine_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Module()
    layer._fp8_workspaces = {}
    with installed():
        Quantised([layer])
        monkeypatch.delattr(FP8GlobalState, "__init__")
        monkeypatch.setattr(FP8GlobalStateManager, "quantization_state", FP8GlobalState())
        with pytest.raises(UpstreamError, match=r"has global_amax_history_buffer elsewhere than in 2\.0 to 2\.18: "):
            Quantised([layer])
        monkeypatch.delattr(TransformerEngineBaseModule, "__init__")
        with pytest.raises(UpstreamError, match=r"TransformerEngineBaseModule\._fp8_workspaces: "):
            Quantised([layer])
    Quantised([torch.nn.Module()])  # without its layers, nothing is asked of it
