"""Processes carry out schedules: same losses and gradients to the last bit, memory as promised, nothing left."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evenpipe.runtime.connections import Connections
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import (
    EVICT,
    GAINING,
    Link,
    Schedule,
    ScheduleError,
    Size,
    Unit,
    find,
    fused_form,
    lower,
    verify,
)
from evenpipe.schedule import build as build_program
from tests.reports import reports
from tests.schedules import build

sys.path.insert(0, str(Path(__file__).parent))
from executor_cases import ROWS, WIDTH, reference

SCRIPT = Path(__file__).with_name("executor_cases.py")

SCHEDULES = {
    f"{name} p={p} m={m} v={v}{' bpipe' if bpipe else ''}": build(name, p, m, v, bpipe)
    for name, p, m, v, bpipe in [
        ("gpipe", 4, 3, 1, False),
        ("1f1b", 2, 5, 1, False),
        ("1f1b", 4, 8, 1, False),
        ("1f1b", 4, 2, 1, True),
        ("1f1b", 4, 4, 1, True),
        ("1f1b", 4, 9, 1, True),
        ("1f1b", 5, 11, 1, True),
        ("1f1b", 8, 8, 1, True),
        ("1f1b", 8, 20, 1, True),
        ("interleaved", 2, 4, 2, False),
        ("interleaved", 4, 8, 2, True),
        ("interleaved", 4, 4, 3, True),
        ("zb-h1", 2, 5, 1, False),
        ("zb-h1", 4, 8, 1, False),
        ("v-half", 1, 3, 2, False),
        ("v-half", 3, 5, 2, False),
        ("v-half", 4, 8, 2, False),
    ]
}


def accepted_edits(count: int) -> dict[str, Schedule]:
    """Schedules that differ from a valid one by one swap of two actions and that `verify` accepts."""
    dice = random.Random(0)
    found: dict[str, Schedule] = {}
    bases = [build("1f1b", 4, 6, 1, True), build("gpipe", 3, 3), build("interleaved", 2, 4, 2, True)]
    while len(found) < count:
        base = dice.choice(bases)
        stage = dice.randrange(base.stages)
        row = list(base.actions[stage])
        at, other = dice.randrange(len(row)), dice.randrange(len(row))
        row[at], row[other] = row[other], row[at]
        edited = replace(base, actions=(*base.actions[:stage], tuple(row), *base.actions[stage + 1 :]))
        if edited != base:
            try:
                found[f"edited {base.name} stage {stage} steps {at} and {other}"] = verify(edited).schedule
            except ScheduleError:
                continue
    return found


SAVES_OUTPUT = "1f1b p=4 m=8 bpipe, each stage saving what it sends"
ROUTED = [f"{name} p=4 m=8 bpipe, no two micro-batches alike" for name in ("1f1b", "kfkb")]
WIDE = "1f1b p=4 m=8 bpipe, one large storage among small ones"
CAST = "1f1b p=4 m=8 bpipe, tensors that consist of others"
FUSED = {
    f"{name} p={p} m={m} fused{' bpipe' if bpipe else ''}": build_program(
        fused_form(find(name), 2), Size(p, m, 2), bpipe
    )
    for name, p, m, bpipe in [("interleaved", 4, 12, True), ("interleaved", 2, 6, False), ("dualpipev", 4, 10, False)]
}
CAPTURED = "1f1b p=4 m=8 bpipe, parts of layers in graphs"
CASES = {
    **SCHEDULES,
    CAPTURED: build("1f1b", 4, 8, bpipe=True),
    **{name: program.schedule for name, program in FUSED.items()},
    WIDE: build("1f1b", 4, 8, bpipe=True),
    CAST: build("1f1b", 4, 8, bpipe=True),
    SAVES_OUTPUT: build("1f1b", 4, 8, bpipe=True),
    ROUTED[0]: build("1f1b", 4, 8, bpipe=True),
    ROUTED[1]: build("kfkb", 4, 8, bpipe=True, group_size=2),
    **accepted_edits(12),
}
MODELS = {
    CAPTURED: "captured",
    WIDE: "wide",
    CAST: "cast",
    SAVES_OUTPUT: "saving its output",
    **dict.fromkeys(ROUTED, "routed"),
}

IDLE = "1f1b p=2 swapping 50%"
SWAPPED = {
    f"{name} swapping {share:.0%}{' bpipe' * bpipe}": (
        build_program(name, Size(4, 8, chunks, group_size), bpipe, swaps=GAINING).schedule,
        {"swap": share, "model": model},
    )
    for name, chunks, group_size, bpipe, share, model in [
        ("1f1b", 1, 1, False, 0.5, "dense"),
        ("1f1b", 1, 1, False, 1.0, "wide"),
        ("1f1b", 1, 1, True, 0.5, "dense"),
        ("1f1b", 1, 1, True, 0.5, "routed"),
        ("gpipe", 1, 1, False, 1.0, "routed"),
        ("kfkb", 1, 2, True, 0.8, "cast"),
        ("interleaved", 2, 1, False, 0.5, "saving its output"),
        ("zb-h1", 1, 1, False, 0.5, "dense"),
        ("v-half", 2, 1, False, 0.5, "dense"),
    ]
}
NOW_AND_THEN = (True, False, True)
SLOW_MS = 60.0
WATCHED = {
    "measured now and then": (build("1f1b", 4, 8), {"measure": NOW_AND_THEN}),
    "measured now and then, bpipe": (build("1f1b", 4, 8, bpipe=True), {"measure": NOW_AND_THEN}),
    "slow pairs": (build("1f1b", 4, 8, bpipe=True), {"slow": ["evict", "load"], "ms": SLOW_MS}),
    "larger and larger": (build("1f1b", 4, 8, bpipe=True), {"rows": (4, 8, 8)}),
    "slow neighbours": (build("1f1b", 4, 8), {"slow": ["forward", "backward"], "ms": SLOW_MS / 10}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each rank and case, what came of every batch."""
    folder = tmp_path_factory.mktemp("executor")
    cases = {
        name: {
            "schedule": str(schedule),
            "measure": (True, True, True),
            "rows": (ROWS, ROWS, ROWS),
            "model": MODELS.get(name, "dense"),
            "slow": [],
            "fused": name in FUSED,
            "ms": 0.0,
            **settings,
        }
        for name, (schedule, settings) in (
            {name: (schedule, {}) for name, schedule in CASES.items()}
            | WATCHED
            | SWAPPED
            | {IDLE: (build_program("1f1b", Size(2, 4)).schedule, {"swap": 0.5, "model": "dense"})}
        ).items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    return reports(SCRIPT, folder, 8)


def batches_of(outcomes, name):
    """Per stage, the batches of one case."""
    shares = [outcome[name] for outcome in outcomes if name in outcome]
    errors = [share["error"] for share in shares if "error" in share]
    assert not errors, errors[0]
    return [share["batches"] for share in shares]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_without_a_pipeline(name, outcomes):
    schedule = CASES[name]
    places = schedule.places
    losses, gradients = reference(len(places.order), schedule.micro_batches, MODELS.get(name, "dense"))
    for stage, batches in enumerate(batches_of(outcomes, name)):
        for batch in batches:
            assert batch["losses"] == (losses if stage == places.last.stage else [])
            assert batch["gradients"] == [gradients[places.position(stage, c)] for c in range(places.chunks)]


@pytest.mark.parametrize("name", CASES)
def test_as_many_micro_batches_are_live_as_the_schedule_says(name, outcomes):
    schedule = CASES[name]
    for stage, batches in enumerate(batches_of(outcomes, name)):
        for batch in batches:
            assert batch["memory"]["peak_units"] == schedule.peak_live[stage]
            assert (batch["memory"]["evicted_bytes"] > 0) == (schedule.evictions[stage] > 0)


@pytest.mark.parametrize("name", [*ROUTED, WIDE, CAST, "1f1b p=8 m=20 v=1 bpipe"])
def test_what_is_in_memory_beside_loads_is_what_is_counted(name, outcomes):
    """Also where sizes differ, and what leaves makes no room for what comes until it has left."""
    for batches in batches_of(outcomes, name):
        assert all(batch["bytes_there"] <= batch["memory"]["peak_bytes"] for batch in batches)
    assert any(batch["bytes_there"] for batch in batches_of(outcomes, name)[0])


def test_tensors_that_consist_of_others_are_counted_and_leave(outcomes):
    """Of the model's otherwise same pieces, one number a byte more, and what to multiply them by.

    The last stage has the loss, and slots whose parts start at multiples of 64 bytes.
    """
    plain = "1f1b p=4 m=9 v=1 bpipe"
    more = ROWS * WIDTH + 4
    for stage in range(3):
        plain_batch, batch = (batches_of(outcomes, name)[stage][0]["memory"] for name in (plain, CAST))
        evictions, live = CASES[CAST].evictions[stage], CASES[CAST].peak_live[stage]
        if evictions:
            of_each = plain_batch["evicted_bytes"] / CASES[plain].evictions[stage]
            assert batch["evicted_bytes"] == evictions * (of_each + more)
        assert batch["peak_bytes"] == plain_batch["peak_bytes"] + live * more


@pytest.mark.parametrize("name", FUSED)
def test_forwards_and_backwards_are_computed_together(name, outcomes):
    program = FUSED[name]
    for stage, batches in enumerate(batches_of(outcomes, name)):
        together = sum(step.fused is not None for step in program.steps[stage])
        assert [batch["together"] for batch in batches] == [together] * len(batches)
        assert together > 0


def test_what_graphs_keep_stays_and_the_rest_leaves(outcomes):
    """Each micro-batch leaves its graph's output where it is, which the next replay writes."""
    plain, captured = "1f1b p=4 m=9 v=1 bpipe", CAPTURED
    evicted = [
        batches_of(outcomes, name)[0][0]["memory"]["evicted_bytes"] / CASES[name].evictions[0]
        for name in (plain, captured)
    ]
    assert evicted[0] - evicted[1] == 4 * ROWS * 2 * WIDTH


@pytest.mark.parametrize("name", CASES)
def test_nothing_stays_behind(name, outcomes):
    for batches in batches_of(outcomes, name):
        for batch in batches:
            assert batch["leftover"] == []
            assert batch["memory"]["own_bytes"] == batch["memory"]["accepted_bytes"] == 0


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if any(schedule.evictions)])
def test_the_pool_allocates_nothing_after_the_first_batch(name, outcomes):
    for batches in batches_of(outcomes, name):
        assert len({tuple(batch["pool_addresses"]) for batch in batches}) == 1
        assert len({batch["pool_bytes"] for batch in batches}) == 1


