"""The section "evenpipe" of DeepSpeed's configuration: one line with the path of the key for whatever cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenpipe.deepspeed.section import SectionError, section_of


def test_without_a_section_there_is_nothing_to_do() -> None:
    assert section_of({"train_batch_size": 8}) is None


def test_a_misspelt_section_is_no_stock_run() -> None:
    with pytest.raises(SectionError, match=r'^evenpipe: .* has no such section, but "evenpip": rename'):
        section_of({"train_batch_size": 8, "evenpip": {"bpipe": True}})


def test_values_have_the_types_of_json() -> None:
    section = section_of({"evenpipe": {"schedule": "kfkb", "group_size": 2, "bpipe": True, "partition": [0, 3, 5]}})
    assert section is not None
    assert (section.spec.name, section.group_size, section.bpipe, section.partition) == ("kfkb", 2, True, (0, 3, 5))


def test_an_empty_section_is_1f1b() -> None:
    section = section_of({"evenpipe": {"partition": None, "pair_adjacent": None}})
    assert section is not None
    assert (section.spec.name, section.bpipe, section.partition, section.pair_adjacent) == ("1f1b", False, None, None)


def test_auto_leaves_to_evenpipe_what_null_does() -> None:
    given = {"schedule": "kfkb", "group_size": "auto", "bpipe": True}
    auto = dict.fromkeys(("partition", "pair_adjacent", "retune_interval", "memory_gib", "trace_iteration"), "auto")
    section = section_of({"evenpipe": {**given, **auto, "micro_batch_size": "auto"}})
    assert section == section_of({"evenpipe": {**given, **dict.fromkeys(auto), "micro_batch_size": "auto"}})
    assert section is not None
    assert (section.group_size, section.micro_batch_size) == ("auto", "auto")


def test_a_dictionary_may_have_a_path() -> None:
    section = section_of({"evenpipe": {"trace": Path("t.json")}})
    assert section is not None
    assert section.trace == Path("t.json")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"group_sise": 2}, "evenpipe.group_sise: unknown key, did you mean group_size?"),
        (
            {"colour": 2},
            "evenpipe.colour: unknown key, choose one of schedule, bpipe, swap, group_size, retune_interval, "
            "memory_gib, one_version, delay_correction, pair_adjacent, partition, trace, trace_iteration, "
            "micro_batch_size",
        ),
        ({"group_size": "2"}, "evenpipe.group_size: \"2\": must be a whole number or 'auto'"),
        ({"bpipe": "yes"}, 'evenpipe.bpipe: "yes": must be true or false'),
        ({"schedule": "1f1"}, 'evenpipe.schedule: "1f1": unknown schedule, did you mean 1f1b?'),
        ({"partition": [0, "a"]}, 'evenpipe.partition[1]: "a": must be a whole number'),
        (True, 'evenpipe: must be an object, such as {"schedule": "1f1b"}, not true'),
        (
            {"trace_iteration": 3},
            "evenpipe.trace_iteration: 3: nothing is traced without trace: name its file",
        ),
        (
            {"schedule": "2bw", "bpipe": True, "trace": "t.json"},
            'evenpipe.trace: "t.json": with "schedule": "2bw" and "bpipe": true partners are amid transfers between '
            "batches, "
            "where a trace begins: leave one of them out",
        ),
        (
            {"schedule": "interleaved"},
            'evenpipe.schedule: "interleaved": needs several model chunks a stage, which DeepSpeed\'s engine does not '
            "offer: choose one of 1f1b, gpipe, 2bw, kfkb, zb-h1, zb-h2, searched, auto",
        ),
        (
            {"schedule": "v-half"},
            'evenpipe.schedule: "v-half": needs several model chunks a stage and model chunks that are not placed '
            "stage by stage, which DeepSpeed's engine does not offer: choose one of 1f1b, gpipe, 2bw, kfkb, zb-h1, "
            "zb-h2, searched, auto",
        ),
        (
            {"group_size": "auto"},
            'evenpipe.group_size: "auto": only "schedule": "kfkb" runs micro-batches in groups: use it, or leave '
            "group_size "
            "out",
        ),
        (
            {"schedule": "kfkb", "group_size": 2, "memory_gib": 40},
            'evenpipe.memory_gib: 40.0: only "group_size": "auto", "schedule": "searched", "schedule": "auto" and '
            '"swap": "auto" make use of it: use one of them, or leave memory_gib out',
        ),
        (
            {"schedule": "kfkb", "group_size": "auto", "micro_batch_size": 4},
            "evenpipe.micro_batch_size: 4: must be 'auto'",
        ),
        (
            {"group_size": 2},
            'evenpipe.group_size: 2: only "schedule": "kfkb" runs micro-batches in groups: use it, or leave '
            "group_size out",
        ),
        (
            {"schedule": "gpipe", "bpipe": True},
            'evenpipe.bpipe: true: with "schedule": "gpipe" all stages hold the same, so there is nothing to level: '
            "use 1f1b",
        ),
        (
            {"pair_adjacent": True},
            'evenpipe.pair_adjacent: true: only "bpipe": true exchanges anything within a pair: add that, or leave '
            "pair_adjacent out",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(given: Any, line: str) -> None:
    with pytest.raises(SectionError) as refused:
        section_of({"evenpipe": given})
    assert str(refused.value) == line
