"""What happens when a stage raises, dies or is stopped: the run ends soon, says why last, and leaves no process."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenpipe.megatron.trainer.launch import run_cases
from evenpipe.megatron.trainer.options import TrainOptions
from tests.end_to_end.running import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a session's processes in /proc")


@pytest.mark.parametrize(("engine", "stage", "action"), [("megatron", 0, "F2"), ("evenpipe", 1, "B3")])
def test_a_stage_that_raises_ends_the_run_with_its_error_as_the_last_line(
    run: Callable[..., Run], engine: str, stage: int, action: str
) -> None:
    status, line = run(engine=engine, fault_at=f"{stage}:{action}").ending()
    assert line == (
        f"evenpipe train: stage {stage} failed at {action}: RuntimeError: rehearsed failure, asked for by --fault-at"
    )
    assert status == 1


def test_a_stage_that_raises_during_a_transfer_does_too(run: Callable[..., Run]) -> None:
    """Its partner has the other end of the transfer under way."""
    status, line = run("--bpipe", stages="4", layers="4", fault_at="3:A1@0").ending()
    assert line.startswith("evenpipe train: stage 3 failed at A1@0: RuntimeError: rehearsed failure")
    assert status == 1


def test_a_process_that_dies_without_a_word_is_named_rather_than_the_peers_that_lost_it(
    run: Callable[..., Run],
) -> None:
    running = run()
    os.kill(running.training()[1], signal.SIGKILL)
    status, line = running.ending()
    assert re.fullmatch(r"evenpipe train: stage \d failed: its process was killed by SIGKILL", line)
    assert status == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_all_processes(run: Callable[..., Run], number: signal.Signals) -> None:
    running = run()
    os.kill(running.process.pid, number)
    status, line = running.ending()
    assert line == f"evenpipe train: stopped by {number.name}"
    assert status == 128 + number


def test_no_process_outlives_a_command_that_was_killed(run: Callable[..., Run]) -> None:
    running = run()
    assert len(running.training()) == 2
    running.process.kill()
    status, _ = running.ending()
    assert status == -signal.SIGKILL


def test_a_loss_that_is_no_number_is_told_with_iteration_stage_and_micro_batch(run: Callable[..., Run]) -> None:
    status, line = run(precision="bf16", model="bert", fault_at="0:F2", fault_kind="nan").ending()
    assert line.startswith(
        "evenpipe train: stage 1 failed at F2: FloatingPointError: loss is nan in iteration 2, micro-batch 2: use a"
    )
    assert status == 1


def test_in_fp16_a_loss_that_is_no_number_costs_one_step() -> None:
    shape = {"stages": 2, "layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 3, "iterations": 4}
    fault = {"fault_at": "0:F1", "fault_kind": "nan"}
    schedules = ("1f1b", "2bw")
    runs = run_cases([TrainOptions.of(**shape, **fault, schedule=name, precision="fp16") for name in schedules])
    for spoilt in runs:
        assert spoilt.skipped_iterations == (1,)
        document = spoilt.to_json()
        assert [norm is None for norm in document["grad_norms"]] == [False, True, False, False]
        assert [loss is None for loss in document["losses"]] == [False, True, False, False]


def test_a_stage_that_dies_ends_a_run_that_saves_just_as_soon(run: Callable[..., Run], tmp_path: Path) -> None:
    status, line = run(fault_at="1:B3", fault_kind="kill", save=str(tmp_path)).ending()
    assert re.fullmatch(r"evenpipe train: stage \d failed: its process was killed by SIGKILL", line)
    assert status == 1
    assert not (tmp_path / "latest").exists()
