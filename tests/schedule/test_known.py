"""Every known schedule is as drawn, within its bound, and says what it needs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from evenpipe.schedule import (
    FORWARD,
    Action,
    Schedule,
    ScheduleError,
    Size,
    Spec,
    Unit,
    build,
    check_offers,
    find,
    known,
    names,
    needs_of,
    vee,
    verify,
)
from evenpipe.simulate import Costs, Simulation, simulate
from tests import schedules

FILES = sorted(path for path in Path(known.__file__).parent.glob("*.py") if path.stem != "__init__")
SPECS: dict[str, Spec] = {}
for file in FILES:
    found = import_module(f"{known.__name__}.{file.stem}").SPEC
    SPECS[found.name] = found
del SPECS["searched"], SPECS["auto"]  # have no order of their own
DRAWINGS = [(spec, drawing) for spec in SPECS.values() for drawing in spec.drawings]


@st.composite
def sizes(draw: st.DrawFn, spec: Spec) -> Size:
    """One that the schedule is made for."""
    least, most = spec.chunks
    interleaved = spec.name.startswith("interleaved")
    stages = draw(st.integers(2 if interleaved else 1, 9))
    micro_batches = draw(st.integers(1, 24))
    if interleaved:
        group = draw(st.integers(stages, 2 * stages))
        micro_batches = group * draw(st.integers(1, 3)) + draw(st.sampled_from([0, stages]))
    elif spec.name == "2bw":
        micro_batches += stages - 1
    chunks = draw(st.integers(least, least + 2 if most is None else most))
    group_size = draw(st.integers(1, 6)) if "groups" in spec.needs else 1
    if interleaved:
        group_size = 1 if group == stages else group
    return Size(stages, micro_batches, chunks, group_size, draw(st.integers(1, 3)) if "stream" in spec.needs else 1)


specs_and_sizes = st.sampled_from(list(SPECS.values())).flatmap(lambda spec: st.tuples(st.just(spec), sizes(spec)))


def test_each_is_found_by_its_name() -> None:
    named = {
        "1f1b",
        "2bw",
        "dualpipev",
        "gpipe",
        "interleaved",
        "interleaved-zb",
        "kfkb",
        "paci",
        "v-half",
        "v-min",
        "zb-h1",
        "zb-h2",
        "zbv",
    }
    assert set(names()) >= set(SPECS) == named
    for name, spec in SPECS.items():
        assert find(name) is spec
    for name in ("searched", "auto"):
        assert find(name).name == name


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_is_drawn(spec: Spec) -> None:
    assert spec.drawings
    assert spec.summary


@pytest.mark.parametrize(("spec", "drawing"), DRAWINGS, ids=[f"{spec.name} {drawn.size}" for spec, drawn in DRAWINGS])
def test_as_drawn(spec: Spec, drawing: Any) -> None:
    drawn = Schedule.parse([line for line in drawing.rows.splitlines() if line.strip()])
    assert build(spec, drawing.size, drawing.bpipe).schedule.actions == drawn.actions


@given(specs_and_sizes)
def test_the_bound_is_the_most_that_a_stage_holds_and_with_bpipe_the_most_allowed(chosen: tuple[Spec, Size]) -> None:
    spec, size = chosen
    plain = build(spec, size).schedule
    assert max(plain.peak_live) == plain.bound == spec.bound(spec.fitted(size))
    if spec.live is not None:
        assert list(plain.peak_live) == list(spec.live(spec.fitted(size)))
    if spec.balanced is not None and size.stages > 1:
        level = build(spec, size, bpipe=True).schedule
        assert max(level.peak_live) == level.bound == min(spec.balanced(spec.fitted(size)), plain.bound)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_needs_are_those_that_sizes_have(spec: Spec) -> None:
    """No size needs what the Spec does not say, and some size all that it says."""
    most = Size(3, 6, 2 if spec.chunks[1] != 1 else 1, *((2, 1) if "groups" in spec.needs else (1, 1)))
    assert needs_of(build(spec, most).schedule) == spec.needs

    @given(sizes(spec))
    def no_more(size: Size) -> None:
        assert needs_of(build(spec, size).schedule) <= spec.needs | spec.needs_at_some

    no_more()


@given(specs_and_sizes)
def test_parse_is_the_inverse_of_str(chosen: tuple[Spec, Size]) -> None:
    spec, size = chosen
    for bpipe in (False, True)[: 1 + (spec.balanced is not None and size.stages > 1)]:
        schedule = build(spec, size, bpipe).schedule
        parsed = Schedule.parse(str(schedule))
        assert parsed == schedule
        assert verify(parsed, pairs=bpipe) == build(spec, size, bpipe)


def test_what_an_engine_lacks_is_said_in_one_sentence() -> None:
    with pytest.raises(ScheduleError) as refusal:
        check_offers(find("v-half"), frozenset(["chunks", "groups"]), "a toy")
    assert str(refusal.value) == (
        "schedule=v-half: needs model chunks that are not placed stage by stage and backwards in two halves, "
        "which a toy does not offer: choose one of 1f1b, gpipe, interleaved, kfkb"
    )


@given(st.integers(1, 12), st.integers(1, 30))
def test_1f1b_holds_what_bpipe_says(stages: int, micro_batches: int) -> None:
    """μ(s) = min(p − s, m) (BPipe §3.1)."""
    schedule = schedules.build("1f1b", stages, micro_batches)
    assert schedule.peak_live == tuple(min(stages - s, micro_batches) for s in range(stages))


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_holds_what_bpipe_says(stages: int, groups: int, chunks: int) -> None:
    """μ(s) = p(v − 1) + 2(p − s − 1) + 1, as far as there are units (BPipe, Appendix A)."""
    schedule = schedules.build("interleaved", stages, stages * groups, chunks)
    units = stages * groups * chunks
    assert schedule.peak_live == tuple(
        min(stages * (chunks - 1) + 2 * (stages - s - 1) + 1, units) for s in range(stages)
    )


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_is_megatrons_order(stages: int, groups: int, chunks: int) -> None:
    """Forwards follow `get_schedule_table` of megatron-core, backwards the same with chunks reversed."""
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = megatron.get_schedule_table(stages * groups, chunks, stages)
    for row in schedules.build("interleaved", stages, stages * groups, chunks).actions:
        assert [a.unit for a in row if a.kind == FORWARD] == [Unit(i, c) for i, c in table]
        assert [a.unit for a in row if a.kind != FORWARD] == [Unit(i, chunks - 1 - c) for i, c in table]


def simulated(name: str, size: Size) -> Simulation:
    """Where a forward, an input gradient and a weight gradient take 1 ms of a stage each."""
    return simulate(build(name, size), Costs((1.0,) * size.stages, (2.0,) * size.stages))


@given(st.integers(1, 10), st.integers(0, 20))
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_and_its_memory(stages: int, more: int) -> None:
    """(p − 1)(F + D − W) instead of (p − 1)(F + D + W) (§2.1), with p micro-batches or more."""
    size = Size(stages, stages + more)
    whole, split = simulated("1f1b", size), simulated("zb-h1", size)
    assert whole.makespan_ms == 3.0 * (size.micro_batches + stages - 1)
    assert split.makespan_ms == 3.0 * size.micro_batches + stages - 1
    assert build("zb-h1", size).schedule.bound == build("1f1b", size).schedule.bound


@given(st.integers(1, 10), st.integers(1, 20))
def test_zb_h1_is_1f1b_but_for_its_halves(stages: int, micro_batches: int) -> None:
    for row, of_1f1b in zip(
        schedules.build("zb-h1", stages, micro_batches).actions,
        schedules.build("1f1b", stages, micro_batches).actions,
        strict=True,
    ):
        whole = [a._replace(kind="B") if a.kind == "D" else a for a in row if a.kind != "W"]
        assert whole == list(of_1f1b)


@given(st.integers(1, 10), st.integers(1, 30))
def test_zb_h2_pauses_nowhere_within_a_batch_and_is_never_slower_than_zb_h1(stages: int, micro_batches: int) -> None:
    """A stage lasts as long as it computes, so that batches join, from 2p − 1 micro-batches on (§2.2)."""
    size = Size(stages, micro_batches)
    found = simulated("zb-h2", size)
    assert found.makespan_ms == simulated("zb-h1", size).makespan_ms
    pauses = [spans[-1].end_ms - spans[0].start_ms - 3.0 * micro_batches for spans in found.timeline]
    assert max(pauses) <= max(0, 2 * stages - 1 - micro_batches)


@given(st.integers(1, 12), st.integers(1, 30))
def test_v_half_holds_half_of_what_1f1b_does(stages: int, micro_batches: int) -> None:
    """⌊p/2⌋ + 1 micro-batches of a stage, which are twice as many of half a stage."""
    schedule = schedules.build("v-half", stages, micro_batches)
    assert schedule.places == vee(stages)
    assert max(schedule.peak_live) == schedule.bound == min(2 * (stages // 2 + 1), 2 * micro_batches)


@given(st.integers(1, 12), st.integers(1, 30))
def test_v_min_holds_a_third_of_what_1f1b_does(stages: int, micro_batches: int) -> None:
    """And up to four thirds of a micro-batch more."""
    schedule = schedules.build("v-min", stages, micro_batches)
    assert schedule.places == vee(stages)
    held = min((stages + 4) // 3, micro_batches)
    assert max(schedule.peak_live) == schedule.bound == 2 * held


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4), st.integers(0, 3))
def test_interleaved_zb_is_ordered_as_torchs(stages: int, rounds: int, chunks: int, more: int) -> None:
    """Which makes its groups, of p micro-batches or more, as even as they can be."""
    letters, group = {"F": "F", "D": "I", "W": "W"}, stages + min(more, (stages - 1) // rounds)
    torchs: Any = SimpleNamespace(
        pp_group_size=stages, n_local_stages=chunks, microbatches_per_round=group, _n_microbatches=group * rounds
    )
    schedule = schedules.build("interleaved-zb", stages, group * rounds, chunks, group_size=group)
    for stage, row in enumerate(schedule.actions):
        ordered = ScheduleInterleavedZeroBubble._calculate_single_rank_operations(torchs, stage)
        ours = [f"{action.chunk * stages + stage}{letters[action.kind]}{action.micro_batch}" for action in row]
        assert ours == [str(one) for one in ordered if one is not None]


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_zb_has_a_third_of_the_bubble_of_interleaved(stages: int, groups: int, chunks: int) -> None:
    size = Size(stages, stages * groups, chunks)
    bubbles = [
        simulated(name, size).makespan_ms - 3.0 * size.micro_batches for name in ("interleaved", "interleaved-zb")
    ]
    assert bubbles == pytest.approx([3 * (stages - 1) / chunks, (stages - 1) / chunks])


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("name", "torchs_own"), [("zbv", ScheduleZBVZeroBubble), ("dualpipev", ScheduleDualPipeV)])
def test_a_v_is_ordered_as_torchs(name: str, torchs_own: Any, stages: int) -> None:
    """Fused steps of DualPipeV are a forward and a backward; it refuses fewer micro-batches than 2p."""
    letters = {"F": "F", "B": "B", "D": "I", "W": "W"}
    few = (1, 2, stages, 2 * stages - 1) if name == "zbv" else ()
    for micro_batches in (*few, 2 * stages, 2 * stages + 1, 4 * stages + 1):
        torchs: Any = SimpleNamespace(pp_group_size=stages, num_stages=2 * stages, _n_microbatches=micro_batches)
        for stage, row in enumerate(schedules.build(name, stages, micro_batches).actions):
            ordered = [step for step in torchs_own._calculate_single_rank_operations(torchs, stage) if step is not None]
            part = [stage, 2 * stages - 1 - stage]
            ours = [f"{part[action.chunk]}{letters[action.kind]}{action.micro_batch}" for action in row]
            assert ours == [str(one) for step in ordered for one in (step.sub_actions or [step])]


#: When a stage's F0, F0.1, D0.1 and D0 are, of so many stages: `stable_pattern_v_half` of the authors' code.
BUILDING_BLOCKS = {
    3: [(0, 7, 8, 16), (2, 6, 10, 15), (4, 5, 12, 14)],
    4: [(0, 10, 14, 25), (2, 9, 16, 24), (4, 8, 18, 23), (6, 7, 20, 22)],
}


@pytest.mark.parametrize("stages", BUILDING_BLOCKS)
def test_v_half_repeats_its_building_block_every_six_passes(stages: int) -> None:
    """Between warm-up and cool-down. Weight gradients, oldest first, take the places between."""
    for row, block in zip(schedules.build("v-half", stages, 12).actions, BUILDING_BLOCKS[stages], strict=True):
        passes = {
            first + 6 * i: Action(kind, i, chunk)
            for first, (kind, chunk) in zip(block, [("F", 0), ("F", 1), ("D", 1), ("D", 0)], strict=True)
            for i in range(12)
        }
        assert [a for a in row if a.kind != "W"][8:-8] == [passes[time] for time in sorted(passes)][8:-8]
        assert [a.unit for a in row if a.kind == "W"][:-4] == [a.unit for a in row if a.kind == "D"][:-4]
        steady = [at for at, a in enumerate(row) if a in (Action("D", 4), Action("D", 5))]
        assert steady[1] - steady[0] == 6


@pytest.mark.parametrize(
    ("size", "share"),
    [
        *[(Size(4, 8), 0.9057), (Size(4, 16), 0.9505), (Size(8, 16), 0.8496), (Size(8, 32), 0.9187)],
        *[(Size(16, 32), 0.8240), (Size(16, 64), 0.9035)],
    ],
)
def test_v_half_is_as_fast_as_its_authors(size: Size, share: float) -> None:
    """By the code of sail-sg/zero-bubble-pipeline-parallelism: work over time, where all passes take the same."""
    assert 3.0 * size.micro_batches / simulated("v-half", size).makespan_ms == pytest.approx(share, abs=5e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1d", 4, 8), "schedule=1f1d: unknown schedule, did you mean 1f1b?"),
        (("zigzag", 4, 8), "choose one of 1f1b, gpipe, "),
        (("1f1b", 0, 8), "stages=0: must be at least 1"),
        (("1f1b", 4, 0), "micro_batches=0: must be at least 1"),
        (("1f1b", 4, 8, 2), "chunks=2: 1f1b has one model chunk"),
        (("interleaved", 4, 8, 1), "chunks=1: interleaved needs at least 2"),
        (("interleaved", 1, 8, 2), "stages=1: interleaved needs at least 2"),
        (("interleaved", 4, 6, 2), "micro_batches=6: interleaved needs a multiple of the 4 stages"),
        (("interleaved", 4, 7, 2, False, 1, 5), "=7: interleaved needs groups of 5 micro-batches, and in the last"),
        (("v-half", 4, 8, 3), "chunks=3: v-half has 2 model chunks a stage"),
        (("gpipe", 4, 8, 1, True), "bpipe: gpipe leaves nothing to balance"),
        (("zb-h1", 4, 8, 1, True), "bpipe: zb-h1 leaves nothing to balance"),
        (("1f1b", 1, 8, 1, True), "bpipe: one stage has no partner"),
        (("1f1b", 4, 8, 1, False, 1, 2), "group_size=2: 1f1b groups no micro-batches: give 1, or choose schedule kfkb"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=r"^[^\n]*$") as refusal:
        schedules.build(*arguments)
    assert message in str(refusal.value)
