"""A planned layout becomes an argument of Megatron's, or is refused in one line that names the flag and the file."""

from argparse import ArgumentParser, Namespace

import pytest

from evenpipe.megatron_lm.flags import ArgumentError, add_flags, config_from
from evenpipe.megatron_lm.partition import check_vocabulary, lay_out, planned
from tests.layouts.written_plan import FLAGS, write_plan


def arguments(path, *flags, **others):
    """As Megatron's parser leaves them, before they are validated."""
    given = add_flags(ArgumentParser()).parse_args(["--evenpipe-partition", str(path), *flags])
    return Namespace(**vars(given), **FLAGS | {"pipeline_model_parallel_layout": None} | others)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_layout_is_set_as_if_it_had_been_given(tmp_path, chunks):
    args = arguments(write_plan(tmp_path / "P.json", chunks), "--bpipe")
    lay_out(args)
    assert args.pipeline_model_parallel_layout.count("|") == 2 * chunks - 1
    assert config_from(args).active
    assert planned(config_from(args), args).pipeline.chunks == chunks


def test_without_the_flag_nothing_is_set():
    args = Namespace(**vars(add_flags(ArgumentParser()).parse_args([])), pipeline_model_parallel_layout="Et|tL")
    lay_out(args)
    assert args.pipeline_model_parallel_layout == "Et|tL"
    assert planned(config_from(args), args) is None
    check_vocabulary(config_from(args), args)


@pytest.mark.parametrize(
    ("flags", "others", "message"),
    [
        ((), {"hidden_size": 128}, "the plan is for --hidden-size 64, not 128: "),
        ((), {"pipeline_model_parallel_layout": "Et*8|mL"}, "--pipeline-model-parallel-layout lays the layers out too"),
    ],
)
def test_a_plan_for_another_run_is_refused_before_megatron_validates(tmp_path, flags, others, message):
    path = write_plan(tmp_path / "P.json")
    with pytest.raises(ArgumentError, match=f"^--evenpipe-partition {path}: {message}"):
        lay_out(arguments(path, *flags, **others))
    with pytest.raises(ArgumentError, match=r"^--evenpipe-partition nowhere.json: cannot be read: No such file"):
        lay_out(arguments("nowhere.json"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--evenpipe-schedule", "2bw"), "the plan is for the schedule 1f1b, not 2bw: "),
        (("--evenpipe-schedule", "kfkb", "--group-size", "auto"), "the plan is for the schedule 1f1b, not kfkb: "),
    ],
)
def test_a_plan_for_another_schedule_is_refused(tmp_path, flags, message):
    args = arguments(write_plan(tmp_path / "P.json"), *flags)
    lay_out(args)
    with pytest.raises(ArgumentError, match=message):
        planned(config_from(args), args)


def test_a_yaml_configuration_has_no_layouts(tmp_path):
    args = arguments(write_plan(tmp_path / "P.json"))
    del args.pipeline_model_parallel_layout
    with pytest.raises(ArgumentError, match=r"--yaml-cfg: .* give Megatron's flags instead"):
        planned(config_from(args), args)


def test_a_vocabulary_that_the_tokenizer_alone_knows(tmp_path):
    args = arguments(write_plan(tmp_path / "P.json"), vocab_size=None)
    lay_out(args)
    args.padded_vocab_size = 50304
    with pytest.raises(ArgumentError, match="the plan is for padded --vocab-size 8064, not 50304"):
        check_vocabulary(config_from(args), args)
