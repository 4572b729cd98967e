"""What happens when a stage raises, dies or is stopped: the run ends soon, says why last, and leaves no process."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from tests.end_to_end.running import Ending, Run
from tests.rig.faults import Fault

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds a session's processes in /proc"),
    pytest.mark.gate,
]


def _kill_a_stage(run: Run) -> None:
    os.kill(run.training()[1], signal.SIGKILL)


def _kill_the_command(run: Run) -> None:
    assert len(run.training()) == 2
    run.process.kill()


def _signal_to_the_command(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: os.kill(run.process.pid, number)


class _Case(NamedTuple):
    """A run, and what is done to it after its first iteration."""

    changes: dict[str, str]
    flags: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    done: Callable[[Run], None] = lambda run: None


CASES = {
    "raises, megatron": _Case({"engine": "megatron"}, fault=("0:F2", "raise")),
    "raises, evenpipe": _Case({"engine": "evenpipe"}, fault=("1:B3", "raise")),
    "raises during a transfer": _Case({"stages": "4", "layers": "4"}, ("--bpipe",), ("3:A1@0", "raise")),
    "a stage is killed": _Case({}, done=_kill_a_stage),
    "SIGTERM": _Case({}, done=_signal_to_the_command(signal.SIGTERM)),
    "SIGINT": _Case({}, done=_signal_to_the_command(signal.SIGINT)),
    "the command is killed": _Case({}, done=_kill_the_command),
    "no number": _Case({"precision": "bf16", "model": "bert"}, fault=("0:F2", "nan")),
    "a stage of a run that saves dies": _Case({}, fault=("1:B3", "kill")),
}


def ending_of(name: str, **changes: str) -> Ending:
    """How the run of that name in CASES ends."""
    case = CASES[name]
    with Run(*case.flags, fault=case.fault, **{**case.changes, **changes}) as run:
        case.done(run)
        return run.ending()


@pytest.mark.parametrize(("engine", "stage", "action"), [("megatron", 0, "F2"), ("evenpipe", 1, "B3")])
def test_a_stage_that_raises_ends_the_run_with_its_error_as_the_last_line(engine: str, stage: int, action: str) -> None:
    status, line = ending_of(f"raises, {engine}")
    assert line == f"evenpipe train: stage {stage} failed at {action}: RuntimeError: rehearsed failure"
    assert status == 1


def test_a_stage_that_raises_during_a_transfer_does_too() -> None:
    """Its partner has the other end of the transfer under way."""
    status, line = ending_of("raises during a transfer")
    assert line.startswith("evenpipe train: stage 3 failed at A1@0: RuntimeError: rehearsed failure")
    assert status == 1


def test_a_process_that_dies_without_a_word_is_named_rather_than_the_peers_that_lost_it() -> None:
    status, line = ending_of("a stage is killed")
    assert re.fullmatch(r"evenpipe train: stage \d failed: its process was killed by SIGKILL", line)
    assert status == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_all_processes(number: signal.Signals) -> None:
    status, line = ending_of(number.name)
    assert line == f"evenpipe train: stopped by {number.name}"
    assert status == 128 + number


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGQUIT,)])
def test_a_save_that_does_not_come_to_an_end_is_not_waited_for_if_told_so(
    numbers: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    with Run(save=str(tmp_path)) as run:
        run.stop(1)
        for number in numbers:
            os.kill(run.process.pid, number)
            time.sleep(0.5)
        status, line = run.ending()
    assert line.startswith(f"evenpipe train: stopped by {numbers[0].name}")
    assert status == 128 + numbers[0]


def test_what_a_script_has_written_before_it_trains_is_not_lost() -> None:
    program = """
        from evenpipe.train.launch import run_cases
        from evenpipe.train.options import TrainOptions
        if __name__ == "__main__":
            print("before", flush=False)
            tiny = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 16}
            run_cases([TrainOptions(engine="module", stages=1, iterations=1, **tiny)])
            print("after")
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "before\nafter\n"), done.stderr


def test_no_process_outlives_a_command_that_was_killed() -> None:
    status, _ = ending_of("the command is killed")
    assert status == -signal.SIGKILL


def test_a_loss_that_is_no_number_is_told_with_iteration_stage_and_micro_batch() -> None:
    status, line = ending_of("no number")
    assert line.startswith(
        "evenpipe train: stage 1 failed at F2: FloatingPointError: loss is nan in iteration 2, micro-batch 2: use a"
    )
    assert status == 1


def test_a_stage_that_dies_ends_a_run_that_saves_just_as_soon(tmp_path: Path) -> None:
    status, line = ending_of("a stage of a run that saves dies", save=str(tmp_path))
    assert re.fullmatch(r"evenpipe train: stage \d failed: its process was killed by SIGKILL", line)
    assert status == 1
    assert not (tmp_path / "latest").exists()


def test_in_fp16_a_loss_that_is_no_number_costs_one_step() -> None:
    shape = {"stages": 2, "layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 3, "iterations": 4}
    runs = []
    for name in ("1f1b", "2bw"):
        with Fault("0:F1", "nan").rehearsed():
            runs += run_cases([TrainOptions.of(**shape, schedule=name, precision="fp16")])
    for spoilt in runs:
        assert spoilt.skipped_iterations == (1,)
        document = spoilt.to_json()
        assert [norm is None for norm in document["grad_norms"]] == [False, True, False, False]
        assert [loss is None for loss in document["losses"]] == [False, True, False, False]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_stopped_under_2bw_is_named_within_the_timeout(stage: int) -> None:
    """Its embedding is tied: the other stage waits for a gradient, or for figures, and not for a link."""
    with Run(schedule="2bw", timeout_minutes="0.2") as run:
        run.stop(stage)
        ending = run.ending(patience=40.0)
    assert ending.status == 1
    silent = rf"rank {stage} \(stage {stage}\) has given no sign of life for \d+ s"
    waited = rf"rank {1 - stage} .* waited 12 s for .* the timeout \(--timeout-minutes\)"
    assert re.search(f": {silent}: {waited}$", ending.line), ending.line
