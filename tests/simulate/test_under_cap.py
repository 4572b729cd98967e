"""What stages save under a cap is kept, recomputed, swapped or sent to partners: whatever is fastest by simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from evenpipe.schedule import GAINING, Link, Programs, Size, Spec, build, needs_of, partner, swapping_at
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate import Costs, Wire, simulate
from evenpipe.simulate.under_cap import CappedStage, Layer, Way, costs_of, planned, ways_of

CAPS = [cap / 20 for cap in range(19, 7, -2)]  # of what the worst stage of 1F1B holds: 0.95 to 0.45


class Model(NamedTuple):
    """Layers of each stage, what one saves and leaves; the times of a copy and of a message of one to the partner."""

    layers: tuple[int, ...]
    copy_ms: float
    sent_ms: float
    saved: tuple[float, ...] = (100.0,)
    left: float = 10.0
    forward_ms: float = 10.0
    staying: float = 0.0
    micro_batches: int = 16

    @property
    def size(self) -> Size:
        return Size(len(self.layers), self.micro_batches)

    def stage(self, number: int, limit_bytes: float) -> CappedStage:
        saved = [self.saved[at % len(self.saved)] for at in range(self.layers[number])]
        layers = [Layer(one - self.left, self.forward_ms) for one in saved]
        total, forward_ms = sum(saved), self.forward_ms * len(layers)
        return CappedStage(
            limit_bytes,
            {0: Saved(total, self.staying * total)},
            [layers],
            [forward_ms],
            [2 * forward_ms],
            self.copy_ms / 100.0,
            self.sent_ms / 100.0,
        )


MODELS = {
    "even, fast copies": Model((4,) * 4, copy_ms=5, sent_ms=2),
    "even, slow copies": Model((4,) * 4, copy_ms=20, sent_ms=15),
    "uneven": Model((6, 5, 3, 2), copy_ms=10, sent_ms=8),
    "uneven, the last is the slowest": Model((2, 3, 4, 6), copy_ms=15, sent_ms=4, micro_batches=12),
    "experts": Model((4,) * 4, copy_ms=12, sent_ms=12, saved=(60, 240), staying=0.1),
    "six stages": Model((3,) * 6, copy_ms=15, sent_ms=30, micro_batches=18),
}


def single_policies(model: Model, limit_bytes: float) -> dict[str, float]:
    """The milliseconds of BPipe, of half of each micro-batch on the host, and of full recomputation, where they fit."""
    stages = [model.stage(number, limit_bytes) for number in range(len(model.layers))]
    saved = [stage.saved[0].nbytes for stage in stages]
    forward_ms = [stage.forward_ms[0] for stage in stages]
    full_ms = tuple(3 * ms for ms in forward_ms)
    plain, half = build("1f1b", model.size), build("1f1b", model.size, swaps=GAINING)
    bpipe = build("1f1b", model.size, bpipe=True)
    evicts = {
        Link(kind, *ends): Wire(transmit_ms=saved[stage] * model.sent_ms / 100)
        for stage in range(len(stages) // 2)
        for other in [partner(stage, len(stages))]
        for kind, ends in (("evict", (stage, other)), ("load", (other, stage)))
    }
    swaps = {
        Link(kind, stage, stage): Wire(transmit_ms=saved[stage] * min(0.5, 1 - model.staying) * model.copy_ms / 100)
        for stage in range(len(stages))
        for kind in ("swap out", "swap in")
    }
    backward_ms = tuple(2 * ms for ms in forward_ms)
    found = {}
    of_bpipe = simulate(bpipe, Costs(tuple(forward_ms), backward_ms, links=evicts), [[round(one)] for one in saved])
    if max(one.peak_bytes for one in of_bpipe.stages) <= limit_bytes:
        found["BPipe"] = of_bpipe.makespan_ms
    rooms = zip(half.schedule.actions, stages, strict=True)
    if max(SwapRoom(row).peak_bytes(stage.saved, 0.5) for row, stage in rooms) <= limit_bytes:
        costs = Costs(tuple(forward_ms), backward_ms, links=swaps, awaited_swaps=True)
        found["half to the host"] = simulate(half, costs).makespan_ms
    inputs = [model.left * layers for layers in model.layers]
    held = [
        SwapRoom(row).peak_bytes({0: Saved(one)}, 0) for row, one in zip(plain.schedule.actions, inputs, strict=True)
    ]
    if max(held) + max(model.saved) - model.left <= limit_bytes:
        found["full recomputation"] = simulate(plain, Costs(tuple(forward_ms), full_ms)).makespan_ms
    return found


def test_a_table_of_many_micro_batches_is_planned_at_its_own_size() -> None:
    model = MODELS["six stages"]._replace(micro_batches=30)
    plain = Programs("1f1b")
    schedule = plain(model.size).schedule
    stages = [model.stage(number, 1200.0) for number in range(len(model.layers))]
    named = planned(plain, model.size, stages)
    table = planned(Programs(Spec.of(schedule, needs_of(schedule))), model.size, stages)
    assert named is not None
    assert table is not None
    assert table.batch_ms == pytest.approx(named.batch_ms, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_is_slower_than_the_best_single_policy(name: str) -> None:
    model = MODELS[name]
    plain = Programs("1f1b")
    rows = plain(model.size).schedule.actions
    unlimited = [model.stage(number, 0.0) for number in range(len(model.layers))]
    worst = max(SwapRoom(row).peak_bytes(stage.saved, 0) for row, stage in zip(rows, unlimited, strict=True))
    fitting = 0
    for cap in CAPS:
        stages = [model.stage(number, cap * worst) for number in range(len(model.layers))]
        singles, plan = single_policies(model, cap * worst), planned(plain, model.size, stages)
        fitting += len(singles)
        assert plan is not None or not singles
        if plan is None:
            continue
        assert plan.batch_ms <= min(singles.values(), default=plan.batch_ms) + 1e-6, (cap, plan.ways, singles)
        for row, stage, way in zip(rows, stages, plan.ways, strict=True):
            again = stage.recomputing(way.layers)
            held = SwapRoom(swapping_at(way.level, row)).peak_bytes(again.saved, way.share)
            assert plan.bpipe or held <= again.limit_bytes
    assert fitting >= len(CAPS)


def test_few_recomputed_layers_beside_swaps_are_faster_than_either() -> None:
    model = Model((4,) * 4, copy_ms=20, sent_ms=1000)
    stages = [model.stage(number, 0.45 * 4 * 400) for number in range(4)]
    plan = planned(Programs("1f1b"), model.size, stages)
    assert plan is not None
    assert not plan.bpipe
    singles = single_policies(model, 0.45 * 4 * 400)
    assert list(singles) == ["full recomputation"]
    assert plan.batch_ms < 0.95 * singles["full recomputation"]
    assert any(way.layers and way.share for way in plan.ways) or any(0 < way.layers < 4 for way in plan.ways)


def test_one_pair_sends_to_its_partner_beside_stages_that_swap_and_recompute() -> None:
    """What leaves a stage is what its links and its partner have room for: a mix that no single policy has."""
    model = Model((6, 5, 3, 2), copy_ms=40, sent_ms=4)
    stages = [model.stage(number, 0.6 * 4 * 600) for number in range(4)]
    plan = planned(Programs("1f1b"), model.size, stages)
    assert plan is not None
    first, second, third, last = plan.ways
    assert first.bound == last.bound == 3
    assert first.layers > 0
    assert (second.bound, second.level) == (0, GAINING)
    assert third == Way("none", 0.0, 0)
    alone = [replace(stage, partner_ms_a_byte=None) for stage in stages]
    without = planned(Programs("1f1b"), model.size, alone)
    assert without is not None
    assert plan.batch_ms < without.batch_ms
    assert list(single_policies(model, 0.6 * 4 * 600)) == ["full recomputation"]
    again = [stage.recomputing(way.layers) for stage, way in zip(stages, plan.ways, strict=True)]
    held = simulate(
        plan.program, costs_of(stages, plan.ways), [[round(stage.saved[0].nbytes)] for stage in again]
    ).stages
    for number in (0, 3):
        assert held[number].peak_bytes <= again[number].limit_bytes


def test_what_cannot_leave_counts_beside_what_is_sent() -> None:
    """With a tenth that stays, a stage that has sent one of four micro-batches holds more than three."""
    for staying, sends in ((0.0, True), (0.1, False)):
        model = Model((4,) * 4, copy_ms=1000, sent_ms=1, staying=staying)
        stages = [replace(model.stage(number, 1200.0), layers=[[]]) for number in range(4)]
        plan = planned(Programs("1f1b"), model.size, stages)
        assert plan is not None
        assert plan.bpipe == sends


def test_layers_that_are_kept_make_room_for_the_one_that_is_recomputed() -> None:
    stage = Model((3,), copy_ms=1, sent_ms=1).stage(0, 1000.0)
    assert [stage.recomputing(layers).saved[0].nbytes for layers in range(4)] == [300, 210, 120, 30]
    assert [stage.recomputing(layers).limit_bytes for layers in range(4)] == [1000, 1000, 1000, 910]
    assert [stage.recomputing(layers).backward_ms for layers in range(4)] == [[60], [70], [80], [90]]


def test_a_stage_without_layers_that_recompute_has_swaps_alone() -> None:
    [row, *_] = Programs("1f1b")(Size(4, 8)).schedule.actions
    stage = CappedStage(300.0, {0: Saved(100.0)}, [[]], [1.0], [2.0])
    assert [way.level for way in ways_of(row, stage)] == ["gaining", "late"]
    assert ways_of(row, CappedStage(400.0, {0: Saved(100.0)}, [[]], [1.0], [2.0])) == [Way("none", 0.0, 0)]
    assert ways_of(row, CappedStage(90.0, {0: Saved(100.0)}, [[]], [1.0], [2.0])) == []


def test_no_plan_where_a_stage_cannot_keep_to_its_cap() -> None:
    model = MODELS["even, fast copies"]
    stages = [model.stage(number, 1600.0) for number in range(3)] + [model.stage(3, 90.0)]
    assert planned(Programs("1f1b"), model.size, stages) is None
