"""Options of a training run: what is refused, and that the line says which flag and what to do."""

import pickle

import pytest
from pydantic import ValidationError

from evenpipe.settings.spelling import command_flag
from evenpipe.train.options import OptionsError, TrainOptions

KFKB = {"schedule": "kfkb"}
REFUSED = [
    ({"stages": 3}, "--layers 8: not divisible by --stages 3: make it a multiple of 3"),
    (
        {"schedule": "interleaved", "chunks": 3},
        "--layers 8: not divisible by --stages 4 × --chunks 3: make it a multiple of 12",
    ),
    ({"stages": 0}, "--stages 0: must be greater than or equal to 1"),
    ({"micro_batches": 0}, "--micro-batches 0: must be greater than or equal to 1"),
    ({"stages": "four"}, "--stages four: must be a whole number"),
    (
        {"schedule": "gpipe", "chunks": 2},
        "--chunks 2: gpipe has one model chunk a stage; interleaved has as many as you like",
    ),
    ({"schedule": "interleaved"}, "--chunks 1: interleaved needs at least 2 model chunks a stage"),
    (
        {"schedule": "zigzag"},
        "--schedule zigzag: unknown schedule, choose one of 1f1b, gpipe, 2bw, interleaved, kfkb, zb-h1, zb-h2, "
        "interleaved-zb, paci, dualpipev, v-half, v-min, zbv, searched, auto",
    ),
    ({"engine": "megatron", "bpipe": True}, "--bpipe: Megatron has no such schedule: use --engine evenpipe"),
    (
        {"engine": "megatron", "schedule": "gpipe"},
        "--schedule gpipe: Megatron has no such schedule: use --engine evenpipe",
    ),
    (
        {"engine": "megatron", "schedule": "zb-h1"},
        "--schedule zb-h1: Megatron has no such schedule: use --engine evenpipe",
    ),
    (
        {"engine": "megatron", "schedule": "v-half"},
        "--schedule v-half: Megatron has no such schedule: use --engine evenpipe",
    ),
    (
        {"schedule": "gpipe", "stages": 1},
        "--schedule gpipe: one stage is no pipeline: use --schedule 1f1b, or at least 2 stages",
    ),
    (
        {"schedule": "kfkb", "stages": 1},
        "--schedule kfkb: one stage is no pipeline: use --schedule 1f1b, or at least 2 stages",
    ),
    (
        {"schedule": "kfkb", "engine": "megatron"},
        "--schedule kfkb: Megatron has no such schedule: use --engine evenpipe",
    ),
    (
        {"schedule": "kfkb", "chunks": 2},
        "--chunks 2: kfkb has one model chunk a stage; interleaved has as many as you like",
    ),
    ({"group_size": 2}, "--group-size 2: 1f1b groups no micro-batches: give 1, or choose schedule kfkb"),
    (
        {"group_size": "auto"},
        "--group-size auto: only --schedule kfkb runs micro-batches in groups: use it, or leave --group-size out",
    ),
    ({**KFKB, "group_size": 0}, "--group-size 0: must be greater than or equal to 1 or 'auto'"),
    (
        {**KFKB, "group_size": "two"},
        "--group-size two: must be a whole number or 'auto'",
    ),
    (
        {**KFKB, "group_size": "auto", "stages": 128, "layers": 128},  # no machine has so many GPUs
        "--group-size auto: how much memory it may use is not known on CPU: give --memory-gib",
    ),
    (
        {**KFKB, "group_size": 2, "retune_interval": 9},
        "--retune-interval 9: only --group-size auto makes use of it: use that, or leave --retune-interval out",
    ),
    (
        {"memory_gib": 0.5},
        "--memory-gib 0.5: only --group-size auto makes use of it: use that, or leave --memory-gib out",
    ),
    ({**KFKB, "memory_gib": "inf"}, "--memory-gib inf: must be less than or equal to 1073741824"),
    ({**KFKB, "memory_gib": "1e308"}, "--memory-gib 1e308: must be less than or equal to 1073741824"),
    ({"lr": "inf"}, "--lr inf: must be a finite number"),
    ({"lr": "1e308"}, "--lr 1e308: must be less than or equal to 1000000"),
    ({"tensor_parallel": 8}, "--tensor-parallel 8: more ranks than --heads 4: use at most 4"),
    ({"tensor_parallel": 3}, "--tensor-parallel 3: does not divide --heads 4: use a divisor of it"),
    ({"hidden": 130}, "--hidden 130: not divisible by --heads 4: make it a multiple of 4"),
    ({"dropout": 1.0}, "--dropout 1.0: must be less than 1"),
    (
        {"expert_parallel": 2, "data_parallel": 2},
        "--expert-parallel 2: there are no experts: give --experts, or leave --expert-parallel out",
    ),
    (
        {"expert_parallel": 4, "data_parallel": 2, "experts": 4},
        "--expert-parallel 4: does not divide --data-parallel 2: use a divisor of it",
    ),
    ({"momentum": 0.9}, "--momentum 0.9: is of SGD: use --optimizer sgd, or leave --momentum out"),
    (
        {"optimizer": "sgd", "distributed_optimizer": True},
        "--distributed-optimizer: Megatron shares out Adam only: use --optimizer adam",
    ),
    ({"lr_warmup": 5}, "--lr-warmup 5: must end before --iterations 5: use at most 4"),
    (
        {"initial_loss_scale": 1024, "precision": "bf16"},
        "--initial-loss-scale 1024: --precision bf16 scales no loss: use --precision fp16, or leave it out",
    ),
    ({"precision": "fp64"}, "--precision fp64: must be 'fp32', 'bf16' or 'fp16'"),
    ({"save_interval": 2}, "--save-interval 2: no folder to save to: give --save DIR"),
    (
        {"load": "a folder", "trust": True},
        "--trust: there are no stage files of a plan: give --partition P.json, or leave --trust out",
    ),
    ({"load": ""}, "--load: no folder named: give one, or leave --load out"),
    ({"colour": "red"}, "--colour: no such option: see evenpipe train --help"),
]


