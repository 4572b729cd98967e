"""What is predicted on the meta device is what real training holds."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from evenpipe.runtime.communicators import link_bytes
from evenpipe.schedule import links, loop
from evenpipe.train.machine import PlannedRun, ProfileError, stage_memories, stage_memory
from evenpipe.train.options import TrainOptions
from evenpipe.tuner.group_memory import StageMemory, unit_bytes
from evenpipe.tuner.grouped import Candidate, GroupedSchedule
from tests.reports import MEGATRON, reports
from tests.selected import marked, selected

sys.path.insert(0, str(Path(__file__).parent))
from measured_memory import CASES, FOUR, LONG, WORLD

GPT3 = PlannedRun.of(layers=96, hidden=12288, heads=96, seq_length=2048, stages=8, tensor_parallel=2, data_parallel=32)
DROPOUT = TrainOptions.of(**FOUR, dropout=0.1)
SCRIPT = Path(__file__).with_name("measured_memory.py")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each process wrote down of the cases that are looked at."""
    folder = tmp_path_factory.mktemp("measured_memory")
    names = json.dumps(sorted(selected(request, "name")))
    return reports(SCRIPT, folder, WORLD, names, imports=MEGATRON)


@pytest.fixture(scope="module")
def predicted(request: pytest.FixtureRequest) -> dict[str, tuple[StageMemory, ...]]:
    cases = {name: TrainOptions.of(**CASES[name]) for name in selected(request, "name")}
    cases |= {"GPT-3": GPT3, "dropout": DROPOUT}
    return dict(zip(cases, stage_memories(list(cases.values()), "cpu"), strict=True))


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_saved_activations_peak_as_predicted(
    measured: list[dict[str, Any]], predicted: dict[str, tuple[StageMemory, ...]], name: str
) -> None:
    options, stages = TrainOptions.of(**CASES[name]), predicted[name]
    assert isinstance(options.group_size, int)
    candidate = Candidate(options.group_size, options.micro_batch_size, options.micro_batches)
    schedule = GroupedSchedule(options.programs, len(stages))
    peaks = schedule.saved_bytes([unit_bytes(stage, candidate.b) for stage in stages], candidate)
    for rank in measured:
        held = rank[name]
        peak = peaks[held["stage"]] + stages[held["stage"]].shared_bytes
        if options.precision == "fp32":
            # An acceptor's slots start at even addresses.
            assert 0 <= held["saved"] - peak <= (512 if options.bpipe else 0)
        else:
            # In half precision layer norms keep their statistics in it on CPU, and in fp32 on CUDA and meta.
            assert 0 <= peak - held["saved"] <= 0.005 * peak


@pytest.mark.parametrize("name", marked([name for name in CASES if "BPipe" not in name], LONG))
def test_what_stays_is_what_is_predicted(
    measured: list[dict[str, Any]], predicted: dict[str, tuple[StageMemory, ...]], name: str
) -> None:
    for rank in measured:
        held = rank[name]
        stage = predicted[name][held["stage"]]
        # Between batches Megatron's transformer block still has its last input, and that its gradient.
        last_input = 2 * stage.message_bytes if held["stage"] else 0
        samples = CASES[name].get("micro_batch_size", 1)
        accounted = stage.static_bytes + samples * (stage.workspace_bytes + last_input)
        assert 0 <= held["live"] - accounted <= 256, "a few numbers of the last step"


def test_a_model_of_175_billion_parameters_takes_no_memory(predicted: dict[str, tuple[StageMemory, ...]]) -> None:
    hidden, ranks = GPT3.hidden, GPT3.tensor_parallel
    # Of each layer, what is cut into shards, and the biases and norms that every rank has whole.
    layer = (12 * hidden**2 + 7 * hidden) // ranks + 6 * hidden
    first, middle, *_ = predicted["GPT-3"]
    assert middle.static_bytes == 12 * layer * (4 + 4 + 8)
    assert first.static_bytes == middle.static_bytes + (256 // ranks + 2048) * hidden * 16
    assert first.sample_bytes > 2**30
    assert first.message_bytes == 2048 * hidden * 4
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak_kib < 2 * 2**20


@pytest.mark.long
def test_on_cuda_dropout_keeps_a_byte_an_element_and_links_take_memory(
    predicted: dict[str, tuple[StageMemory, ...]],
) -> None:
    on_cuda, on_cpu = stage_memory(DROPOUT, "cuda")[1], predicted["dropout"][1]
    taken = link_bytes(links(loop(DROPOUT.stages)), 1)
    assert on_cuda.static_bytes - on_cpu.static_bytes == taken > 0
    elements = 2 * DROPOUT.seq_length * DROPOUT.hidden + DROPOUT.heads * DROPOUT.seq_length**2
    assert on_cpu.sample_bytes - on_cuda.sample_bytes == 3 * elements


def test_what_megatron_refuses_is_told_in_its_words() -> None:
    with pytest.raises(ProfileError, match=r"the model cannot be profiled: \w+: ") as error:
        stage_memory(TrainOptions.of(**FOUR).model_copy(update={"layers": 5}))
    assert "Traceback" in error.value.details
