"""One table of settings that contradict each other, in the words of whoever wrote them."""

from dataclasses import replace
from pathlib import Path

import pytest

from evenpipe.schedule import Size, build, choose
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.contradictions import CONTRADICTIONS, CONTRADICTIONS_ON_CPU, contradiction_in, one_group
from evenpipe.settings.spelling import COMMAND, FLAGS, SECTION

TABLE = Path(__file__).with_name("table.txt")
CASES = [
    (
        {"trace": "t.json"},
        "--evenpipe-trace t.json: there is no EvenPipe schedule to trace: add --evenpipe-schedule 1f1b or --bpipe",
        'evenpipe.trace: "t.json": there is no EvenPipe schedule to trace: add "schedule": "1f1b" or "bpipe": true',
    ),
    (
        {"bpipe": True, "trace_iteration": 3},
        "--evenpipe-trace-iteration 3: nothing is traced without --evenpipe-trace: name its file",
        "evenpipe.trace_iteration: 3: nothing is traced without trace: name its file",
    ),
    (
        {"schedule": "1f1b", "group_size": "auto"},
        "--group-size auto: only --evenpipe-schedule kfkb runs micro-batches in groups: use it, or leave --group-size "
        "out",
        'evenpipe.group_size: "auto": only "schedule": "kfkb" runs micro-batches in groups: use it, or leave '
        "group_size "
        "out",
    ),
    (
        {"schedule": f"file:{TABLE}", "group_size": "auto"},
        "--group-size auto: a table is of one size, so that there is nothing to choose: leave --group-size out, or use "
        "--evenpipe-schedule kfkb",
        'evenpipe.group_size: "auto": a table is of one size, so that there is nothing to choose: leave group_size '
        'out, or use "schedule": "kfkb"',
    ),
    (
        {"schedule": "kfkb", "group_size": 2, "retune_interval": 5},
        "--retune-interval 5: only --group-size auto and --evenpipe-schedule searched make use of it: use one of them, "
        "or leave --retune-interval out",
        'evenpipe.retune_interval: 5: only "group_size": "auto" and "schedule": "searched" make use of it: use one of '
        "them, or leave retune_interval "
        "out",
    ),
    (
        {"schedule": "kfkb", "memory_gib": 0.5},
        "--memory-gib 0.5: only --group-size auto, --evenpipe-schedule searched, --evenpipe-schedule auto and "
        "--evenpipe-swap auto make use of it: use one of them, or leave --memory-gib out",
        'evenpipe.memory_gib: 0.5: only "group_size": "auto", "schedule": "searched", "schedule": "auto" and '
        '"swap": "auto" make use of it: use one of them, or leave memory_gib out',
    ),
    (
        {"schedule": "1f1b", "one_version": True},
        "--evenpipe-one-version: only --evenpipe-schedule 2bw has two weight versions: use that, or leave "
        "--evenpipe-one-version out",
        'evenpipe.one_version: true: only "schedule": "2bw" has two weight versions: use that, or leave one_version '
        "out",
    ),
    (
        {"schedule": "1f1b", "delay_correction": "nesterov"},
        "--evenpipe-delay-correction nesterov: only --evenpipe-schedule 2bw has gradients that are a batch late: use "
        "that, or leave --evenpipe-delay-correction out",
        'evenpipe.delay_correction: "nesterov": only "schedule": "2bw" has gradients that are a batch late: use that, '
        "or leave delay_correction out",
    ),
    (
        {"schedule": "1f1b", "pair_adjacent": True},
        "--pair-adjacent: only --bpipe exchanges anything within a pair: add that, or leave --pair-adjacent out",
        'evenpipe.pair_adjacent: true: only "bpipe": true exchanges anything within a pair: add that, or leave '
        "pair_adjacent out",
    ),
    (
        {"schedule": "auto", "bpipe": True},
        "--bpipe: --evenpipe-schedule auto evicts to partners where it is faster than what else fits: leave --bpipe "
        "out",
        'evenpipe.bpipe: true: "schedule": "auto" evicts to partners where it is faster than what else fits: leave '
        "bpipe out",
    ),
    (
        {"schedule": "gpipe", "bpipe": True},
        "--bpipe: with --evenpipe-schedule gpipe all stages hold the same, so there is nothing to level: use 1f1b",
        'evenpipe.bpipe: true: with "schedule": "gpipe" all stages hold the same, so there is nothing to level: use '
        "1f1b",
    ),
    (
        {"schedule": "auto", "swap": 1},
        "--evenpipe-swap 1: --group-size auto and --evenpipe-schedule auto choose by the memory of micro-batches that "
        "stay on the device: give --group-size a number or --evenpipe-schedule another name, or leave --evenpipe-swap "
        "out",
        'evenpipe.swap: 1.0: "group_size": "auto" and "schedule": "auto" choose by the memory of micro-batches that '
        "stay on the device: give group_size a number or schedule another name, or leave swap out",
    ),
    (
        {"schedule": "searched", "swap": 0.5},
        "--evenpipe-swap 0.5: with --evenpipe-schedule searched, all that can leave of a micro-batch is swapped, where "
        "that is faster: give --evenpipe-swap a share of 1, or leave it out",
        'evenpipe.swap: 0.5: with "schedule": "searched", all that can leave of a micro-batch is swapped, where that '
        "is faster: give swap a share of 1, or leave it out",
    ),
    (
        {"schedule": f"file:{TABLE}", "bpipe": True, "swap": "auto"},
        "--evenpipe-swap auto: it finds what stages send to partners by itself, and a table is run as it is: give "
        "--evenpipe-swap a share, or leave --bpipe out",
        'evenpipe.swap: "auto": it finds what stages send to partners by itself, and a table is run as it is: give '
        "swap a share, or leave bpipe out",
    ),
    (
        {"schedule": "2bw", "swap": 0.5},
        "--evenpipe-swap 0.5: with --evenpipe-schedule 2bw a stage keeps micro-batches from batch to batch, whose "
        "swaps are not supported: use another schedule, or leave --evenpipe-swap out",
        'evenpipe.swap: 0.5: with "schedule": "2bw" a stage keeps micro-batches from batch to batch, whose swaps are '
        "not supported: use another schedule, or leave swap out",
    ),
    (
        {"schedule": "2bw", "bpipe": True, "trace": "t.json"},
        "--evenpipe-trace t.json: with --evenpipe-schedule 2bw and --bpipe partners are amid transfers between "
        "batches, where a trace begins: leave one of them out",
        'evenpipe.trace: "t.json": with "schedule": "2bw" and "bpipe": true partners are amid transfers between '
        "batches, where a trace begins: leave one of them out",
    ),
]


