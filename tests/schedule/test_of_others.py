"""Schedules of other packages, of a changed Spec, and of tables: each fault is one line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evenpipe.schedule import Schedule, ScheduleError, Size, Spec, build, find, known, names, needs_of
from evenpipe.schedule.known.one_forward_one_backward import SPEC
from tests import schedules


class Entry(SimpleNamespace):
    """An entry point of another package: loads ``spec``, or raises it."""

    def load(self) -> object:
        if isinstance(self.spec, Exception):
            raise self.spec
        return self.spec


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ImportError("no module\nof it"), "cannot be loaded (ImportError: no module): mend or remove the package"),
        (find("1f1b"), "is no evenpipe.schedule.Spec of that name"),
        ("zigzag", "is no evenpipe.schedule.Spec of that name"),
    ],
)
def test_another_packages_schedule_that_cannot_be_had_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, spec: object, said: str
) -> None:
    points = [Entry(name="zigzag", value="zig:SPEC", spec=spec), Entry(name="1f1b", value="zig:SPEC", spec=spec)]
    monkeypatch.setattr(known, "entry_points", lambda group: points)
    known._others.cache_clear()
    try:
        assert names()[-1] == "zigzag"
        assert find("1f1b") is SPEC
        with pytest.raises(ScheduleError, match=r"^schedule=zigzag: its entry point zig:SPEC [^\n]*$") as refusal:
            find("zigzag")
        assert said in str(refusal.value)
    finally:
        monkeypatch.undo()
        known._others.cache_clear()


def test_a_schedule_that_needs_more_than_it_says_is_refused() -> None:
    with pytest.raises(ScheduleError, match="schedule zb-h1: needs backwards in two halves: its Spec has to name"):
        build(replace(find("zb-h1"), needs=frozenset()), Size(2, 4))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"order": lambda size: {}[size.stages]}, "schedule=1f1b: its Spec fails at this size (KeyError: 2): correct"),
        ({"order": lambda size: [["F0"]] * size.stages}, "(TypeError: 'F0' in its order is no Action)"),
        ({"bound": lambda size: size.stages // 0}, "(ZeroDivisionError: "),
        ({"check": lambda size: [][size.stages]}, "(IndexError: list index out of range)"),
        (
            {"order": lambda size: schedules.build("1f1b", *size[:2], bpipe=True).actions, "needs": frozenset()},
            "schedule=1f1b: its order evicts to partner stages: leave that to bpipe",
        ),
    ],
)
def test_what_a_specification_does_wrong_is_told_in_one_line(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        build(replace(find("1f1b"), **changed), Size(2 if "evicts" not in said else 4, 8))
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_table_of_several_batches_is_a_stream_even_without_updates() -> None:
    """A run would have given it the micro-batches of one batch."""
    text = str(schedules.build("1f1b", 2, 8)).replace("micro_batches=8", "micro_batches=4")
    assert needs_of(Schedule.parse(text.replace("batches=1 ", "batches=2 "))) == {"stream"}


@pytest.mark.parametrize(("argument", "fixed"), [("group_size", 2), ("batches", 1), ("chunks", 1)])
def test_a_table_takes_no_other_sizes_than_its_own(argument: str, fixed: int) -> None:
    table = schedules.build("kfkb", 2, 8, group_size=2)
    spec = Spec.of(table, frozenset(["chunks", "groups", "stream"]))
    assert build(spec, Size(2, 8)).schedule == table
    with pytest.raises(ScheduleError, match=f"{argument}=3"):
        build(spec, Size(2, 8)._replace(**{argument: 3}))
    assert build(spec, Size(2, 8)._replace(**{argument: fixed})).schedule == table


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stages=2", "stages=999999999", "stages=999999999: 2 rows of actions follow: give one"),
        ("chunks=1", "chunks=999999999", "chunks=999999999: more than a row has actions"),
        ("places=loop", "places=0.0,999999999.0", "each stage needs the same number of model chunks"),
        ("chunks=1", "chunks=0", "line 1: chunks=0: expected a number from 1 to 999999999"),
        ("bound=2", "bound=2 recomputed=0,9", "line 1: recomputed=0,9: there are parts 0 to"),
        ("bound=2", "bound=2 recomputed=all", "line 1: recomputed=all: expected positions of parts, such as 0,3"),
        ("bound=2", "bound=2 bound=3", "line 1: bound: the head line has .* each once"),
    ],
)
def test_a_head_line_of_a_size_that_is_not_there_or_of_two_is_refused_at_once(old: str, new: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule.parse(str(schedules.build("1f1b", 2, 3)).replace(old, new))
