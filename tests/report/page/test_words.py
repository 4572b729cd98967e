"""Sentences on bubbles and remedies: few, each remedy once, with what it takes of the memory."""

from __future__ import annotations

import re

import pytest

from evenpipe.report.bubbles import Case, Room, alternatives, waits_in
from evenpipe.report.page.words import alternatives_table, explained, summary
from evenpipe.schedule import Size, build
from evenpipe.simulate import Costs, Wire, simulate

_GAIN = re.compile(r": predicted (\d\.\d\d)×")
_UNEVEN = Costs((20.0, 30.0, 20.0, 40.0), (40.0, 60.0, 40.0, 80.0))
_MESSAGES = Costs((100.0,) * 4, (200.0,) * 4, {"forward": Wire(transmit_ms=50.0), "backward": Wire(transmit_ms=50.0)})
_ROOM = Room((4 << 20,) * 4, (1 << 20,) * 4)


def told(
    costs: Costs, bpipe: bool = False, sized: bool = True, room: Room | None = None, only: str = ""
) -> tuple[list[str], Case]:
    """The sentences on 1F1B of 4 stages and 12 micro-batches of a MiB each; of alternatives those that start so."""
    program = build("1f1b", Size(4, 12), bpipe)
    waits = waits_in(program.schedule.places, simulate(program, costs).timeline)
    case = Case(program.schedule, bpipe, costs, [[1 << 20]] * 4 if sized else None, room=room)
    present, *others = alternatives(case)
    return explained(waits, case, [present, *(one for one in others if one.text.startswith(only))]), case


@pytest.mark.parametrize("costs", [_UNEVEN, _MESSAGES])
@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_a_remedy_is_told_once_with_its_waits_and_its_memory(costs: Costs, bpipe: bool, sized: bool) -> None:
    remedies = [line for line in told(costs, bpipe, sized)[0] if _GAIN.search(line)]
    assert 1 <= len(remedies) <= 3
    assert len({line.split(": predicted")[0] for line in remedies}) == len(remedies)
    unit = "MiB" if sized else "micro-batch"
    for line in remedies:
        assert re.search(rf"fullest stage would save (as much as now, |[\d.]+× as much, )[\d.]+ {unit}", line), line
        assert float(_GAIN.findall(line)[0]) >= 1.01
    assert any("at least be halved" in line for line in remedies)


def test_what_two_remedies_save_is_beside_what_is_saved_now() -> None:
    [line] = [line for line in told(_MESSAGES)[0] if line.startswith("kfkb, k=2 ")]
    assert "(`--schedule kfkb --group-size 2`): predicted 1.17×. " in line
    assert "What messages take of the waits of stage 0 for backward 1→0" in line
    assert "Its fullest stage would save 2× as much, 8 MiB in place of 4 MiB." in line


def test_late_gradients_come_with_a_second_version_of_the_weights() -> None:
    lines, _ = told(_UNEVEN, room=_ROOM, only="2bw")
    [line] = [line for line in lines if line.startswith("2bw")]
    assert "keep a second version of its weights (up to 1 MiB more)" in line
    assert "in all" not in line, "no limit is known"


def test_what_does_not_fit_is_no_remedy_and_says_what_it_would_need() -> None:
    free, _ = told(_UNEVEN, room=_ROOM._replace(limit_bytes=16 << 20), only="2bw")
    assert any("it would need 9 MiB of 16 MiB in all" in line for line in free if line.startswith("2bw"))
    lines, case = told(_UNEVEN, room=_ROOM._replace(limit_bytes=8 << 20))
    assert not [line for line in lines if line.startswith(("2bw", "interleaved"))]
    [line] = [line for line in lines if "too large for the 8 MiB that a stage has" in line]
    assert "2bw, gradients a batch late (needs 9 MiB)" in line
    table = alternatives_table(case, alternatives(case))
    assert "Fullest stage needs in all, of 8 MiB" in table.columns
    [row] = [row for row in table.rows if row[0].startswith("2bw")]
    assert "9 MiB: does not fit" in row


def test_where_nothing_that_is_faster_fits_that_is_said() -> None:
    lines, _ = told(_UNEVEN, room=_ROOM._replace(limit_bytes=8 << 20), only="2bw")
    assert "Nothing else that was simulated is faster and fits." in lines
    assert not [line for line in lines if _GAIN.search(line)]


def test_of_group_sizes_that_are_as_good_the_one_that_saves_least_is_told() -> None:
    grouped = [line for line in told(_MESSAGES)[0] if line.startswith("kfkb") and _GAIN.search(line)]
    assert [line[:9] for line in grouped] == ["kfkb, k=2"]


def test_only_what_is_typed_is_code() -> None:
    program = build("1f1b", Size(4, 12))
    waits = waits_in(program.schedule.places, simulate(program, _UNEVEN).timeline)
    case = Case(program.schedule, True, _UNEVEN, None, able=lambda spec: "--engine module")
    for line in explained(waits, case, alternatives(case)):
        for code in re.findall("`([^`]+)`", line):
            assert code.startswith(("--", "evenpipe "))


def test_the_summary_is_one_sentence_on_the_average_stage() -> None:
    program = build("1f1b", Size(4, 12))
    found = simulate(program, _MESSAGES)
    said = summary(waits_in(program.schedule.places, found.timeline))
    assert said.startswith(f"On average, a stage is idle for {100 * found.bubble_fraction:.0f} % of the batch: ")
    assert said.count(".") == 1
    alone = build("1f1b", Size(1, 2))
    spans = simulate(alone, Costs((1.0,), (2.0,))).timeline
    assert summary(waits_in(alone.schedule.places, spans)) == "No stage ever waits."
