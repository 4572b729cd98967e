"""Tuners that real runs have saved go on: states/ has one of a Megatron-LM script, of the trainer and of DeepSpeed.

decided.json has what each run would have decided next.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenpipe.schedule import Programs, find
from evenpipe.tuner.group_memory import StageMemory
from evenpipe.tuner.grouped import GroupedSchedule
from evenpipe.tuner.loop import Conditions

STATES = Path(__file__).with_name("states")
SIZES = (1, 2, 4, 8)
DECIDED: dict[str, Any] = json.loads((STATES / "decided.json").read_text())


def saved(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((STATES / f"{name}.json").read_text())
    if name == "script":
        assert content["format"] == "evenpipe.script_tuner/1"
        return dict(content["state"])
    return content


def conditions(state: dict[str, Any]) -> Conditions:
    memory = tuple(StageMemory(*stage) for stage in state["memory"])
    schedule = GroupedSchedule(Programs("kfkb", state["bpipe"]), len(memory))
    return Conditions(schedule, state["samples"], state["limit_bytes"], memory)


@pytest.mark.parametrize("name", DECIDED)
def test_it_is_gone_on_with_to_the_same_decision(name: str) -> None:
    state, wanted = saved(name), DECIDED[name]
    assert state["format"] == "evenpipe.tuner/1"
    due = state["tuner"]["next"]
    explored = conditions(state).resumed(state, SIZES, 3, due)
    assert explored is not None
    tuner = explored.tuner
    assert list(tuner.current or ()) == state["tuner"]["current"]
    assert [tuner.due(iteration) for iteration in (due - 1, due)] == [False, True]
    chosen, estimates, following = tuner.decide(due)
    assert (list(chosen), following) == (wanted["chosen"], wanted["next"])
    # The order of messages that is simulated may have become another one since.
    assert estimates == pytest.approx(wanted["estimates_ms"], rel=2e-3)
    assert conditions(state).state_dict(tuner) == state, "what is saved has the same form"


@pytest.mark.parametrize("name", DECIDED)
def test_under_other_conditions_it_is_not(name: str) -> None:
    state = saved(name)
    another = replace(find("kfkb"), name="another")
    now, due = conditions(state), state["tuner"]["next"]
    heavier = tuple(stage._replace(sample_bytes=2 * stage.sample_bytes) for stage in now.memory)
    for other in (
        now._replace(samples=16),
        now._replace(schedule=GroupedSchedule(Programs("kfkb", not state["bpipe"]), len(now.memory))),
        now._replace(schedule=GroupedSchedule(Programs(another), len(now.memory))),
        now._replace(limit_bytes=now.limit_bytes - 1),
        now._replace(memory=heavier),
        now._replace(memory=now.memory[:1]),
    ):
        assert other.resumed(state, SIZES, 3, due) is None
    assert now.resumed(state, (1,), 3, due) is None


@pytest.mark.parametrize("name", DECIDED)
def test_where_micro_batches_differ_the_largest_of_both_runs_counts(name: str) -> None:
    state = saved(name)
    now, due = conditions(state)._replace(differ=True), state["tuner"]["next"]
    lighter = tuple(stage._replace(sample_bytes=stage.sample_bytes // 2) for stage in now.memory)
    heavier = tuple(stage._replace(sample_bytes=2 * stage.sample_bytes) for stage in now.memory)
    for memory, largest in ((lighter, now.memory), (heavier, heavier)):
        explored = now._replace(memory=memory).resumed(state, SIZES, 3, due)
        assert explored is not None
        assert explored.conditions.memory == largest
        sizes = sorted({candidate.b for candidate in explored.tuner.candidates})
        assert explored.tuner.candidates == explored.conditions.fitting(sizes)
    other = tuple(stage._replace(static_bytes=2 * stage.static_bytes) for stage in now.memory)
    assert now._replace(memory=other).resumed(state, SIZES, 3, due) is None