@pytest.mark.parametrize(("given", "flags", "section"), CASES, ids=[flags.partition(":")[0] for _, flags, _ in CASES])
def test_a_line_names_the_setting_the_fault_and_the_remedy_as_flags_or_as_keys(given, flags, section):
    config = EvenPipeConfig.of(**given)
    assert contradiction_in(config, FLAGS, CONTRADICTIONS) == flags
    assert contradiction_in(config, SECTION, CONTRADICTIONS) == section


def test_a_choice_is_made_once():
    config = EvenPipeConfig.of(schedule="auto", retune_interval=5)
    assert str(contradiction_in(config, FLAGS, CONTRADICTIONS)).startswith("--retune-interval 5: only --group-size ")


def test_there_is_a_case_for_every_row():
    assert len(CASES) == len(CONTRADICTIONS)
    for (given, _, _), row in zip(CASES, CONTRADICTIONS, strict=True):
        assert row.holds(EvenPipeConfig.of(**given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bpipe": True, "pair_adjacent": True, "trace": "t.json", "trace_iteration": 3},
        {"schedule": "kfkb", "group_size": "auto", "memory_gib": 1, "retune_interval": 2},
        {"schedule": "2bw", "trace": "t.json"},
        {"schedule": "gpipe", "pair_adjacent": False},
    ],
)
def test_what_goes_together_is_no_line(given):
    assert contradiction_in(EvenPipeConfig.of(**given), FLAGS, (*CONTRADICTIONS, *CONTRADICTIONS_ON_CPU)) is None


def test_memory_is_to_be_named_where_no_gpu_can_be_asked():
    config = EvenPipeConfig.of(schedule="kfkb", group_size="auto")
    assert contradiction_in(config, FLAGS, CONTRADICTIONS) is None
    assert (
        contradiction_in(config, SECTION, CONTRADICTIONS_ON_CPU)
        == 'evenpipe.group_size: "auto": how much memory it may use is not known on CPU: give memory_gib'
    )


def test_a_command_has_flags_of_its_own():
    config = EvenPipeConfig.of(schedule="gpipe", bpipe=True)
    line = contradiction_in(config, COMMAND, CONTRADICTIONS)
    assert line == "--bpipe: with --schedule gpipe all stages hold the same, so there is nothing to level: use 1f1b"


def test_bpipe_goes_with_a_table_that_evicts(tmp_path: Path) -> None:
    """The table cannot be run without it."""
    table = tmp_path / "balanced.txt"
    for name in ("1f1b", "searched"):
        table.write_text(str(replace(build("1f1b", Size(4, 8), bpipe=True).schedule, name=name)))
        config = EvenPipeConfig.of(schedule=f"file:{table}", bpipe=True)
        assert contradiction_in(config, FLAGS, CONTRADICTIONS) is None


def test_groups_of_a_whole_batch_are_gpipe_and_said_to_be():
    gpipe = build("gpipe", Size(4, 8)).schedule.actions
    kfkb, said = choose("kfkb"), "a batch has 8 micro-batches, which make one group: kfkb then runs as gpipe, and holds"
    for size in (8, 9):
        assert build("kfkb", Size(4, 8, group_size=size)).schedule.actions == gpipe
        assert one_group(kfkb, size, 8, FLAGS).startswith(f"--group-size {size}: {said}")
    assert one_group(kfkb, 9, 8, SECTION).startswith(f"evenpipe.group_size: 9: {said}")
    assert [one_group(kfkb, size, 8, FLAGS) for size in (1, 7, "auto")] == [None] * 3
    assert one_group(kfkb, 1, 1, FLAGS) is one_group(choose("gpipe"), 1, 8, FLAGS) is None
