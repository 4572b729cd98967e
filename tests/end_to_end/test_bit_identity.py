"""EvenPipe's schedules train real megatron-core models to the same bits as Megatron's own, in less memory."""

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict
from tests.end_to_end.described import estimate_of
from tests.selected import marked, selected

SMALL = {"hidden": 32, "heads": 4, "seq_length": 32, "iterations": 2}

SETTINGS = {
    "gpt p=2": {"stages": 2, "layers": 2, "micro_batches": 5},
    "interleaved p=2": {"stages": 2, "layers": 4, "micro_batches": 4, "schedule": "interleaved", "chunks": 2},
    "gpt p=4": {"stages": 4, "layers": 4, "micro_batches": 8},
    "bert p=4": {"stages": 4, "layers": 4, "micro_batches": 8, "model": "bert"},
    "m < p": {"stages": 4, "layers": 4, "micro_batches": 3},
    "m not a multiple of p": {"stages": 4, "layers": 4, "micro_batches": 7},
    "untied embeddings, no clipping": {"stages": 4, "layers": 4, "untie_embeddings": True, "clip_grad": 0.0},
    "dropout": {"stages": 4, "layers": 4, "dropout": 0.1},
    "full recomputation with dropout": {"stages": 4, "layers": 4, "recompute": "full", "dropout": 0.1},
    "bert, dropout, selective": {
        "stages": 4,
        "layers": 4,
        "model": "bert",
        "dropout": 0.1,
        "recompute": "selective",
        "untie_embeddings": True,
    },
    "interleaved p=4": {"stages": 4, "layers": 8, "micro_batches": 8, "schedule": "interleaved", "chunks": 2},
    "interleaved bert, full": {
        "stages": 4,
        "layers": 8,
        "schedule": "interleaved",
        "chunks": 2,
        "model": "bert",
        "recompute": "full",
    },
    "experts": {"stages": 4, "layers": 4, "experts": 4},
    "experts of lengths of their own": {"stages": 4, "layers": 4, "experts": 4, "min_length": 8},
    "TP2 x PP2": {"stages": 2, "layers": 2, "tensor_parallel": 2, "dropout": 0.1},
    "DP2 x PP2, overlapped": {"stages": 2, "layers": 2, "data_parallel": 2, "overlap_grad_reduce": True},
    "DP2 x PP2, bf16, distributed": {
        "stages": 2,
        "layers": 2,
        "data_parallel": 2,
        "overlap_grad_reduce": True,
        "distributed_optimizer": True,
        "precision": "bf16",
        "model": "bert",
    },
    "DP2 x PP2 interleaved, overlapped": {
        "stages": 2,
        "layers": 4,
        "data_parallel": 2,
        "overlap_grad_reduce": True,
        "schedule": "interleaved",
        "chunks": 2,
    },
    "gpt p=8": {"stages": 8, "layers": 8, "micro_batches": 18},
    "TP2 x PP4": {"stages": 4, "layers": 4, "tensor_parallel": 2},
    "DP2 x PP4, overlapped, dropout, full": {
        "stages": 4,
        "layers": 4,
        "data_parallel": 2,
        "overlap_grad_reduce": True,
        "dropout": 0.1,
        "recompute": "full",
    },
}
ENGINES = {
    "megatron": {"engine": "megatron"},
    "evenpipe": {"engine": "evenpipe"},
    "bpipe": {"engine": "evenpipe", "bpipe": True},
    "gpipe": {"schedule": "gpipe"},
    "2F2B": {"schedule": "kfkb", "group_size": 2},
    "2F2B with BPipe": {"schedule": "kfkb", "group_size": 2, "bpipe": True},
    "3F3B": {"schedule": "kfkb", "group_size": 3},
    "8F8B": {"schedule": "kfkb", "group_size": 8},
    # BERT's micro-batches and those of experts keep their size: k alone is tuned, here before every iteration.
    "tuned": {"schedule": "kfkb", "group_size": "auto", "memory_gib": 1.0, "retune_interval": 1},
}
THREE = ["megatron", "evenpipe", "bpipe"]
RUNS = [(setting, engine) for setting in SETTINGS for engine in THREE] + [
    ("gpt p=4", "gpipe"),
    ("gpt p=4", "2F2B with BPipe"),  # stage 0 evicts
    ("gpt p=4", "8F8B"),  # k = m
    ("m not a multiple of p", "3F3B"),  # 7 = 3 + 3 + 1
    ("full recomputation with dropout", "2F2B"),
    ("experts of lengths of their own", "2F2B with BPipe"),
    ("DP2 x PP2, bf16, distributed", "3F3B"),
]
TUNED = [
    ("bert, dropout, selective", "tuned"),
    ("experts of lengths of their own", "tuned"),
    ("DP2 x PP2, bf16, distributed", "tuned"),
]
# Eight processes, and what differs little from a case that stays.
LONG = [
    "gpt p=2",
    "interleaved p=2",
    "bert p=4",
    "untied embeddings, no clipping",
    "experts",
    "gpt p=8",
    "TP2 x PP4",
    "DP2 x PP4, overlapped, dropout, full",
    "interleaved bert, full",
    "m < p",
    "dropout",
    "DP2 x PP2, overlapped",
]


