"""EvenPipe's programs as schedules of DeepSpeed's engine."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from evenpipe.deepspeed.lowering import ProgramSchedule
from evenpipe.schedule import BACKWARD, FORWARD, lower
from tests.schedules import build


def _instructions(name: str, stages: int, micro_batches: int, stage: int, **more: object) -> list[str]:
    program = lower(build(name, stages, micro_batches, **more))  # type: ignore[arg-type]
    return [type(one).__name__ for step in ProgramSchedule(program, stage) for one in step]


def test_a_stage_does_what_its_program_says_and_ends_as_deepspeed_does() -> None:
    end = ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    first, last = ["LoadMicroBatch", "Forward"], ["Forward", "Backward"]
    assert _instructions("1f1b", 3, 2, 0) == [*first, *first, "Backward", "Backward", *end]
    assert _instructions("1f1b", 3, 2, 1) == [*["Forward"] * 2, *["Backward"] * 2, *end]
    assert _instructions("1f1b", 3, 2, 2) == ["LoadMicroBatch", *last, "LoadMicroBatch", *last, *end]


def test_a_backward_in_two_halves_frees_its_buffer_with_the_first() -> None:
    program = lower(build("zb-h1", 4, 8))
    assert [ProgramSchedule(program, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 1]
    names = _instructions("zb-h1", 4, 8, 3)
    assert names.count("InputGradient") == names.count("WeightGradient") == 8


def test_pairs_trade_by_instructions_of_their_own() -> None:
    evictor = _instructions("1f1b", 4, 8, 0, bpipe=True)
    acceptor = _instructions("1f1b", 4, 8, 3, bpipe=True)
    evictions = evictor.count("Evict")
    assert evictions > 0
    assert evictions == evictor.count("Load")
    assert evictions == acceptor.count("Accept") == acceptor.count("Return")


@pytest.mark.parametrize(("name", "held"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4), ("kfkb", [8, 6, 4, 2])])
def test_a_stage_has_a_buffer_for_each_micro_batch_that_waits_for_its_backward(name: str, held: list[int]) -> None:
    program = lower(build(name, 4, 8, group_size=2 if name == "kfkb" else 1))
    assert [ProgramSchedule(program, stage).num_pipe_buffers() for stage in range(4)] == held


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_nothing_is_awaited_before_it_is_known_what_it_is_like(micro_batches: int, group_size: int) -> None:
    program = lower(build("kfkb", 3, micro_batches, group_size=group_size))
    for stage in range(3):
        forwarded, posted = set(), set()
        for instructions in ProgramSchedule(program, stage):
            for step in (one.step for one in instructions if hasattr(one, "step")):
                for message in step.post:
                    posted.add(message)
                    if message.link.kind == "backward":
                        assert message.micro_batch in forwarded
                assert {message for message in step.complete if message.link.target == stage} <= posted
                if step.action.kind == FORWARD:
                    forwarded.add(step.action.micro_batch)
                elif step.action.kind == BACKWARD:
                    assert step.action.micro_batch in forwarded
