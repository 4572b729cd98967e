"""`verify` and an independent judge agree on every mutant of every kind of schedule: both accept it, or both refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from evenpipe.schedule import KINDS, Action, Schedule, ScheduleError, Size, build, verify
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedule.independent import fault

LETTERS = "".join(KINDS)
Row = list[Action]


def swapped(schedule: Schedule, every: int) -> Schedule:
    """Every so many-th micro-batch is swapped out after its forward, and in before its backward."""

    def row(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        found: Row = []
        for action in actions:
            chosen = action.micro_batch % every == 0
            found += [action._replace(kind="I")] * (chosen and action.kind in "BD")
            found += [action, *[action._replace(kind="O")] * (chosen and action.kind == "F")]
        return tuple(found)

    return replace(schedule, actions=tuple(map(row, schedule.actions)))


def made(name: str, *size: int, bpipe: bool = False) -> Schedule:
    return build(name, Size(*size), bpipe).schedule


SCHEDULES = [
    made("1f1b", 1, 2),
    made("1f1b", 2, 2),
    made("1f1b", 3, 3),
    made("1f1b", 4, 4),
    made("1f1b", 4, 4, bpipe=True),
    made("1f1b", 4, 6, bpipe=True),
    made("1f1b", 5, 5, bpipe=True),
    made("gpipe", 2, 3),
    made("interleaved", 2, 2, 2),
    made("interleaved", 4, 4, 2, bpipe=True),
    made("kfkb", 2, 5, 1, 2),
    made("kfkb", 3, 6, 1, 2, bpipe=True),
    made("2bw", 2, 2, 1, 1, 3),
    made("2bw", 4, 4, 1, 1, 2, bpipe=True),
    made("zb-h1", 2, 2),
    made("zb-h1", 3, 4),
    made("v-half", 1, 2),
    made("v-half", 2, 2),
    made("v-half", 3, 2),
    swapped(made("1f1b", 2, 3), 1),
    swapped(made("zb-h1", 2, 3), 2),
    swapped(made("v-half", 2, 2), 2),
    swapped(made("2bw", 2, 2, 1, 1, 2), 2),
    build("1f1b", Size(4, 4), bpipe=True, swaps=range(4)).schedule,
    build("interleaved", Size(2, 2, 2), swaps=(0, 3)).schedule,
]


def exchange(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    other = chance.choice([chance.randrange(len(row)), min(at + 1, len(row) - 1)])
    row[at], row[other] = row[other], row[at]


def move(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row.insert(chance.randrange(len(row)), row.pop(at))


def drop(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    del row[at]


def double(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row.insert(chance.randrange(len(row) + 1), row[at])


def renumber(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row[at] = row[at]._replace(micro_batch=chance.randint(-3, schedule.micro_batches * schedule.batches))


def negate(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row[at] = row[at]._replace(micro_batch=-row[at].micro_batch)


def change_kind(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row[at] = row[at]._replace(kind=chance.choice(LETTERS))


def change_chunk(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row[at] = row[at]._replace(chunk=chance.randint(-2, schedule.chunks))


def change_evictor(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    row[at] = row[at]._replace(evictor=chance.randint(-2, schedule.stages))


def split(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    """A backward in two halves instead of one."""
    if row[at].kind == "B":
        row.insert(chance.randint(at + 1, len(row)), row[at]._replace(kind="W"))
        row[at] = row[at]._replace(kind="D")


def swap_out(row: Row, at: int, schedule: Schedule, chance: Random) -> None:
    """To the host, and back some time later."""
    if row[at].kind == "F":
        row.insert(chance.randint(at + 1, len(row)), row[at]._replace(kind="I"))
        row.insert(at + 1, row[at]._replace(kind="O"))


OF_A_ROW: list[Callable[[Row, int, Schedule, Random], None]] = [
    *(exchange, move, drop, double, renumber, negate, change_kind, change_chunk, change_evictor, split, swap_out)
]


def everywhere(schedule: Schedule, chance: Random) -> Schedule:
    """On all stages alike: micro-batches in another order, one that is not moved, another bound or group size."""
    one, other = (chance.randrange(schedule.micro_batches) for _ in range(2))
    match chance.randrange(5):
        case 0:
            new = {one: other, other: one}
            rows = [
                [a._replace(micro_batch=new.get(a.micro_batch, a.micro_batch)) for a in r] for r in schedule.actions
            ]
        case 1:
            rows = [[a for a in r if a.kind not in "ELAROI" or a.micro_batch != one] for r in schedule.actions]
        case 2:
            return replace(schedule, bound=schedule.bound + chance.choice([-2, -1, 1]))
        case 3:
            return replace(schedule, group_size=schedule.group_size + 1)
        case _:
            kinds = chance.choice(["FB", "EA", "LR"])
            new = {one: other, other: one}
            rows = [
                [a._replace(micro_batch=new.get(a.micro_batch, a.micro_batch)) if a.kind in kinds else a for a in r]
                for r in schedule.actions
            ]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def mutant(schedule: Schedule, chance: Random) -> Schedule:
    """One or two changes, of any rows."""
    for _ in range(chance.choice([1, 1, 2])):
        if chance.random() < 0.15:
            schedule = everywhere(schedule, chance)
            continue
        rows = list(schedule.actions)
        stage = chance.randrange(len(rows))
        row = list(rows[stage])
        chance.choice(OF_A_ROW)(row, chance.randrange(len(row)), schedule, chance)
        rows[stage] = tuple(row)
        schedule = replace(schedule, actions=tuple(rows))
    return schedule


def accepted(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def examine(count: int, seed: int) -> Counter[bool]:
    chance, found = Random(seed), Counter[bool]()
    for number in range(count):
        candidate = mutant(SCHEDULES[number % len(SCHEDULES)], chance)
        wrong, right = fault(candidate), accepted(candidate)
        assert right == (wrong is None), f"verify {'accepts' if right else 'refuses'}, the judge: {wrong}\n{candidate}"
        found[right] += 1
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.stages}")
def test_the_judge_accepts_what_is_right(schedule: Schedule) -> None:
    assert verify(schedule).schedule is schedule
    assert fault(schedule) is None


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 26))])
def test_verify_and_the_judge_agree_on_4_000_mutants(part: int) -> None:
    found = examine(4_000, part)
    assert found[True] > 80
    assert found[False] > 800


def test_what_is_accepted_simulates_to_the_end_within_its_bound() -> None:
    chance = Random(4)
    wires = dict.fromkeys(("forward", "backward"), Wire(0.1, 0.2)) | dict.fromkeys(("evict", "load"), Wire(0.0, 0.5))
    simulated = 0
    for number in range(2_000):
        candidate = mutant(SCHEDULES[number % len(SCHEDULES)], chance)
        if not accepted(candidate):
            continue
        simulated += 1
        costs = Costs((1.0,) * candidate.stages, (2.0,) * candidate.stages, wires)
        simulation = simulate(verify(candidate), costs)
        for stage, peak in zip(simulation.stages, candidate.peak_live, strict=True):
            assert stage.peak_live <= peak
        assert max(candidate.peak_live) <= candidate.bound
        done = Counter(span.action for spans in simulation.timeline for span in spans)
        assert done == Counter(action for row in candidate.actions for action in row)
    assert simulated > 300