def options(setting, engine):
    return TrainOptions.of(**{**SMALL, **SETTINGS[setting], **ENGINES[engine]})


@pytest.fixture(scope="module")
def results(request):
    """All runs of the settings that are looked at; one set of processes a world size."""
    settings = selected(request, "setting")
    runs = [run for run in (*RUNS, *TUNED) if run[0] in settings]
    runs = sorted(runs, key=lambda run: options(*run).world_size)
    return dict(zip(runs, run_cases([options(*run) for run in runs]), strict=True))


@pytest.mark.parametrize(("setting", "engine"), marked([run for run in (*RUNS, *TUNED) if run[1] != "megatron"], LONG))
def test_same_losses_and_weights_as_megatron(setting, engine, results):
    reference, result = results[setting, "megatron"], results[setting, engine]
    assert [loss.hex() for loss in result.losses] == [loss.hex() for loss in reference.losses]
    assert result.weights_sha256 == reference.weights_sha256


@pytest.mark.parametrize("setting", marked([name for name in SETTINGS if "interleaved" not in name], LONG))
def test_bpipe_keeps_the_optimum(setting, results):
    """At most ⌈(p+2)/2⌉ micro-batches live, and so many of stage 0's bytes, if alike, on every stage but the last."""
    case, plain, level = options(setting, "bpipe"), results[setting, "evenpipe"], results[setting, "bpipe"]
    optimum = -(-(case.stages + 2) // 2)
    assert max(stage.peak_live for stage in level.stages) <= optimum
    if case.min_length:
        return
    held = min(case.stages, case.micro_batches)
    allowed = min(optimum / held, 1.0) * plain.stages[0].peak_saved_bytes * 1.02
    assert all(stage.peak_saved_bytes <= allowed for stage in level.stages[:-1])


@pytest.mark.parametrize(("setting", "engine"), marked(RUNS, LONG))
def test_measured_peaks_are_the_schedules(setting, engine, results):
    case, result = options(setting, engine), results[setting, engine]
    assert tuple(stage.peak_live for stage in result.stages) == case.plan.peak_live
    assert [stage.evicted_bytes > 0 for stage in result.stages] == [count > 0 for count in case.plan.evictions]


@pytest.mark.parametrize(("setting", "engine"), marked([run for run in RUNS if "lengths" not in run[0]], LONG))
def test_predicted_peak_bytes_are_the_measured_ones(setting, engine, results):
    case, result = options(setting, engine), results[setting, engine]
    for predicted, measured in zip(predict(case.program, result).stages, result.stages, strict=True):
        assert predicted.peak_bytes == pytest.approx(measured.peak_saved_bytes, rel=0.02)


DESCRIBED = [
    (setting, engine)
    for setting, engine in RUNS
    if not any(word in setting for word in ("lengths", "experts", "dropout", "TP2 x PP2"))
]


@pytest.mark.parametrize(("setting", "engine"), marked(DESCRIBED, LONG))
def test_peak_bytes_are_what_the_planner_s_descriptions_say(setting, engine, results):
    case, result = options(setting, engine), results[setting, engine]
    described = [stage.bytes.activations for stage in estimate_of(case).stages]
    assert described == pytest.approx([stage.peak_saved_bytes for stage in result.stages], rel=0.02)


@pytest.mark.parametrize(("setting", "engine"), TUNED)
def test_a_tuned_run_is_one_of_its_candidates(setting, engine, results):
    case, result = options(setting, engine), results[setting, engine]
    assert [retune.iteration for retune in result.retunes] == list(range(case.iterations))
    assert {retune.b for retune in result.retunes} == {case.micro_batch_size}
    assert all(f"k{retune.k}b{retune.b}" in retune.estimates_ms for retune in result.retunes)
    measured = [stage.peak_saved_bytes for stage in result.stages]
    if case.min_length:  # by the largest micro-batch, and not all are
        assert all(m <= 1.02 * p for m, p in zip(measured, result.predicted_saved_bytes, strict=True))
    else:
        assert measured == pytest.approx(result.predicted_saved_bytes, rel=0.02)