@pytest.mark.parametrize("name", [name for name in CASES if any(CASES[name].evictions)])
def test_a_micro_batch_that_is_evicted_is_one_message_beside_what_is_large(name, outcomes):
    """It once was an operation for every storage, however small."""
    of_each = 2 if name == WIDE else 1
    evictions = CASES[name].evictions
    for stage, batches in enumerate(batches_of(outcomes, name)):
        trades = evictions[stage] + evictions[-1 - stage]
        for batch in batches:
            moved = {kind: count for kind, count in batch["operations"].items() if kind in ("evict", "load")}
            assert moved == ({"evict": trades * of_each, "load": trades * of_each} if trades else {})


@pytest.mark.parametrize("name", SWAPPED)
def test_what_goes_to_the_host_comes_back_as_it_was(name, outcomes):
    schedule, settings = SWAPPED[name]
    places = schedule.places
    losses, gradients = reference(len(places.order), schedule.micro_batches, settings["model"])
    for stage, batches in enumerate(batches_of(outcomes, name)):
        swaps = any(action.kind == "O" for action in schedule.actions[stage])
        for batch in batches:
            assert batch["losses"] == (losses if stage == places.last.stage else [])
            assert batch["gradients"] == [gradients[places.position(stage, c)] for c in range(places.chunks)]
            assert (batch["leftover"], batch["memory"]["own_bytes"], batch["memory"]["accepted_bytes"]) == ([], 0, 0)
            assert (batch["memory"]["swapped_bytes"] > 0) == swaps
            assert batch["memory"]["peak_units"] == schedule.peak_live[stage]


