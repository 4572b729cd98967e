"""A stage that dies ends the whole job at once, with its own error last."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import command
from tests.ports import free_port

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gate


def _launcher(name: str) -> list[str]:
    if name == "torchrun":
        return ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return ["deepspeed.launcher.runner", "--num_gpus", "4", "--master_port", str(free_port()), "--no_local_rank"]


def _broken(how: str, launcher: str, section: dict[str, object], folder: Path) -> tuple[str, float, float]:
    """What the job of `train_broken` said, and the seconds from its start until a stage failed, and from then on."""
    cases = folder / "cases.json"
    cases.write_text(json.dumps([{"stages": 4, "tied": True, "config": {"evenpipe": section}, "steps": 50}]))
    script = Path(__file__).with_name("train_broken.py")
    started_at = time.time()
    job = subprocess.Popen(
        [sys.executable, "-m", *_launcher(launcher), str(script), how, str(cases), str(folder / "out.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    try:
        output, _ = job.communicate(timeout=800)
        ended_at = time.time()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    failed = re.search(r"FAILS AT ([\d.]+)", output)
    assert failed is not None, output[-4000:]
    return output, float(failed[1]) - started_at, ended_at - float(failed[1])


@pytest.mark.parametrize(("how", "launcher", "schedule"), [("raise", "deepspeed", "2bw"), ("kill", "torchrun", "1f1b")])
def test_a_stage_that_dies_ends_the_job_within_15_seconds(
    how: str, launcher: str, schedule: str, tmp_path: Path
) -> None:
    output, until, after = _broken(how, launcher, {"schedule": schedule, "bpipe": True}, tmp_path)
    # On a busy machine all takes longer, as the start has.
    assert after < max(15, until)
    if how == "raise":
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)", output, re.MULTILINE)
        assert errors[-1] == "RuntimeError: stage two is broken", output[-4000:]


def test_a_stage_that_is_stopped_under_2bw_is_named_with_deepspeeds_remedy(tmp_path: Path) -> None:
    """Weights are tied; DeepSpeed's own groups have torch's timeout of half an hour."""
    output, _, after = _broken("stop", "torchrun", {"schedule": "2bw"}, tmp_path)
    assert after < 120  # half a minute of which is torchrun's patience with a process that is stopped
    lines = re.findall(r"evenpipe: error: (rank .*)", output)
    said = r"rank 2 \(stage 2\) has given no sign of life for \d+ s: rank \d \(stage \d\) waited 20 s for .*"
    assert lines, output[-4000:]
    for line in lines:
        assert re.fullmatch(rf"{said} \(deepspeed\.init_distributed\(timeout=\.\.\.\)\)", line)


def test_stages_that_owe_each_other_something_end_well() -> None:
    """Under 2bw an acceptor is done with a batch before its partner; nobody has destroyed the process groups."""
    script = Path(__file__).with_name("train_to_the_end.py")
    run = subprocess.run(
        command(4, "deepspeed.pipe,torch._dynamo,torch.optim", script),
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "Error" not in run.stderr