@pytest.mark.parametrize(("values", "line"), REFUSED, ids=[line.partition(":")[0] for _, line in REFUSED])
def test_a_bad_option_is_refused_in_one_line_that_names_flag_and_remedy(values: dict[str, object], line: str) -> None:
    with pytest.raises(OptionsError) as refusal:
        TrainOptions.of(**values)
    assert str(refusal.value) == line


@pytest.mark.parametrize("values", [{"schedule": "gpipe"}, {"stages": 1}])
def test_bpipe_is_refused_with_the_reason_where_it_cannot_be_honoured(values: dict[str, object]) -> None:
    with pytest.raises(OptionsError, match=r"^--bpipe: .+") as refusal:
        TrainOptions.of(bpipe=True, **values)
    assert "\n" not in str(refusal.value)


def test_values_may_be_text_as_on_the_command_line() -> None:
    assert TrainOptions.of(stages="2", lr="0.5", bpipe=True) == TrainOptions.of(stages=2, lr=0.5, bpipe=True)


def test_options_do_not_change_and_travel_to_other_processes() -> None:
    options = TrainOptions.of(bpipe=True)
    with pytest.raises(ValidationError):
        options.stages = 2  # type: ignore[misc]
    travelled = pickle.loads(pickle.dumps(options))
    assert travelled == options
    assert travelled.plan == options.plan


def test_world_size_counts_every_kind_of_parallelism() -> None:
    assert TrainOptions.of(stages=2, data_parallel=3, tensor_parallel=2).world_size == 12


def test_every_field_is_a_documented_flag() -> None:
    for name, field in TrainOptions.model_fields.items():
        assert field.description, command_flag(name)