def test_where_no_stage_would_swap_one_line_says_so(outcomes):
    first, second = batches_of(outcomes, IDLE)
    assert [len(batch["remarks"]) for batch in first + second] == [1] + [0] * (2 * len(first) - 1)
    assert first[0]["remarks"][0].startswith("nothing is swapped to the host: under 1f1b, no micro-batch on 2 stages")


def test_a_swapped_share_is_not_in_the_peak(outcomes):
    """Of 1F1B's four micro-batches on the first stage two are whole: one is forwarded, and one comes back."""
    whole = batches_of(outcomes, "1f1b p=4 m=8 v=1")[0][0]["memory"]["peak_bytes"] / 4
    memory = batches_of(outcomes, "1f1b swapping 50%")[0][0]["memory"]
    swapped = memory["swapped_bytes"] / 8
    assert 0.4 * whole <= swapped <= 0.5 * whole
    assert memory["peak_bytes"] == 4 * whole - 2 * swapped


def test_the_pool_grows_to_what_is_needed_and_says_so(outcomes):
    for stage, batches in enumerate(batches_of(outcomes, "larger and larger")):
        assert [batch["leftover"] for batch in batches] == [[], [], []]
        first, second, third = (batch["pool_bytes"] for batch in batches)
        assert (second, third) == (2 * first, second)
        assert [len(batch["remarks"]) for batch in batches] == ([0, 1, 0] if first else [0, 0, 0])
        if first:
            assert batches[1]["remarks"][0].startswith(f"stage {stage} keeps 0.0 MiB for what its partner evicts")


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name.startswith("1f1b")])
def test_peak_bytes_are_peak_micro_batches_times_their_size(name, outcomes):
    """Every stage but the last (which saves its loss) has micro-batches of one size, and all of it moves."""
    per_micro_batch = batches_of(outcomes, "1f1b p=4 m=8 v=1")[1][0]["memory"]["peak_bytes"] / 3
    for stage, batches in enumerate(batches_of(outcomes, name)[:-1]):
        assert batches[-1]["memory"]["peak_bytes"] == SCHEDULES[name].peak_live[stage] * per_micro_batch


