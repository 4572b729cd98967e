"""Which schedule is chosen for given times, bytes and memory, and what is said of it."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.order_search.search import Effort
from evenpipe.schedule import AUTO, Schedule, ScheduleError, Size, find, verify
from evenpipe.schedule.known.auto import LOOPED, WHOLE
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.simulator import simulate
from evenpipe.tuner.choosing import ChoiceLoop, choose, options
from evenpipe.tuner.part_watch import PartWatch

QUICK = Effort(seconds=0.0, samples=1)
SAVED = 100


def costs(cap, stages=4, vee=False, message_ms=0.0, weight_ms=10.0, peer=None):
    part = Part(
        forward_ms=10,
        input_gradient_ms=10,
        weight_gradient_ms=weight_ms,
        saved_bytes=SAVED,
        freed_by_input_gradient_bytes=SAVED // 2,
    )
    return RunCosts(
        format="evenpipe.costs/1",
        placement="vee" if vee else "straight",
        parts=[part] * (2 * stages if vee else stages),
        message_ms=message_ms,
        memory_bytes=[cap] * stages,
        peer_bytes_per_ms=peer,
    )


def test_all_that_a_placement_takes_is_weighed():
    straight = {one.name for one in options(costs(0, peer=100), Size(4, 8))}
    assert straight == {
        *("1f1b", "1f1b with BPipe", "gpipe", "zb-h1", "zb-h2", "kfkb in groups of 2 with BPipe"),
        *(f"kfkb in groups of {k}" for k in (2, 3, 4)),
    }
    assert not any("BPipe" in one.name for one in options(costs(0), Size(4, 8)))
    in_a_v = {one.name for one in options(costs(0, vee=True), Size(4, 8, 2))}
    assert in_a_v == {"v-half", "v-min", "zbv", "dualpipev"}
    parts = [costs(0).parts[0]] * 12
    looped = costs(0).model_copy(update={"placement": "loop", "parts": parts})
    assert {one.name for one in options(looped, Size(4, 8, 3))} == {"interleaved", "interleaved-zb"}


def test_bytes_are_those_of_the_most_micro_batches_that_a_stage_holds_its_guests_too():
    held = {one.name: one.saved_bytes for one in options(costs(0, peer=1000), Size(4, 8))}
    assert held["1f1b"] == (400, 300, 200, 100)
    assert max(held["1f1b with BPipe"]) == 300
    assert held["gpipe"] == (800,) * 4


def test_a_stock_order_that_is_as_fast_is_kept():
    """Many micro-batches leave little of a bubble, so that nothing is faster by 2 %."""
    chosen, others = choose(costs(10_000, stages=2), Size(2, 64), effort=QUICK)
    assert chosen.name == "1f1b"
    assert min(one.batch_ms for one in others) < chosen.batch_ms


@pytest.mark.parametrize(("cap", "fits"), [(10_000, "zb-h1"), (320, "1f1b with BPipe")])
def test_less_memory_takes_another_schedule(cap, fits):
    chosen, others = choose(costs(cap, peer=1e4), Size(4, 8), effort=QUICK)
    assert max(chosen.saved_bytes) <= cap
    weighed = {one.name: one for one in (chosen, *others)}
    assert weighed[fits].fits(costs(cap))
    assert chosen.batch_ms <= 1.02 * weighed[fits].batch_ms


def test_slow_partners_do_not_get_bpipe():
    chosen, others = choose(costs(320, peer=0.1), Size(4, 8), effort=QUICK)
    assert "BPipe" not in chosen.name
    assert any(one.name == "1f1b with BPipe" and one.fits(costs(320)) for one in others)


@settings(max_examples=15)
@given(
    stages=st.integers(2, 4),
    micro_batches=st.integers(2, 8),
    cap=st.integers(SAVED, 10 * SAVED),
    vee=st.booleans(),
    message_ms=st.sampled_from([0.0, 3.0]),
)
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster_by_more_than_a_tie(
    stages, micro_batches, cap, vee, message_ms
):
    given_costs = costs(2 * cap if vee else cap, stages, vee, message_ms, peer=100)
    size = Size(stages, micro_batches, 2 if vee else 1)
    chosen, others = choose(given_costs, size, effort=QUICK)
    assert chosen.fits(given_costs)
    assert all(chosen.batch_ms <= 1.02 * one.batch_ms for one in others if one.fits(given_costs))
    # What other ranks are sent is the same program.
    schedule = Schedule.parse(str(chosen.program.schedule))
    sent = verify(schedule, any(schedule.evictions))
    assert simulate(sent, Costs.of_parts(given_costs, schedule)).makespan_ms == pytest.approx(chosen.batch_ms)


def test_halves_of_backwards_are_put_together_where_layers_leave_a_second_one():
    for one in options(costs(0, peer=100), Size(4, 8), halves=True):
        assert "B" not in {action.kind for row in one.program.schedule.actions for action in row}


def looped(cap, chunks=2):
    parts = [costs(0).parts[0]] * (4 * chunks)
    return costs(cap, peer=1e4).model_copy(update={"placement": "loop", "parts": parts})


def test_passes_that_are_computed_together_have_megatron_s_order_with_and_without_bpipe():
    together = find(AUTO).fused_form
    assert {one.name for one in options(looped(0), Size(4, 8, 2), of=together)} == {
        *("interleaved", "interleaved with BPipe"),
    }
    assert all(one.program.fused for one in options(looped(0), Size(4, 8, 2), of=together))
    chosen, _ = choose(looped(1100), Size(4, 8, 2), of=together)
    assert chosen.name == "interleaved with BPipe"
    with pytest.raises(ScheduleError, match=r"^no schedule fits: give more memory$"):
        choose(looped(500), Size(4, 8, 2), of=together)


def test_whole_backwards_are_never_halved():
    chosen, others = choose(costs(10_000, peer=1e4), Size(4, 8), effort=QUICK, of=WHOLE)
    rows = (row for one in (chosen, *others) for row in one.program.schedule.actions)
    assert not {"D", "W"} & {action.kind for row in rows for action in row}
    assert {"1f1b", "gpipe"} <= {one.name for one in (chosen, *others)}


@pytest.mark.parametrize(("kind", "chunks"), [(WHOLE, 1), (WHOLE, 2), (LOOPED, 2)])
def test_batches_that_are_looked_at_follow_the_kind_of_choice(kind, chunks):
    loop = ChoiceLoop(PartWatch())
    loop.allow(remedy="", spec=kind)
    schedule = loop.program(Size(4, 8, chunks), "many").schedule
    assert schedule.places == kind.places(Size(4, 8, chunks))
    assert ("B" in {action.kind for row in schedule.actions for action in row}) == (kind is WHOLE)


def test_memory_that_holds_no_micro_batch_raises_with_what_is_needed():
    loop = ChoiceLoop(PartWatch())
    loop.allow(", or more stages")
    loop._limit_bytes = 3 * 2**30
    parts = [Part(forward_ms=1, input_gradient_ms=1, weight_gradient_ms=1, saved_bytes=2**30)] * 2
    places = costs(0, stages=2).places(2)
    loop._check_room(parts, places, [2**30, 2**31])
    with pytest.raises(ScheduleError, match=r"^no schedule fits: stage 0 .* 1,024\.0 MiB for .* 3.5 GiB, or more st"):
        loop._check_room(parts, places, [2**29, 2**31])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_batches_that_are_looked_at_hold_one_micro_batch_at_a_time(chunks):
    program = ChoiceLoop(PartWatch()).program(Size(4, 8, chunks), "many")
    assert program.schedule.peak_live == (chunks,) * 4


def test_a_choice_is_kept_when_a_run_goes_on():
    loop, size = ChoiceLoop(PartWatch()), Size(4, 8)
    loop.join(True)
    loop.costs = costs(320, peer=1e4)
    schedule, said = loop._find(loop.costs, size, "many")
    assert said.startswith("8 micro-batches: ")
    loop._found[8] = schedule
    other = ChoiceLoop(PartWatch())
    other.load_state_dict(loop.state_dict())
    other.begin(1_000_000, size)
    assert not other.weighs
    assert str(other.program(size, "many").schedule) == str(schedule)


@pytest.mark.parametrize("evicts", [True, False])
def test_a_choice_that_evicts_is_made_anew_where_a_run_that_goes_on_cannot(evicts, alone):
    size = Size(4, 8)
    loop = ChoiceLoop(PartWatch(), effort=QUICK)
    loop.join(True)
    loop.costs, loop._limit_bytes = costs(320, peer=1e4), 320
    chosen = next(one for one in options(loop.costs, size) if one.name == "1f1b with BPipe")
    loop._found[8] = chosen.program.schedule
    other = ChoiceLoop(PartWatch(), effort=QUICK)
    other.join(evicts)
    other.load_state_dict(loop.state_dict())
    other.prepare(SimpleNamespace(swaps=None), size, "many")
    assert any(other.program(size, "many").schedule.evictions) == evicts
