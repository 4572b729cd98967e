"""EvenPipe's settings as flags of a parser like Megatron's."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from evenpipe.megatron.script.flags import ArgumentError, add_flags, config_from, destination
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag


def parsed(*flags):
    return add_flags(ArgumentParser(allow_abbrev=False)).parse_args(flags)


def test_every_setting_is_a_flag_and_defaults_are_a_stock_run():
    args = parsed()
    assert all(hasattr(args, destination(setting)) for setting in EvenPipeConfig.model_fields)
    assert config_from(args) == EvenPipeConfig()


def test_flags_become_settings():
    args = parsed("--evenpipe-schedule", "gpipe", "--bpipe", "--no-pair-adjacent", "--evenpipe-trace", "t.json")
    assert config_from(args) == EvenPipeConfig(schedule="gpipe", bpipe=True, pair_adjacent=False, trace=Path("t.json"))


def test_help_shows_the_group_with_every_description():
    text = " ".join(add_flags(ArgumentParser()).format_help().split())
    assert "EvenPipe:" in text
    for setting, field in EvenPipeConfig.model_fields.items():
        assert flag(setting) in text
        assert field.description in text


def test_what_a_yaml_configuration_lacks_comes_from_the_command_line():
    args = Namespace(bpipe=True, micro_batch_size=1)
    argv = ["--yaml-cfg", "c.yaml", "--evenpipe-schedule", "1f1b"]
    assert config_from(args, argv) == EvenPipeConfig(schedule="1f1b", bpipe=True)
    assert args.evenpipe_schedule == "1f1b"
    assert args.pair_adjacent is None


def test_a_wrong_value_names_its_flag():
    with pytest.raises(ArgumentError, match=r"^--evenpipe-trace-iteration soon: must be a valid integer"):
        config_from(parsed("--evenpipe-trace-iteration", "soon"))
