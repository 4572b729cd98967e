"""Graphs that Transformer Engine captures in Megatron's order are replayed in that order only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as megatrons
from megatron.core.transformer import cuda_graphs

from evenpipe.megatron.captured import captured_row, refused_capture
from evenpipe.megatron.stage import Batch, MegatronStage
from evenpipe.megatron.supported import installed_release
from evenpipe.schedule import Schedule, Size, Unit, build, find, fused_form

# Until 0.15 it was one of the schedules.
convert = getattr(cuda_graphs, "convert_schedule_table_to_order", None) or megatrons.convert_schedule_table_to_order
CAPTURING = SimpleNamespace(cuda_graph_impl="transformer_engine")


def order_of(row: list) -> list[int]:
    """As Transformer Engine is told: the chunk, from 1, negative where it is a backward."""
    return [(1 + action.unit.chunk) * (1 if action.kind == "F" else -1) for action in row]


@given(st.data())
def test_it_is_the_order_that_megatron_captures(data: st.DataObject) -> None:
    p, chunks = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([None, 2, 3]))
    m, stage = data.draw(st.integers(1, 20)), data.draw(st.integers(0, p - 1))
    group = data.draw(st.integers(p, p + 4))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", p)
        patched.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", stage)
        patched.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", chunks)
        _, _, ahead, _ = megatrons.get_pp_rank_microbatches(m, chunks or 1, group, False)
    table = megatrons.get_schedule_table(m, chunks or 1, group)
    assert order_of(captured_row(p, stage, m, chunks, group)) == convert(ahead, chunks or 1, table)


@pytest.mark.parametrize(
    ("name", "size"),
    [("1f1b", Size(4, 8)), ("1f1b", Size(8, 3)), ("interleaved", Size(4, 8, 2)), ("kfkb", Size(4, 8))],
)
def test_a_schedule_in_megatrons_order_replays(name: str, size: Size) -> None:
    assert refused_capture(CAPTURING, lambda: build(name, size).schedule) is None


def test_virtual_stages_are_captured_in_their_groups() -> None:
    in_groups = SimpleNamespace(cuda_graph_impl="transformer_engine", microbatch_group_size_per_vp_stage=6)
    for micro_batches in (6, 10, 12):
        size = Size(4, micro_batches, 2, 6)
        assert refused_capture(in_groups, lambda size=size: build("interleaved", size).schedule) is None
    assert refused_capture(in_groups, lambda: build("interleaved", Size(4, 12, 2)).schedule) is not None


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("kfkb", Size(4, 8, group_size=2), "action 5 of stage 0 is B0, not F4"),
        ("gpipe", Size(4, 8), "action 5 of stage 0 is B0, not F4"),
        ("zb-h1", Size(4, 8), "of stage 0 is B0, not D0"),
    ],
)
def test_another_order_is_refused_and_says_where_it_differs(name: str, size: Size, said: str) -> None:
    refusal = refused_capture(CAPTURING, lambda: build(name, size).schedule)
    assert refusal is not None
    assert said in refusal.reason
    assert refusal.setting == "cuda_graph_impl"


def test_one_swapped_pair_in_a_table_of_a_users_own_is_enough() -> None:
    schedule = build("1f1b", Size(2, 4)).schedule
    rows = [[str(action) for action in row] for row in schedule.actions]
    rows[0][1:3] = reversed(rows[0][1:3])
    table = Schedule.parse("\n".join(" ".join(row) for row in rows))
    refusal = refused_capture(SimpleNamespace(external_cuda_graph=True), lambda: table)
    assert refusal is not None
    assert refusal.setting == "external_cuda_graph"


def test_without_graphs_no_schedule_is_asked_for() -> None:
    assert refused_capture(SimpleNamespace(cuda_graph_impl="none"), lambda: 1 // 0) is None


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_experts_messages_are_hidden_in_megatrons_order(p: int, v: int, batches: int) -> None:
    m = p * batches
    schedule = build(fused_form(find("interleaved"), v), Size(p, m, v)).schedule
    table = megatrons.get_schedule_table(m, v, p)
    for stage in range(p):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", p)
            patched.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", stage)
            patched.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", v)
            ahead = megatrons.get_pp_rank_microbatches(m, v, p, False, overlap_moe_expert_parallel_comm=True)[2]
        assert order_of(schedule.actions[stage]) == convert(ahead, v, table)


def test_graphs_of_layers_that_take_turns_are_refused() -> None:
    both = SimpleNamespace(cuda_graph_impl="transformer_engine", overlap_moe_expert_parallel_comm=True)
    refusal = refused_capture(both, lambda: build("interleaved", Size(4, 8, 2)).schedule)
    assert refusal is not None
    assert "in turn" in refusal.reason


class Replay(torch.autograd.Function):
    """A captured layer: the gradient of its input is memory of graphs, which each replay writes."""

    @staticmethod
    def forward(ctx, value, memory):  # type: ignore[no-untyped-def]
        ctx.memory = memory
        return value * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        torch.mul(gradient, 2, out=ctx.memory)
        return ctx.memory.detach(), None


def test_what_a_later_replay_writes_is_not_what_is_still_being_sent() -> None:
    """A gradient is under way while the next backward computes, whose graphs use the same memory."""
    config = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        external_cuda_graph=True,
        **dict.fromkeys(("no_sync_func", "grad_sync_func", "param_sync_func", "grad_scale_func", "timers")),
        deallocate_pipeline_outputs=False,
    )
    model = torch.nn.Identity()
    model.model_type = None  # which some releases ask for
    batch = Batch(lambda: None, [], [model], config, 2, [], [], 1, False)
    device = torch.device("cpu")
    stage = MegatronStage(batch, build("1f1b", Size(2, 2)).schedule, 0, device, installed_release())
    memory, sent = torch.zeros(3), []
    for unit in (Unit(0, 0), Unit(1, 0)):
        value = torch.ones(3, requires_grad=True)
        stage._inputs[unit], stage._outputs[unit] = [value], [Replay.apply(value, memory)]
        sent += stage.backward(unit, [torch.full((3,), unit.micro_batch + 1.0)])
    assert [gradient.tolist() for gradient in sent] == [[2.0] * 3, [4.0] * 3]
