"""EvenPipe's settings as flags of a parser like Megatron's."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from evenpipe.megatron_lm.flags import ArgumentError, add_flags, config_from, destination
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


def test_a_schedule_is_asked_for_in_fewer_letters_too():
    assert config_from(parsed("--evenpipe", "auto", "--memory-gib", "70")) == EvenPipeConfig(
        schedule="auto", memory_gib=70
    )
    assert config_from(Namespace(evenpipe="auto"), []).schedule == "auto"  # of a YAML configuration


@pytest.mark.parametrize("setting", EvenPipeConfig.model_fields)
def test_every_flag_has_a_name_of_ours_and_maybe_a_short_one(setting):
    name, value = "--evenpipe-" + setting.replace("_", "-"), ["1"]
    if setting in ("bpipe", "one_version", "pair_adjacent"):
        value = []
    assert parsed(name, *value) == parsed(flag(setting), *value) != parsed()


def test_help_shows_the_group_with_every_description(capsys):
    with pytest.raises(SystemExit):
        add_flags(ArgumentParser()).parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "EvenPipe:" in text
    for setting, field in EvenPipeConfig.model_fields.items():
        assert f" {flag(setting)}" in text
        assert field.description in text


@pytest.mark.parametrize("first", ["ours", "the script's"])
def test_a_script_keeps_flags_of_its_own_whose_names_are_ours_too(first):
    parser = ArgumentParser(allow_abbrev=False)
    if first == "ours":
        add_flags(parser)
    group = parser.add_argument_group("script")
    group.add_argument("--group-size", type=int, default=128)
    group.add_argument("--memory-gib", type=float)
    group.add_argument("--pair-adjacent", action="store_true")
    group.add_argument("--retune-interval", type=int)
    if first != "ours":
        add_flags(parser)
    stock = parser.parse_args(["--group-size", "64", "--memory-gib", "1", "--pair-adjacent", "--retune-interval", "2"])
    assert (stock.group_size, stock.memory_gib, stock.pair_adjacent, stock.retune_interval) == (64, 1.0, True, 2)
    assert config_from(stock) == EvenPipeConfig()
    args = parser.parse_args(["--bpipe", "--evenpipe-group-size", "2", "--no-evenpipe-pair-adjacent"])
    assert (args.group_size, args.pair_adjacent) == (128, False)
    assert config_from(args) == EvenPipeConfig(bpipe=True, group_size=2, pair_adjacent=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--evenpipe-scedule", "a"], "--evenpipe-scedule: there is no such flag: did you mean --evenpipe-schedule?"),
        (["--evenpipe-trase=t.json"], "--evenpipe-trase: there is no such flag: did you mean --evenpipe-trace?"),
        (
            ["--evenpipe-"],
            "--evenpipe-: there is no such flag: there are --evenpipe-schedule, bpipe, swap, group-size, ",
        ),
        (["--bipe"], "--bipe: there is no such flag: did you mean --bpipe?"),
        (["--no-pair-adjacet"], "--no-pair-adjacet: there is no such flag: did you mean --no-pair-adjacent?"),
        (["--grup-size=2"], "--grup-size: there is no such flag: did you mean --group-size?"),
        (["--evenpipe-schedule"], "argument --evenpipe-schedule: expected one argument"),
    ],
)
def test_a_flag_of_ours_that_is_misspelt_ends_with_one_line(given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*given)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evenpipe: error: {said}")
    assert error.count("\n") == 1


def test_what_the_parser_does_not_know_and_is_not_ours_is_the_parser_s(capsys):
    with pytest.raises(SystemExit):
        parsed("--pipelined")
    assert capsys.readouterr().err.startswith("usage: ")


def test_what_a_yaml_configuration_lacks_comes_from_the_command_line():
    args = Namespace(bpipe=True, micro_batch_size=1)
    argv = ["--yaml-cfg", "c.yaml", "--evenpipe-schedule", "1f1b"]
    assert config_from(args, argv) == EvenPipeConfig(schedule="1f1b", bpipe=True)
    assert args.evenpipe_schedule == "1f1b"
    assert args.evenpipe_pair_adjacent is None


def test_a_wrong_value_names_its_flag():
    with pytest.raises(ArgumentError, match=r"^--evenpipe-trace-iteration soon: must be a whole number"):
        config_from(parsed("--evenpipe-trace-iteration", "soon"))