@pytest.mark.parametrize("name", ["measured now and then", "measured now and then, bpipe"])
def test_measuring_is_switched_from_batch_to_batch(name, outcomes):
    """What one batch records is gone before the next; a measured batch has the figures of any other."""
    schedule, _ = WATCHED[name]
    for stage, (first, second, third) in enumerate(batches_of(outcomes, name)):
        assert first["memory"] == third["memory"]
        assert first["memory"]["peak_units"] == schedule.peak_live[stage]
        for batch in (first, second, third):
            assert batch["leftover"] == []
            assert batch["memory"]["own_bytes"] == batch["memory"]["own_units"] == 0
        if not schedule.evictions[stage] and not any(schedule.evictions):
            assert second["memory"]["peak_bytes"] == second["memory"]["peak_units"] == 0
        assert second["exposed_ms"] == first["exposed_ms"]  # of the last batch that was measured
        assert second["memory"]["evicted_bytes"] == first["memory"]["evicted_bytes"]


def test_what_is_not_evicted_is_recorded_only_while_it_is_measured():
    """A stream goes on beyond the program that it begins with, so there any micro-batch may be evicted."""
    program = build_program(find("1f1b"), Size(4, 8), bpipe=True)
    executor = Executor(0, Connections({}, {}), torch.device("cpu"), measure=False)
    units = [Unit(number) for number in range(8)]
    evicted = [action.unit for action in program.schedule.actions[0] if action.kind == EVICT]
    assert 0 < len(evicted) < len(units)
    assert not executor.records_all(program)
    assert [unit for unit in units if executor.evicted(program)(unit)] == evicted
    assert all(map(executor.evicted(program, in_stream=True), units))
    executor.measure = True
    assert executor.records_all(program)


def test_waits_for_the_partner_are_told_and_no_others(outcomes):
    """What a slow link of a pair made its stage sleep is told; what a slow link between neighbours did, is not."""
    schedule, _ = WATCHED["slow pairs"]
    for stage, batches in enumerate(batches_of(outcomes, "slow pairs")):
        trades = bool(schedule.evictions[stage] or schedule.evictions[3 - stage])
        for batch in batches:
            if trades:
                assert 0 < batch["slept_ms"] <= batch["exposed_ms"] < batch["ms"]
            else:
                assert batch["exposed_ms"] == 0
    for batches in batches_of(outcomes, "slow neighbours"):
        assert all(batch["exposed_ms"] == 0 < batch["slept_ms"] for batch in batches)


def test_figures_of_a_stage_are_the_largest_of_its_processes(outcomes):
    largest = [[4 + stage, 2**50 + 4 + stage, 100 - stage, (4 + stage) / 8, (4 + stage) / 4] for stage in range(4)]
    assert [outcome["maxima"] for outcome in outcomes] == [largest] * 8


def test_texts_arrive_in_order_of_rank(outcomes):
    everybodys = [[f"{word} of {rank}" for rank in range(8)] for word in ("first", "second")]
    assert [outcome["texts"] for outcome in outcomes] == [everybodys] + [[None, None]] * 7


class Noted:
    """A link that counts how often it is given up."""

    given_up = 0

    def give_up(self):
        self.given_up += 1


def test_after_a_failure_no_other_batch_is_carried_out():
    """Links and slots hold half of the failed batch; going on would pair messages of different micro-batches."""

    def loss(micro_batch, output):
        if micro_batch == 1:
            raise ArithmeticError("no loss")
        return output.sum()

    edges = Edges.alike(torch.empty(2, 4))
    stage = ModuleStage([torch.nn.Linear(4, 4)], edges, lambda _: torch.ones(2, 4), loss, loss_chunk=0)
    link = Noted()
    executor = Executor(0, Connections({Link("forward", 0, 1): link}, {}), torch.device("cpu"))
    executor.run(lower(build("1f1b", 1, 1)), stage)
    assert link.given_up == 0
    with pytest.raises(ArithmeticError):
        executor.run(lower(build("1f1b", 1, 3)), stage)
    assert link.given_up == 1
    with pytest.raises(RuntimeError, match="stage 0 failed in an earlier batch"):
        executor.run(lower(build("1f1b", 1, 1)), stage)


def test_a_stream_whose_end_fails_is_given_up():
    """As at the end of a process, which would wait for what is under way as it closes its links."""

    def break_off(owed):
        raise ArithmeticError("no end")

    link = Noted()
    executor = Executor(0, Connections({Link("forward", 0, 1): link}, {}), torch.device("cpu"))
    executor.break_off(())
    executor._stream = SimpleNamespace(break_off=break_off)
    with pytest.raises(ArithmeticError):
        executor.break_off(())
    assert link.given_up == 1
    with pytest.raises(RuntimeError, match="stage 0 failed in an earlier batch"):
        executor.break_off(())
